"""`treewy doctor` on set-ups that are broken for real: copies of SGLang, of torch and of this package, made of hard links."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from treewy_sglang import doctor, patching
from treewy_sglang.patching import state

SGLANG = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SGLANG is None, reason="sglang is not installed")

SITE = Path(SGLANG.submodule_search_locations[0]).parent if SGLANG else None
PACKAGE = Path(doctor.__file__).resolve().parent
PIN = patching.Series.load().upstream.version

# Runs the command; with facts of torch and the operators that were asked for once, where the set-up has the same.
COMMAND = """
import json, sys
from treewy_sglang import cli, doctor
if sys.argv[1] != "ask":
    doctor.probe = lambda device: json.loads(sys.argv[1])
sys.exit(cli.main(["doctor", *sys.argv[2:]]))
"""


def link(source, target):
    try:
        os.link(source, target)  # the patch tool replaces files and never writes into one
    except OSError:
        os.symlink(source, target) if source.endswith(".so") or ".so." in source else shutil.copy2(source, target)


def write(path: Path, text: str) -> None:
    """Replace a file; its hard links elsewhere keep what they have."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def copy_of_sglang(where: Path, patched: bool) -> Path:
    shutil.copytree(SITE / "sglang", where / "sglang", copy_function=link, ignore=shutil.ignore_patterns("__pycache__", "multimodal_gen"))
    for info in SITE.glob("sglang-*.dist-info"):
        shutil.copytree(info, where / info.name)
    target, series = patching.find_target(where / "sglang"), patching.Series.load()
    if patching.inspect(target, series).applied != patched:
        (patching.apply if patched else patching.revert)(target, series)
    return where / "sglang"


def copy_of_package(where: Path) -> Path:
    """As pip installs it: far from the checkout, with the patches inside."""
    shutil.copytree(PACKAGE, where / "treewy_sglang", copy_function=link, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(patching.locate(), where / "treewy_sglang" / "patches", dirs_exist_ok=True)
    return where / "treewy_sglang"


class Answer:
    def __init__(self, done: subprocess.CompletedProcess):
        assert "Traceback" not in done.stderr, done.stderr
        self.exit, self.text = done.returncode, done.stdout + done.stderr
        self.found = json.loads(done.stdout)
        self.failed = [f for f in self.found["findings"] if f["status"] == "FAIL"]
        assert self.found["can_serve"] is (self.exit == 0) is (not self.failed)

    def only(self, *names: str) -> list[dict]:
        """The problems, which have these names and no others, and a command each."""
        assert [f["name"] for f in self.failed] == list(names), self.text
        assert all(f["mend"] for f in self.failed)
        return self.failed


def run(*path, facts=None, arguments=(), python=(sys.executable,), **more) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, PACKAGE.parent])), "PYTHONDONTWRITEBYTECODE": "1", **more.pop("env", {})}
    return subprocess.run(
        [*python, "-c", COMMAND, "ask" if facts is None else json.dumps(facts), *(arguments or ("--device", "cpu", "--json"))],
        env=environment, capture_output=True, text=True, timeout=300, **more,
    )  # fmt: skip


def ask(*path, **more) -> Answer:
    return Answer(run(*path, **more))


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("patched")
    copy_of_sglang(where, patched=True)
    return where


@pytest.fixture(scope="module")
def facts():
    return doctor.probe("cpu")


@pytest.fixture
def unpatched(tmp_path) -> Path:
    copy_of_sglang(tmp_path, patched=False)
    return tmp_path


def mend(finding: dict, *path, **more) -> None:
    done = subprocess.run(finding["mend"], shell=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, PACKAGE.parent]))}, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the healthy one ------------------------------------------------------------------------------------------------------


def test_healthy(patched):
    answer = ask(patched)
    assert answer.exit == 0, answer.text
    found = {f["name"]: f for f in answer.found["findings"]}
    for name in ("python", "torch", "sglang", "patches", "operators", "self-test"):
        assert found[name]["status"] == "ok", found[name]
    assert "match the float64 reference" in found["self-test"]["detail"]
    assert str(patched) in found["sglang"]["detail"], "another SGLang was looked at"
    assert answer.found["device"] == "cpu"


