"""tools/environment.py: what it says on a machine that lacks something, and when it has nothing to do."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("environment", ROOT / "tools" / "environment.py")
environment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(environment)


def test_pin_comes_from_upstream():
    assert environment.pinned_version() in (ROOT / "patches" / "UPSTREAM").read_text()


def test_everything_missing_is_named_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(environment.sys, "version_info", (3, 8, 0, "final", 0))
    monkeypatch.setattr(environment, "NEEDED_GIB", 10**9)
    with pytest.raises(environment.Stop) as stop:
        environment.check_machine(tmp_path / "venv")
    for word in ("Python 3.10", "python3-dev", "g++", "GiB of free disk"):
        assert word in str(stop.value)


def test_missing_venv_module(monkeypatch, tmp_path):
    monkeypatch.setitem(environment.sys.modules, "ensurepip", None)  # import raises ImportError, as on a bare Debian
    with pytest.raises(environment.Stop, match="python3-venv"):
        environment.check_machine(tmp_path / "venv")


def test_stamp_holds_until_an_input_changes(tmp_path):
    env = environment.Environment(tmp_path, "all")
    assert not env.fresh("step", "a")
    env.stamp("step", "a")
    assert env.fresh("step", "a") and not env.fresh("step", "b")


def test_failed_command_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(environment.Stop, match="(?s)exit code 3.*the reason"):
        environment.run("step", ["sh", "-c", "echo the reason; exit 3"], tmp_path / "log", tmp_path)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Downloading https://host/path/torch-2.11.0-cp311-cp311-linux_x86_64.whl (900.1 MB)", "torch-2.11.0 (900.1 MB)"),
        ("Downloading small-1.0-py3-none-any.whl (12 kB)", None),
        ("  treewy: building CPU-only operators: nvcc not found", "treewy: building CPU-only operators: nvcc not found"),
        ("[3/6] c++ /a/b/cpu_kernels_avx2.o", "[3/6] c++ cpu_kernels_avx2.o"),
        ("anything else", None),
    ],
)
def test_progress_lines(line, shown):
    assert environment.show(line) == shown
