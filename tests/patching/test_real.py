"""The series of this repository on the SGLang that is installed here."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from treewy_sglang.patching import Series, apply, check, find_target, inspect, locate, revert, verify_installed
from treewy_sglang.patching.exporting import export, import_series
from treewy_sglang.patching.series import Upstream
from treewy_sglang.patching.state import STAMP, UNDO

from .conftest import git, snapshot


@pytest.fixture(scope="module")
def real() -> Series:
    return Series.load()


@pytest.fixture
def installed() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin, "these tests need SGLang; pip install the version that patches/UPSTREAM names"
    return Path(spec.origin).parent


@pytest.fixture
def package(tmp_path, installed, real) -> Path:
    """A copy of the touched files (and what tells the version), unpatched if the installed one is patched."""
    root = tmp_path / "site-packages" / "sglang"
    names = ["__init__.py", "version.py", "_version.py", STAMP, UNDO, *(f.relative for f in real.upstream.files)]
    for name in names:
        if (installed / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(installed / name, root / name)
    for info in installed.parent.glob("sglang-*.dist-info"):
        (root.parent / info.name).mkdir()
        for name in ("METADATA", "RECORD"):
            shutil.copy2(info / name, root.parent / info.name / name)
    revert(find_target(root), real)
    return root


def test_the_installed_release_is_the_pinned_one(package, real):
    status = inspect(find_target(package), real)
    assert (status.state, status.version) == ("unpatched", real.upstream.version)
    assert {f.found for f in status.files} == {f.before for f in real.upstream.files}


def test_apply_check_revert(package, real):
    before = snapshot(package.parent)
    target = find_target(package)
    check(target, real)
    apply(target, real)
    assert verify_installed(package, real).applied and check(target, real).applied
    assert "Already applied" in apply(target, real)
    for pinned in real.upstream.files:
        if pinned.path.endswith(".py"):
            compile((package / pinned.relative).read_bytes(), pinned.path, "exec")
    revert(target, real)
    assert snapshot(package.parent) == before


def test_export_gives_back_the_patches(package, real, tmp_path):
    """The series as commits on a clean checkout, exported: the same bytes as in patches/."""
    top = tmp_path / "checkout"
    shutil.copytree(package, top / "python" / "sglang")
    (top / "python" / "pyproject.toml").write_text("")
    git(top, "init", "-q")
    git(top, "config", "core.autocrlf", "false")
    git(top, "add", "-A", "-f")
    git(top, "commit", "-qm", "base")
    git(top, "tag", real.upstream.tag)
    directory = locate()

    import_series(top, real, directory)
    export(top, tmp_path / "out", Upstream.parse((directory / "UPSTREAM").read_text()))
    exported = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert exported == {name: (directory / name).read_bytes() for name in exported}
    assert {p.name for p in directory.glob("*.patch")} <= exported.keys()

    target = find_target(top)
    assert inspect(target, real).state == "unstamped"
    git(top, "checkout", "-q", real.upstream.tag)
    apply(target, real)
    assert target.layout == "checkout" and verify_installed(target.root, real).applied
    git(top, "add", "-A", "-f")
    assert git(top, "diff", "--cached", "HEAD", "--stat") != ""
    revert(target, real)
    git(top, "add", "-A", "-f")
    assert git(top, "diff", "--cached", "HEAD") == ""