def test_for_people(patched, facts):
    done = run(patched, facts=facts, arguments=("--device", "cpu"))
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("this machine can serve on cpu.")


# ---- six broken ones --------------------------------------------------------------------------------------------------------


def test_no_patch(unpatched, facts):
    answer = ask(unpatched, facts=facts)
    (problem,) = answer.only("patches")
    assert problem["detail"].startswith("no patch: ")
    mend(problem, unpatched)
    assert ask(unpatched, facts=facts).exit == 0


def test_wrong_sglang(patched, facts, tmp_path):
    shutil.copytree(patched, tmp_path / "site", copy_function=link)
    (info,) = (tmp_path / "site").glob("sglang-*.dist-info")
    other = info.rename(info.with_name("sglang-0.5.16.dist-info"))
    write(other / "METADATA", (other / "METADATA").read_text().replace(f"\nVersion: {PIN}\n", "\nVersion: 0.5.16\n"))
    answer = ask(tmp_path / "site", facts=facts)
    (problem,) = answer.only("sglang")
    assert problem["detail"].startswith("wrong SGLang: 0.5.16 ") and PIN in problem["detail"]
    assert f"pip install sglang=={PIN} && " in problem["mend"] and "patch apply" in problem["mend"]


def test_half_applied_patch(unpatched, patched, facts):
    for name in ("sglang/srt/server_args.py", "sglang/__init__.py"):
        (unpatched / name).unlink()
        shutil.copy2(patched / name, unpatched / name)
    answer = ask(unpatched, facts=facts)
    (problem,) = answer.only("patches")
    assert problem["detail"].startswith("half-applied patches: ")
    mend(problem, unpatched)
    assert ask(unpatched, facts=facts).exit == 0


def test_interrupted_patch(unpatched, facts):
    """What a `treewy patch apply` that dies in between leaves."""
    script = (
        "import os; from treewy_sglang import patching; from treewy_sglang.patching import fs; real, n = fs.replace, [0]\n"
        "def replace(a, b):\n    n[0] += 1\n    os._exit(9) if n[0] == 5 else real(a, b)\n"
        f"fs.replace = replace; patching.apply(patching.find_target({str(unpatched / 'sglang')!r}), patching.Series.load())"
    )
    died = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)})
    assert died.returncode == 9
    (problem,) = ask(unpatched, facts=facts).only("patches")
    assert problem["detail"].startswith("half-applied patches: ")
    mend(problem, unpatched)
    assert ask(unpatched, facts=facts).exit == 0


def test_operators_missing(patched, tmp_path):
    (copy_of_package(tmp_path) / "_ops.so").unlink()
    (problem,) = ask(tmp_path, patched).only("operators")
    assert problem["detail"].startswith("operators missing: _ops.so not found in ")
    assert "pip install" in problem["mend"]


