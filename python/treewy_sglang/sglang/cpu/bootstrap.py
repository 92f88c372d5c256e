"""Decides whether this process serves on CPU, and puts the stand-in ``sgl_kernel`` in front of the wheel.

The wheel of sgl_kernel on the package registry holds CUDA libraries only, and importing it without a GPU
driver raises ImportError. A CPU build (which SGLang's CPU path was written for) is on no registry. Both facts
are found out from the file system, so nothing is imported here and a CUDA server pays a few microseconds.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Mapping, MutableMapping, Optional, Sequence

from treewy_sglang.sglang import float32

OVERLAY = Path(__file__).resolve().parent / "overlay"
_CUDA_FOLDERS = ("sm90", "sm100")


def option(argv: Sequence[str], name: str) -> Optional[str]:
    """Value of ``name VALUE`` or ``name=VALUE`` on a command line, the last one given; None if it is not there."""
    value = None
    for position, word in enumerate(argv):
        if word == name and position + 1 < len(argv):
            value = argv[position + 1]
        elif word.startswith(name + "="):
            value = word.split("=", 1)[1]
    return value


def is_sglang_command(argv: Sequence[str]) -> bool:
    """True for ``sglang ...``, ``python -m sglang.module ...`` and processes these start; the options of other programs
    that import SGLang are none of our business. (While Python looks a module up for -m, argv[0] is ``-m``.)"""
    program = Path(argv[0]) if argv else Path()
    return program.name in ("-m", "sglang") or program.parent.name == "sglang"


def wants_cpu(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True if SGLang's command line says ``--device cpu``, or says nothing and the environment asks for it."""
    device = option(argv, "--device") if is_sglang_command(argv) else None
    if device is not None:
        return device == "cpu"
    return environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1"


def set_defaults(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Environment of a server on CPU, where the user did not choose otherwise.

    With ``--dtype float32``, convolution states are kept in float32 too. SGLang keeps them in bfloat16 by default,
    whatever the dtype of the model; then the answer to a prompt depends on where its prefill ended, and a float32 model
    does not give what transformers gives.

    Without ``--enable-torch-compile``, nothing is compiled. SGLang decorates a few helpers of some microseconds with
    torch.compile; on CPU each costs seconds of a C++ compiler when the first request comes in.

    OpenMP threads sleep while they wait. A server is three processes or more, whose threads would otherwise keep each
    other from running.
    """
    environ.setdefault("OMP_WAIT_POLICY", "passive")
    if option(argv, "--dtype") in ("float32", "float"):
        environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    if "--enable-torch-compile" not in argv:
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def wheel_folder() -> Optional[Path]:
    """Folder of the installed sgl_kernel, looked up past the overlay; None if there is none."""
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != OVERLAY]
    spec = importlib.machinery.PathFinder.find_spec("sgl_kernel", path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(list(spec.submodule_search_locations)[0])


def is_cuda_wheel(folder: Path) -> bool:
    """A CUDA wheel keeps its operators in one folder per architecture; a CPU build has them beside ``__init__``."""
    return any((folder / name).is_dir() for name in _CUDA_FOLDERS)


def start_by_fork(environ: Mapping[str, str]) -> bool:
    """With ``TREEWY_CPU_FORK=1``, scheduler and detokenizer are forked off the server instead of started afresh.

    Each of the three processes otherwise imports all of SGLang, about 20 s of one core. Forking is safe only where
    nothing runs yet in the parent, as in a server of one's own that has just come up; not in a program that holds
    threads or has computed with several of them. Returns True if SGLang's choice of start method is overridden.
    """
    if environ.get("TREEWY_CPU_FORK", "0") != "1":
        return False
    import multiprocessing

    if not hasattr(multiprocessing.set_start_method, "treewy"):
        original = multiprocessing.set_start_method

        def set_start_method(method, force=False):
            original("fork" if method == "spawn" else method, force=force)

        set_start_method.treewy = True
        multiprocessing.set_start_method = set_start_method
    return True


def activate(
    argv: Optional[Sequence[str]] = None, environ: Optional[MutableMapping[str, str]] = None
) -> bool:
    """Put the overlay first on the import path of this process and of its children; True if it is there.

    Unless CPU is asked for, only :mod:`..float32` is given its chance. A CPU build of sgl_kernel is left alone, and so is a
    stand-in that the user put on PYTHONPATH.
    """
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    if not wants_cpu(argv, environ):
        float32.activate(environ)
        return False
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    set_defaults(argv, environ)
    folder = wheel_folder()
    if folder is not None and not is_cuda_wheel(folder):
        return False
    # A GPU that is present must not be half used: is_cuda() would win over --device cpu in many modules.
    environ["CUDA_VISIBLE_DEVICES"] = ""
    overlay = str(OVERLAY)
    if overlay not in sys.path:
        sys.path.insert(0, overlay)
    inherited = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if overlay not in inherited:
        environ["PYTHONPATH"] = os.pathsep.join([overlay, *inherited])
    return True


def is_active() -> bool:
    """True if the stand-in is what ``import sgl_kernel`` gave this process."""
    module = sys.modules.get("sgl_kernel")
    return module is not None and Path(module.__file__ or "").resolve().parent.parent == OVERLAY
