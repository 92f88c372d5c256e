"""Loads the compiled operators (treewy_sglang/_ops.so) into torch and registers their fakes.

Importing this module needs torch and the built library, nothing else: no CUDA call, no compiler, no network.
"""

from pathlib import Path

import torch

from ._version import minor_release

_PATH = Path(__file__).with_name("_ops.so")
_REBUILD = "pip install --no-build-isolation -e . (in a checkout of treewy_sglang)"


def build_info():
    """Facts of the compiled part: version, git_commit, torch_version, compiler, cuda (bool), cuda_compiler,
    architectures (list such as ["sm_80", "sm_90"]), max_nodes, max_conv_width, and cpu_isa, the instruction set that the
    CPU kernels use on this machine (baseline, avx2, avx512)."""
    return {**_built(), "cpu_isa": torch.ops.treewy.cpu_isa()}


def _built():
    from . import _host

    return _host.build_info()


def _load():
    if not _PATH.exists():
        raise ImportError(f"treewy_sglang is not built: {_PATH} is missing. Build it with: {_REBUILD}")
    built = _built()["torch_version"]
    # Before loading: another torch may have every symbol and still lay its objects out differently.
    if minor_release(built) != minor_release(torch.__version__):
        raise ImportError(
            f"treewy_sglang was built against torch {built} and does not fit torch {torch.__version__}. Install that torch "
            f"with: python -m pip install torch=={built.partition('+')[0]}; or rebuild with: {_REBUILD}"
        )
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as e:
        if built == torch.__version__:
            raise ImportError(
                f"{_PATH} does not load: {e.__cause__ or e}. It is damaged or was built for another machine. Rebuild it with: "
                f"{_REBUILD}. `treewy doctor` says more."
            ) from e
        raise ImportError(
            f"treewy_sglang was built against torch {built} and does not load under torch {torch.__version__}. "
            f"Rebuild it with: {_REBUILD}. `treewy doctor` says more. The loader says: {e.__cause__ or e}"
        ) from e


def _register_fake(name):
    # The operators return nothing and all they write is marked in their schemas, so a fake has nothing to compute; the
    # checks of shapes run in the real kernels. But one meta tensor among real ones also lands here, and must not make the
    # call do nothing in silence.
    arguments = [a.name for a in getattr(torch.ops.treewy, name).default._schema.arguments]

    def fake(*args, **kwargs):
        given = {**dict(zip(arguments, args)), **kwargs}
        tensors = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
        first, lead = next(iter(tensors.items()))
        for n, t in tensors.items():
            if t.device != lead.device:
                raise RuntimeError(
                    f"treewy::{name}: argument '{n}': device is {t.device}; allowed: {lead.device}, the device of '{first}'"
                )

    torch.library.register_fake(f"treewy::{name}", fake)


_load()
for _name in ("tree_verify", "tree_conv_verify", "commit", "parents_from_links"):
    _register_fake(_name)