def test_wrong_torch(patched, tmp_path):
    """The same torch that calls itself another release, which is all that tells before something crashes."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    ignore = shutil.ignore_patterns("include", "share", "__pycache__")
    shutil.copytree(torch, tmp_path / "torch", copy_function=link, ignore=ignore)
    for name in ("nvidia", "torchgen", "functorch"):  # libraries are looked for beside torch
        if (torch.parent / name).exists():
            (tmp_path / name).symlink_to(torch.parent / name)
    text = (torch / "version.py").read_text()
    changed = re.sub(r"__version__ = '\d+\.\d+\.", "__version__ = '2.3.", text)
    assert changed != text
    write(tmp_path / "torch" / "version.py", changed)
    problem, consequence = ask(tmp_path, patched).only("torch", "operators")
    assert problem["detail"].startswith("wrong torch: 2.3.")
    wanted = doctor.sglang_requirement("torch")
    assert wanted in problem["detail"] and problem["mend"].endswith(f"pip install torch=={wanted}")
    assert "was built against torch" in consequence["detail"] and "pip install torch==" in consequence["detail"]


def drop_overriding_capabilities():
    """Root without the rights to write where the mode bits say no: CAP_DAC_OVERRIDE, _DAC_READ_SEARCH, _FOWNER leave the
    bounding set, and with it what root has after the next exec. Other users have none of them."""
    if os.geteuid() == 0:
        import ctypes

        for capability in (1, 2, 3):
            assert ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP


@pytest.fixture
def closed(unpatched):
    """An unpatched SGLang whose directories take no new file."""
    places = [Path(d) for d, _, _ in os.walk(unpatched / "sglang")]
    for place in places:
        place.chmod(0o555)
    yield unpatched
    for place in places:
        place.chmod(0o755)


def test_no_write_permission(closed, facts):
    answer = ask(closed, facts=facts, preexec_fn=drop_overriding_capabilities)
    patch, problem = answer.only("patches", "write permission")
    assert problem["detail"].startswith("no write permission for the patches") and str(closed / "sglang") in problem["detail"]
    denied = subprocess.run(patch["mend"], shell=True, env={**os.environ, "PYTHONPATH": f"{closed}{os.pathsep}{PACKAGE.parent}"}, capture_output=True, text=True, preexec_fn=drop_overriding_capabilities)
    assert denied.returncode == 3 and "No permission to write" in denied.stderr, "the set-up is not what it should be"
    mend(problem, closed)
    ask(closed, facts=facts, preexec_fn=drop_overriding_capabilities).only("patches")


# ---- others -----------------------------------------------------------------------------------------------------------------


def test_no_home_to_write_to(patched, facts, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    drop = {name: "" for name in ("TVM_FFI_CACHE_DIR", "SGLANG_CACHE_DIR", "TRITON_CACHE_DIR")}
    answer = ask(patched, facts=facts, env={"HOME": str(home), **drop}, preexec_fn=drop_overriding_capabilities)
    (warning,) = [f for f in answer.found["findings"] if f["name"] == "write permission"]
    assert answer.exit == 0 and warning["status"] == "warn" and str(home) in warning["detail"] and "export HOME" in warning["mend"]


def test_nothing_installed():
    """Neither torch nor SGLang: the standard library alone says so."""
    answer = ask(python=(sys.executable, "-S"))
    torch, sglang = answer.only("torch", "sglang")
    assert torch["detail"] == "torch is not installed" and "pip install torch==" in torch["mend"]
    assert f"pip install sglang=={PIN}" in sglang["mend"]


def test_broken_stamp(patched, facts, tmp_path):
    shutil.copytree(patched, tmp_path / "site", copy_function=link)
    write(tmp_path / "site/sglang" / state.STAMP, "{ not json")
    (problem,) = ask(tmp_path / "site", facts=facts).only("patches")
    assert problem["detail"].startswith("no stamp: ") and "unreadable" in problem["detail"]
    mend(problem, tmp_path / "site")
    assert ask(tmp_path / "site", facts=facts).exit == 0


def test_changed_file(patched, facts, tmp_path):
    shutil.copytree(patched, tmp_path / "site", copy_function=link)
    file = tmp_path / "site/sglang/srt/server_args.py"
    write(file, file.read_text() + "\n")
    (problem,) = ask(tmp_path / "site", facts=facts).only("patches")
    assert "server_args.py" in problem["detail"] and f"--force-reinstall --no-deps sglang=={PIN} && " in problem["mend"]


def test_damaged_series(patched, facts, tmp_path):
    package = copy_of_package(tmp_path)
    write(package / "patches" / "series", "0001-not-there.patch\n")
    (problem,) = ask(tmp_path, patched, facts=facts).only("patches")
    assert "own patches are damaged" in problem["detail"]


@pytest.mark.parametrize("kind", ["no library", "ends the process"])
def test_operators_that_do_not_load(patched, tmp_path, kind):
    library = copy_of_package(tmp_path) / "_ops.so"
    write(library, "not a library\n")
    if kind == "ends the process":
        library.unlink()
        source = "#include <stdlib.h>\n__attribute__((constructor)) static void end(void) { abort(); }\n"
        compiler = [*os.environ.get("CXX", "c++").split(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compiler, input=source, text=True, check=True)
    (problem,) = ask(tmp_path, patched).only("operators")
    assert problem["detail"].startswith("the operators do not load: ")
    assert ("signal 6" if kind == "ends the process" else "file too short") in problem["detail"]


def test_wrong_answers_are_found(monkeypatch, capsys):
    """The self-test fails when an operator's result is off, and so does the command."""
    from treewy_sglang import _probe, ops

    assert "seconds" in _probe.self_test("cpu")
    real = ops.tree_verify

    def wrong(*arguments):
        real(*arguments)
        arguments[10][3, 1, 5] *= 1.01

    monkeypatch.setattr(ops, "tree_verify", wrong)
    assert not _probe.stage("self-test cpu", lambda: _probe.self_test("cpu"))
    printed = capsys.readouterr().out
    assert "outputs [request, node, head, v]" in printed
    error = json.loads(printed.split("PROBE ", 1)[1])["error"]
    (finding,) = doctor.check_self_test("cpu", {"self-test cpu": {"error": error}})
    assert finding.status == "FAIL" and finding.mend


