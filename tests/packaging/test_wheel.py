"""What is shipped: the archive of the sources, the Python files and patches of a wheel, and, with --wheel FILE, a built
wheel in an environment of its own, from nothing to a first answer."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from treewy_sglang.patching import Series

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build():
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("treewy_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_setup(where: Path, *arguments: str) -> None:
    """setup.py in a copy of the sources, so that nothing is left behind in the checkout."""
    copy = where / "sources"
    if not copy.exists():
        everywhere = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        at_top = {".venv", ".git", "build", "dist", ".demo", ".hypothesis", ".pytest_cache"}
        shutil.copytree(ROOT, copy, ignore=lambda d, names: {*everywhere(d, names), *(at_top if Path(d) == ROOT else ())})
    done = subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def package_files(top: Path) -> set[str]:
    return {str(p.relative_to(top)) for p in (top / "treewy_sglang").rglob("*") if p.is_file() and p.suffix in (".py", ".patch", "")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The pure part of a wheel, far from any checkout."""
    where = tmp_path_factory.mktemp("wheel")
    run_setup(where, "build_py", "--build-lib", str(where / "site"))
    return where / "site"


def series_files() -> set[str]:
    return {p.name for p in (ROOT / "patches").iterdir() if p.suffix == ".patch" or p.name in ("UPSTREAM", "series")}


def test_wheel_holds_every_module_and_the_series(installed):
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python" / "treewy_sglang").rglob("*.py")}
    assert package_files(installed) == sources | {f"treewy_sglang/patches/{name}" for name in series_files()}
    for name in series_files():
        assert (installed / "treewy_sglang/patches" / name).read_bytes() == (ROOT / "patches" / name).read_bytes()


def test_series_is_found_without_a_checkout(installed, tmp_path):
    """The same series as the checkout's, by the installed files alone."""
    script = "import json; from treewy_sglang.patching import Series, locate; print(json.dumps([Series.load().digest, str(locate())]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [Series.load(ROOT / "patches").digest, str(installed / "treewy_sglang/patches")]


def test_source_archive_builds_by_itself(tmp_path):
    run_setup(tmp_path, "sdist", "--dist-dir", str(tmp_path / "dist"))
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {n.partition("/")[2]: n for n in tar.getnames()}
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", tar.extractfile(names["GIT_COMMIT"]).read().decode().strip())
    wanted = {str(p.relative_to(ROOT)) for top in ("csrc", "patches", "tests", "docs", "tools", "bench") for p in (ROOT / top).rglob("*")
              if p.is_file() and "__pycache__" not in p.parts}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "python/treewy_sglang").rglob("*.py")}
    wanted |= {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"}
    assert not sorted(wanted - set(names)), "missing from the archive"
    assert not [n for n in names if n.endswith((".so", ".pyc"))]


def test_commit_of_an_enclosing_repository_is_not_taken(build, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "-q", "--allow-empty", "-m", "other"]
    subprocess.run(commit, check=True)
    inner = tmp_path / "unpacked"
    inner.mkdir()
    monkeypatch.setattr(build, "ROOT", inner)
    assert build.git_commit() == "unknown"
    (inner / "GIT_COMMIT").write_text("0123456789ab\n")
    assert build.git_commit() == "0123456789ab"
    monkeypatch.setattr(build, "ROOT", tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", build.git_commit())


def test_requirements(build, monkeypatch):
    """SGLang as pinned by the patches; torch as compiled against, and in pyproject.toml as that SGLang requires it."""
    pin = Series.load().upstream.version
    assert build.EXTRAS["sglang"] == [f"sglang=={pin}"]
    monkeypatch.setattr(build.importlib.metadata, "version", lambda name: "2.13.1+cu130")
    assert build.required_torch() == "torch==2.13.*"
    monkeypatch.undo()
    needed = [r for r in importlib.metadata.requires("sglang") if re.match(r"torch==", r)]
    assert len(needed) == 1 and f'"{needed[0]}"' in (ROOT / "pyproject.toml").read_text()


# The whole way, opted into: pytest tests/packaging --wheel dist/NAME.whl (some 10 GB of disk, minutes of downloads).

FIRST_HOUR = (  # README: four commands in an empty directory; WHEEL is a file, or treewy-sglang where an index has it
    "{python} -m venv env",
    'env/bin/pip install "{wheel}[sglang]"',
    "env/bin/treewy patch apply",
    "env/bin/treewy demo --device cpu --modes plain tree --tokens 32",
)


def test_a_new_user_reaches_an_answer(request, tmp_path):
    wheel = request.config.getoption("--wheel")
    if wheel is None:
        return  # opted into with --wheel
    assert len(FIRST_HOUR) <= 4
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    directory = tmp_path / "clean"
    directory.mkdir()
    try:
        for command in FIRST_HOUR:
            command = command.format(python=sys.executable, wheel=Path(wheel).resolve())
            done = subprocess.run(command, shell=True, cwd=directory, env=environment, capture_output=True, text=True)
            print(f"$ {command}\n{done.stdout}{done.stderr}")
            assert done.returncode == 0, command
        assert "every answer is the same with and without drafts" in done.stdout
        answer = re.search(r"the answer as it comes:\n +(.+)", done.stdout)
        assert answer and len(answer[1].strip()) > 8, "no answer was printed"
        smoke = "import treewy_sglang as t, json; from treewy_sglang import ops; print(json.dumps(dict(t.build_info(), file=t.__file__)))"
        done = subprocess.run(["env/bin/python", "-c", smoke], cwd=directory, env=environment, capture_output=True, text=True, check=True)
        built = json.loads(done.stdout)
        print(built)
        assert built["file"].startswith(str(directory / "env")), "not the wheel's"
        assert built["version"] == importlib.metadata.version("treewy-sglang") or built["version"] in Path(wheel).name
        done = subprocess.run(["env/bin/treewy", "doctor", "--device", "cpu"], cwd=directory, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        assert done.returncode == 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_wheel_file(request):
    """The tag and the libraries of a built wheel."""
    wheel = request.config.getoption("--wheel")
    if wheel is None:
        return
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {f"treewy_sglang/patches/{name}" for name in series_files()} <= names
        assert "treewy_sglang/_ops.so" in names and any(re.match(r"treewy_sglang/_host\..*\.so$", n) for n in names)
        metadata = next(n for n in names if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert re.search(r"^Requires-Dist: torch==\d+\.\d+\.\*$", text, re.M)
    assert f"Requires-Dist: sglang=={Series.load().upstream.version}; extra == " in text
