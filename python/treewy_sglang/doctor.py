"""`treewy doctor`: can this machine serve, and if not, what mends it.

Looks at the machine, at torch, CUDA and SGLang, at the patches, and at the operators, which it runs against the float64
reference. Changes nothing. A part that is missing or broken is reported like any other finding; what could end the process
(torch, the compiled library, the GPU) is asked in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Optional

from ._version import __version__, minor_release
from .patching import PatchError, Series, Target, find_target, inspect, installed_root, state
from .patching.target import find_version, same_version

PACKAGE = Path(__file__).resolve().parent
OK, WARN, FAIL, NOTE = "ok", "warn", "FAIL", "note"
PROBE_TIMEOUT = 300.0  # s; the first CUDA context on a busy machine takes tens of seconds
GIB = 2**30
_EPILOG = """\
ok: fine   note: cannot be judged, or does not matter here   warn: serves, but read it   FAIL: cannot serve until it is mended

exit codes:
  0  this machine can serve on the device named in the last line
  1  it cannot; every FAIL has the command that mends it
  2  wrong usage
"""


@dataclass(frozen=True)
class Finding:
    name: str
    status: str  # OK, WARN, FAIL or NOTE
    detail: str
    mend: Optional[str] = None  # a command for the shell


def python() -> str:
    return shlex.quote(sys.executable)


def pip(what: str) -> str:
    return f"{python()} -m pip install {what}"


def patch(action: str, root: Path) -> str:
    return f"{python()} -m treewy_sglang patch {action} {shlex.quote(str(root))}"


def checkout() -> Optional[Path]:
    """The source tree that this package runs from, if it is one."""
    top = PACKAGE.parents[1]
    return top if PACKAGE.parent.name == "python" and (top / "setup.py").is_file() else None


def reinstall(settings: str = "") -> str:
    """Put this package's compiled part in place again; `settings`: environment of a build."""
    if (top := checkout()) is not None:
        return f"{settings} {pip(f'--no-build-isolation --no-deps -e {shlex.quote(str(top))}')}".strip()
    try:  # what pip notes of an installation from a file or a directory
        url = json.loads(importlib.metadata.distribution("treewy-sglang").read_text("direct_url.json") or "{}").get("url")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        url = None
    if settings:  # a wheel has what it has: another build is needed
        return f"{settings} {pip('--no-build-isolation --no-deps --force-reinstall CHECKOUT')}  # CHECKOUT: this package's source, {__version__}"
    if url is None:
        return f"{pip('--force-reinstall --no-deps WHEEL')}  # WHEEL: the file of this package's wheel, {__version__}"
    built = url.endswith(".whl")  # else it is compiled, against the torch that is here
    return pip(f"{'' if built else '--no-build-isolation '}--force-reinstall --no-deps {shlex.quote(url)}")


# ---- what torch and the operators say ------------------------------------------------------------------------------------