# ---- CUDA, from facts of machines that are not here ---------------------------------------------------------------------------


H200 = {"name": "NVIDIA H200", "capability": [9, 0], "free_bytes": 138 << 30, "total_bytes": 140 << 30}


def cuda(facts, device="cuda", **changes):
    base = {"driver": "13.0", "runtime": "13.0", "devices": [H200], "reason": None}
    built = {**facts["operators"], "cuda": True, "architectures": changes.pop("architectures", ["sm_80", "sm_90"])}
    stages = {**facts, "cuda": {**base, **changes}, "operators": built}
    return [*doctor.check_cuda(device, device, stages), *doctor.check_operators(device, stages)]


def problems(findings):
    return [f for f in findings if f.status == "FAIL"]


def test_gpu_that_serves(facts):
    findings = cuda(facts)
    assert not problems(findings)
    assert any("138.0 of 140.0 GiB" in f.detail for f in findings if f.name == "gpu memory")


def test_gpu_without_code_for_it(facts):
    (problem,) = problems(cuda(facts, devices=[{**H200, "capability": [12, 0]}]))
    assert "none for this GPU (sm_120)" in problem.detail and 'TORCH_CUDA_ARCH_LIST="12.0"' in problem.mend


def test_no_driver_and_torch_without_cuda(facts, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = problems(cuda(facts, driver=None, devices=[], reason="Found no NVIDIA driver"))
    assert "no GPU driver" in problem.detail and problem.mend
    (problem,) = problems(cuda(facts, runtime=None, devices=[], reason="this torch was built without CUDA"))
    assert "--force-reinstall torch" in problem.mend
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = problems(cuda(facts, devices=[], reason="no device"))
    assert problem.mend == "unset CUDA_VISIBLE_DEVICES"


def test_gpu_memory_that_others_hold(facts):
    (warning,) = [f for f in cuda(facts, devices=[{**H200, "free_bytes": 9 << 30}]) if f.status == "warn"]
    assert "9.0 of 140.0 GiB" in warning.detail


@pytest.mark.parametrize(
    ("architectures", "capability", "good"),
    [
        (["sm_80"], (8, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_89"], (8, 6), False),
        (["sm_80"], (9, 0), False),
        (["sm_80+PTX"], (9, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (9, 3), False),
        (["sm_120"], (12, 0), True),
        (["sm_100"], (12, 0), False),
        ([], (9, 0), False),
    ],
)
def test_architectures(architectures, capability, good):
    assert doctor.runs_on(architectures, list(capability)) is good


def test_cuda_here(gpu):
    """With a GPU: everything above for real."""
    answer = ask(arguments=("--device", "cuda", "--json"))
    found = [f for f in answer.found["findings"] if f["name"] == "self-test"]
    assert any(f["status"] == "ok" and f["detail"].startswith("cuda: ") for f in found), answer.text
