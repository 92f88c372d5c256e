"""Loads the compiled operators (treewy_sglang/_ops.so) into torch and registers their fakes.

Importing this module needs torch and the built library, nothing else: no CUDA call, no compiler, no network.
"""

from pathlib import Path

import torch

_PATH = Path(__file__).with_name("_ops.so")
_REBUILD = "pip install --no-build-isolation -e . (in a checkout of treewy_sglang)"


def build_info():
    """Facts of the compiled part: version, git_commit, torch_version, compiler, cuda (bool), cuda_compiler,
    architectures (list such as ["sm_80", "sm_90"]), max_nodes, max_conv_width."""
    from . import _host

    return _host.build_info()


def _load():
    if not _PATH.exists():
        raise ImportError(f"treewy_sglang is not built: {_PATH} is missing. Build it with: {_REBUILD}")
    try:
        torch.ops.load_library(str(_PATH))
    except OSError as e:
        # Almost always another torch than the one it was built against; say which before the linker's message.
        built = build_info()["torch_version"]
        raise ImportError(
            f"treewy_sglang was built against torch {built} and does not load under torch {torch.__version__}. "
            f"Rebuild it with: {_REBUILD}. The loader says: {e}"
        ) from e


def _register_fakes():
    # The operators return nothing and all they write is marked in their schemas, so a fake has nothing to compute. The
    # checks of shapes run in the real kernels.
    def fake(*args, **kwargs):
        return None

    for name in ("tree_verify", "tree_conv_verify", "commit", "parents_from_links"):
        torch.library.register_fake(f"treewy::{name}", fake)


_load()
_register_fakes()
