"""TreeWY: draft-tree verification for Gated DeltaNet layers without one state copy per draft token.

Importing this package loads nothing heavy: no torch, no compiled library, no CUDA. Its parts load on first use:

    treewy_sglang.ops            the four operators (torch.ops.treewy.* with checks of the Python side)
    treewy_sglang.Stash          what verify leaves for commit
    treewy_sglang.check_errors   counters of bad values found inside tensors
    treewy_sglang.build_info     what the compiled library was built from and for
    treewy_sglang.reference      the same mathematics in float64
"""

import importlib

from ._version import __version__

__all__ = ["Stash", "StashLayer", "__version__", "build_info", "check_errors", "ops", "reference", "testing", "tree"]

_LAZY = {
    "Stash": ("stash", "Stash"),
    "StashLayer": ("stash", "StashLayer"),
    "check_errors": ("errors", "check_errors"),
    "build_info": ("_library", "build_info"),
}
_MODULES = ("errors", "ops", "reference", "stash", "testing", "tree")


def __getattr__(name):
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module("." + module, __name__), attribute)
    if name in _MODULES:
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
