"""The one place that holds the version; setup.py and pyproject.toml read it from here."""

__version__ = "0.1.0"


def minor_release(version):
    """2.11.0+cu130 -> ["2", "11"]: torch keeps its C++ interface within one of these."""
    return version.partition("+")[0].split(".")[:2]