def probe(device: str) -> dict[str, dict[str, Any]]:
    """Facts by stage of `_probe`; a stage that could not be finished has the key "error"."""
    # The same modules as this process finds, whatever put them on its path.
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from treewy_sglang._probe import main; main(sys.argv[2] == '1')"
    paths = [str(PACKAGE.parent) if entry == "" else entry for entry in sys.path]
    if str(PACKAGE.parent) not in map(os.path.abspath, paths):
        paths.append(str(PACKAGE.parent))
    command = [sys.executable, "-B", "-c", code, json.dumps(paths), "01"[device != "cpu"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT, stdin=subprocess.DEVNULL)
        output, end = done.stdout, f"ended with {_exit(done.returncode)}"
        last = done.stderr.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired as expired:
        output, end, last = (expired.stdout or b"").decode(errors="replace"), f"did not answer within {PROBE_TIMEOUT:.0f} s", []
    stages: dict[str, dict[str, Any]] = {}
    begun = None
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "BEGIN":
            begun = rest
        elif word == "PROBE":
            facts = json.loads(rest)
            stages[facts.pop("stage")] = facts
            begun = None
    if begun is not None or not stages:
        stages[begun or "build"] = {"error": ": ".join([f"Python {end}", *last])}
    return stages


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# ---- findings ------------------------------------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    if sys.version_info < (3, 10):
        yield Finding("python", FAIL, f"{detail}; 3.10 or newer is needed", "python3.12 -m venv env  # then install into it")
    elif sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        yield Finding("python", FAIL, f"{detail}; SGLang and the operators need Linux on x86-64", "ssh HOST  # a Linux machine on x86-64")
    else:
        yield Finding("python", OK, detail)


def sglang_requirement(name: str) -> Optional[str]:
    """The version of `name` that the installed SGLang asks for with ==."""
    try:
        requirements = importlib.metadata.requires("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [m[1] for r in requirements if (m := re.match(rf"{re.escape(name)}\s*==\s*([^\s;,]+)\s*$", r))]
    return found[0] if found else None


def check_torch(stages: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    facts, built = stages.get("torch"), stages.get("build", {}).get("torch_version")
    if facts is None:
        yield Finding("torch", NOTE, "not looked at: Python did not get that far")
        return
    wanted = sglang_requirement("torch") or (built and built.partition("+")[0])
    mend = pip(f"torch=={wanted}" if wanted else "torch")
    if "error" in facts:
        missing = facts["error"].startswith("ModuleNotFoundError") and "'torch'" in facts["error"]
        yield Finding("torch", FAIL, "torch is not installed" if missing else f"torch does not load: {facts['error']}",
                      mend if missing else pip(f"--force-reinstall torch=={wanted}" if wanted else "--force-reinstall torch"))  # fmt: skip
        return
    detail = f"{facts['version']} (CUDA {facts['cuda'] or 'none'})"
    if wanted and minor_release(facts["version"]) != minor_release(wanted):
        who = "SGLang here requires" if sglang_requirement("torch") else "the operators were built against"
        yield Finding("torch", FAIL, f"wrong torch: {detail}, but {who} {wanted}", mend)
    elif built and minor_release(facts["version"]) != minor_release(built):
        yield Finding("torch", FAIL, f"wrong torch for these operators: {detail}, and they were built against {built}", reinstall())
    else:
        yield Finding("torch", OK, detail)


def runs_on(architectures: list[str], capability: list[int]) -> bool:
    """Whether code for sm_XY runs on a GPU of this capability: the same major number and no higher minor one; sm_XYa: that
    very one; +PTX: anything from there on."""
    major, minor = capability
    for name in architectures:
        found = re.fullmatch(r"sm_(\d+)(\d)([af]?)(\+PTX)?", name)
        if not found:
            continue
        at = (int(found[1]), int(found[2]))
        if found[3] == "a":
            good = at == (major, minor)
        else:
            good = at[0] == major and at[1] <= minor or bool(found[4]) and at <= (major, minor)
        if good:
            return True
    return False


def choose_device(wish: str, stages: dict[str, dict[str, Any]]) -> str:
    if wish != "auto":
        return wish
    return "cuda" if stages.get("cuda", {}).get("devices") else "cpu"


def check_cuda(device: str, wish: str, stages: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    facts = stages.get("cuda")
    if facts is None:
        yield Finding("cuda", NOTE, "not looked at: it takes torch")
        return
    if "error" in facts:
        yield Finding("cuda", FAIL if device == "cuda" else WARN, f"torch cannot be asked about GPUs: {facts['error']}", "nvidia-smi")
        return
    about = f"driver {'for CUDA ' + facts['driver'] if facts['driver'] else 'none'}, runtime {facts['runtime'] or 'none'}"
    if not facts["devices"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if device == "cpu":
            there = Path("/dev/nvidiactl").exists() and hidden is None
            if there and wish == "auto":
                yield Finding("cuda", WARN, f"a GPU is there, but torch cannot use it ({about}): {facts['reason']}", "nvidia-smi  # the driver must be at least as new as the runtime")
            else:
                yield Finding("cuda", NOTE, f"no GPU, none is needed on CPU ({about})")
        elif facts["runtime"] is None:
            wanted = sglang_requirement("torch")
            yield Finding("cuda", FAIL, f"{facts['reason']}", pip(f"--force-reinstall torch{'==' + wanted if wanted else ''}"))
        elif hidden is not None and not hidden.strip():
            yield Finding("cuda", FAIL, f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
        elif facts["driver"] is None:
            yield Finding("cuda", FAIL, f"no GPU driver ({about}): {facts['reason']}",
                          "apt-get install nvidia-driver  # in a container: docker run --gpus all ...; without a GPU: --device cpu")  # fmt: skip
        else:
            yield Finding("cuda", FAIL, f"torch cannot use the GPU ({about}): {facts['reason']}",
                          "apt-get install --only-upgrade nvidia-driver  # the driver must be at least as new as the runtime")  # fmt: skip
        return
    status = OK if device == "cuda" else NOTE
    for index, gpu in enumerate(facts["devices"]):
        major, minor = gpu["capability"]
        yield Finding("cuda", status, f"GPU {index}: {gpu['name']}, sm_{major}{minor}, {about}")
    if device == "cuda":
        for index, gpu in enumerate(facts["devices"]):
            free, total = gpu["free_bytes"], gpu["total_bytes"]
            detail = f"GPU {index}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free"
            if free < 0.5 * total:
                yield Finding("gpu memory", WARN, f"{detail}: another process holds the rest, and SGLang sizes its pools by the whole", "nvidia-smi  # names the processes")
            else:
                yield Finding("gpu memory", OK, detail)


def find_sglang() -> Optional[Target]:
    try:
        return find_target(installed_root())
    except PatchError:
        return None


def check_sglang(target: Optional[Target], series: Optional[Series]) -> Iterator[Finding]:
    pin = series.upstream.version if series else None
    install = pip(f"sglang=={pin}" if pin else "sglang")
    if target is None:
        yield Finding("sglang", FAIL, f"SGLang is not installed for {sys.executable}", install)
        return
    version = find_version(target)
    detail = f"{version or 'unknown version'} in {target.root}"
    if pin is None:
        yield Finding("sglang", NOTE, detail)
    elif version is not None and not same_version(version, pin):
        if target.checkout is not None:
            install = f"git -C {shlex.quote(str(target.checkout))} checkout {series.upstream.tag}"
        yield Finding("sglang", FAIL, f"wrong SGLang: {detail}; the patches are for {pin} and no other", f"{install} && {patch('apply', target.root)}")
    else:
        yield Finding("sglang", OK, detail)
        yield from check_dependencies()


def check_dependencies() -> Iterator[Finding]:
    """What SGLang pins with ==, but for torch, which has a finding of its own."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return
    try:
        requirements = [Requirement(r) for r in importlib.metadata.requires("sglang") or []]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return
    odd, wanted = [], []
    for need in requirements:
        pinned = len(need.specifier) == 1 and next(iter(need.specifier)).operator == "=="
        if need.name == "torch" or not pinned or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found is None or not need.specifier.contains(found, prereleases=True):
            odd.append(f"{need.name} {found or 'missing'} (for {need.specifier})")
            wanted.append(f"{need.name}{need.specifier}")
    if odd:
        yield Finding("sglang", WARN, "other packages than this SGLang was released with: " + ", ".join(odd), pip(" ".join(wanted)))


def check_patches(target: Optional[Target], series: Optional[Series], series_error: str) -> tuple[list[Finding], bool]:
    """The findings, and whether the patch tool still has to write."""
    if series is None:
        return [Finding("patches", FAIL, f"the package's own patches are damaged: {series_error}", reinstall())], False
    if target is None:
        return [Finding("patches", NOTE, "not looked at: there is no SGLang")], False
    root, pin = target.root, series.upstream
    again = pip(f"--force-reinstall --no-deps sglang=={pin.version}")
    if target.checkout is not None:
        again = f"git -C {shlex.quote(str(target.checkout))} checkout {pin.tag} -- python/sglang"
    try:
        status = inspect(target, series)
    except PatchError as error:
        return [Finding("patches", FAIL, str(error), f"{again} && {patch('apply', root)}")], True
    apply, start_again = patch("apply", root), f"{patch('revert', root)} && {patch('apply', root)}"
    detail = " ".join([status.detail, *status.notes])
    if status.state == state.APPLIED:
        return [Finding("patches", OK, detail)], False
    if status.state == state.WRONG_VERSION:
        return [Finding("patches", NOTE, "not looked at: they are for another SGLang")], False
    name, mend = {
        state.UNPATCHED: ("no patch", apply),
        state.OUTDATED: ("patches of another TreeWY", apply),
        state.UNSTAMPED: ("no stamp", apply),
        state.PARTIAL: ("half-applied patches", start_again),
        state.INTERRUPTED: ("half-applied patches", start_again),
        state.MODIFIED: ("changed files", f"{again} && {apply}"),
    }[status.state]
    return [Finding("patches", FAIL, f"{name}: {detail}", mend)], True


def check_operators(device: str, stages: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    host = [PACKAGE / f"_host{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    missing = [] if (PACKAGE / "_ops.so").exists() else ["_ops.so"]
    missing += [] if any(p.exists() for p in host) else [f"_host for Python {platform.python_version()}"]
    if missing:
        yield Finding("operators", FAIL, f"operators missing: {' and '.join(missing)} not found in {PACKAGE}", reinstall())
        return
    facts = stages["build"] if "error" in stages["build"] else stages.get("operators")
    if facts is None:
        yield Finding("operators", NOTE, f"built against torch {stages['build']['torch_version']}; not loaded: they load into torch")
        return
    if "error" in facts:
        yield Finding("operators", FAIL, f"the operators do not load: {facts['error']}", reinstall())
        return
    built = ";".join(facts["architectures"]) if facts["cuda"] else "CPU only"
    detail = f"built from {facts['git_commit']} for {built}; CPU kernels: {facts['cpu_isa']}"
    if facts["version"] != __version__:
        yield Finding("operators", FAIL, f"{detail}; they are of version {facts['version']}, the package is {__version__}", reinstall())
        return
    gpus = stages.get("cuda", {}).get("devices") or []
    if device == "cuda" and not facts["cuda"]:
        yield Finding("operators", FAIL, f"{detail}: no CUDA operators", f"{reinstall('TREEWY_CUDA=1')}  # where nvcc is")
        return
    foreign = sorted({tuple(g["capability"]) for g in gpus if not runs_on(facts["architectures"], g["capability"])})
    if device == "cuda" and foreign:
        names = ", ".join(f"sm_{major}{minor}" for major, minor in foreign)
        wanted = ";".join(sorted({f"{g['capability'][0]}.{g['capability'][1]}" for g in gpus}))
        mend = f'{reinstall(f"""TREEWY_CUDA=1 TORCH_CUDA_ARCH_LIST="{wanted}" """.strip())}  # where nvcc is'
        yield Finding("operators", FAIL, f"{detail}: none for this GPU ({names})", mend)
        return
    yield Finding("operators", OK, detail)


def check_self_test(device: str, stages: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    for where in ("cpu", "cuda"):
        facts = stages.get(f"self-test {where}")
        if facts is None:
            if where == device:
                yield Finding("self-test", NOTE, f"not run on {where}")
        elif "error" in facts:
            status = FAIL if where == device else WARN
            yield Finding("self-test", status, f"the operators answer wrongly on {where}: {facts['error']}", reinstall())
        else:
            yield Finding("self-test", OK, f"{where}: random trees of {facts['nodes']} nodes match the float64 reference ({facts['seconds']:.2f} s)")


def can_write(directory: Path) -> Optional[str]:
    """None if a file can be made in `directory` (or, where that does not exist yet, above it), else why not."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return f"{directory}: {error.strerror}"


def owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError, NotImplementedError):
        return "another user"


def check_writing(device: str, target: Optional[Target], must_patch: bool, series: Optional[Series]) -> Iterator[Finding]:
    if target is not None and must_patch:
        places = {target.root, *((target.root / f.relative).parent for f in (series.upstream.files if series else ()))}
        shut = [reason for p in sorted(places) if (reason := can_write(p))]
        if shut:
            who = owner(target.root)
            home = shlex.quote(str(target.root))
            mend = f"sudo -u {shlex.quote(who)} {patch('apply', target.root)}" if _stranger(target.root) else f"chmod -R u+w {home}"
            if "Read-only" in shut[0]:
                mend = f'{python()} -m venv env && env/bin/pip install "WHEEL[sglang]"  # WHEEL: the wheel file of TreeWY'
            yield Finding("write permission", FAIL, f"no write permission for the patches (SGLang belongs to {who}): {shut[0]}", mend)
    temporary = closed = None
    try:
        temporary = Path(tempfile.gettempdir())
        closed = can_write(temporary)
    except OSError as error:
        closed = error.strerror or str(error)
    if closed:
        yield Finding("write permission", FAIL, f"no write permission for temporary files, through which a server's processes talk: {closed}",
                      'mkdir -p "$PWD/tmp" && export TMPDIR="$PWD/tmp"')  # fmt: skip
    needs = {"TVM_FFI_CACHE_DIR": "~/.cache/tvm-ffi", "SGLANG_CACHE_DIR": "~/.cache/sglang", "TRITON_CACHE_DIR": "~/.triton/cache"}
    refused, free = [], {}
    for name, default in needs.items():
        try:
            place = Path(os.environ.get(name) or default).expanduser()
        except RuntimeError:  # no HOME and no entry in the user database
            refused.append("no home directory")
            continue
        if reason := can_write(place):
            refused.append(reason)
        else:
            free[name] = _free(place)
    if refused:
        what = "kernels compiled at start" if device == "cuda" else "what SGLang compiles for NGRAM drafts"
        yield Finding("write permission", FAIL if device == "cuda" else WARN, f"no write permission for {what}: {', '.join(dict.fromkeys(refused))}",
                      'mkdir -p "$PWD/home" && export HOME="$PWD/home"')  # fmt: skip
    if temporary is not None:
        free["TMPDIR"] = _free(temporary)
    least = min(free, key=free.get, default=None)
    if least is not None and free[least] < GIB:
        yield Finding("disk", WARN, f"{free[least] / GIB:.2f} GiB are free for {least}", f"df -h  # then set {least} to a directory with room")
    elif not refused and not closed:
        yield Finding("write permission", OK, "temporary files and caches" + (", SGLang's directory" if must_patch else ""))


def _stranger(path: Path) -> bool:
    return hasattr(os, "geteuid") and path.stat().st_uid != os.geteuid()


def _free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def check_memory() -> Iterator[Finding]:
    try:
        values = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
        available, total = (int(values[k]) * 1024 for k in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return
    yield Finding("memory", NOTE, f"{available / GIB:.1f} of {total / GIB:.1f} GiB are available")


def check_compiler() -> Iterator[Finding]:
    setting = os.environ.get("CXX") or "c++"
    try:
        compiler = (shlex.split(setting) or [setting])[0]
    except ValueError:  # an unclosed quote
        compiler = setting
    if not shutil.which(compiler):
        yield Finding("compiler", WARN, f"no C++ compiler (CXX: {compiler}): SGLang compiles a part of NGRAM drafts at start; NEXTN drafts need none", "apt-get install g++")


def examine(wish: str = "auto") -> tuple[str, list[Finding]]:
    """(device, findings) for serving on `wish`: "cpu", "cuda", or "auto" for CUDA where torch sees a GPU. Never raises for
    what it finds; whether the machine can serve is whether no finding is a FAIL."""
    stages = probe(wish)
    device = choose_device(wish, stages)
    series, series_error = None, ""
    try:
        series = Series.load()
    except PatchError as error:
        series_error = str(error)
    target = find_sglang()
    patches, must_patch = check_patches(target, series, series_error)
    findings: list[Finding] = []
    for name, check in (
        ("python", check_python()),
        ("torch", check_torch(stages)),
        ("cuda", check_cuda(device, wish, stages)),
        ("sglang", check_sglang(target, series)),
        ("patches", patches),
        ("operators", check_operators(device, stages)),
        ("self-test", check_self_test(device, stages)),
        ("write permission", check_writing(device, target, must_patch, series)),
        ("compiler", check_compiler()),
        ("memory", check_memory()),
    ):
        try:
            findings.extend(check)
        except Exception as error:  # a machine that is odder than was thought of: said, and the rest still looked at
            findings.append(Finding(name, FAIL, f"could not be looked at: {type(error).__name__}: {error}", reinstall()))
    return device, findings


def report(device: str, findings: list[Finding]) -> str:
    width = max(len(f.name) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.status:<5} {f.name:<{width}}  {f.detail}")
        if f.mend:
            lines.append(f"{'':<5} {'':<{width}}  mend: {f.mend}")
    bad = sum(f.status == FAIL for f in findings)
    lines.append(f"treewy {__version__}: this machine can serve on {device}." if not bad
                 else f"treewy {__version__}: this machine cannot serve on {device}: {bad} problem{'s' * (bad > 1)}.")  # fmt: skip
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    device, findings = examine(options.device)
    good = not any(f.status == FAIL for f in findings)
    if options.json:
        print(json.dumps({"treewy": __version__, "device": device, "can_serve": good, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print(report(device, findings))
    return 0 if good else 1


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "doctor", help="say whether this machine can serve, and what mends it",
        description="Say whether this machine can serve, and for each problem the command that mends it. Changes nothing.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to serve on; auto: cuda where torch sees a GPU")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)
