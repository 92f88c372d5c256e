"""docs/newer-sglang.md, command by command, on a small git repository that stands for SGLang's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from document_blocks import environment, run, sessions

from treewy_sglang.patching import Series
from treewy_sglang.patching.exporting import export
from treewy_sglang.patching.series import Upstream

OLD, NEW = "v1.2.3", "v1.3.0"
UPSTREAM = f"# The pin.\nproject: SGLang\ntag: {OLD}\nversion: {OLD[1:]}\n\n# files\n"
FIELDS = "Seam: one call.\nWhy no hook: none there.\nCan go when: never.\n"
ARGUMENTS = "".join(f"line {i}\n" for i in range(40))
SEAM = ARGUMENTS.replace("line 20\n", "line 20\nseam\n")


def git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(top: Path, **files: str) -> None:
    for name, text in files.items():
        path = top / "python" / "sglang" / "srt" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def commit(top: Path, message: str) -> None:
    git(top, "add", "-A")
    git(top, "commit", "-qm", message)


@pytest.fixture
def work(tmp_path, monkeypatch) -> Path:
    """work/treewy with patches/ over the old tag, and work/sglang with both tags, at neither."""
    for name, value in (("NAME", "Some One"), ("EMAIL", "one@some.example")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    top = tmp_path / "work" / "sglang"
    top.mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    (top / "python" / "sglang").mkdir(parents=True)
    (top / "python" / "sglang" / "__init__.py").write_text("")
    (top / "python" / "pyproject.toml").write_text("")
    write(top, arguments=ARGUMENTS, pool="class Pool:\n    pass\n")
    commit(top, "release")
    git(top, "tag", OLD)
    # The series, made in a clone so that the user's checkout has never seen it.
    series = tmp_path / "series"
    git(tmp_path, "clone", "-q", str(top), str(series))
    write(series, arguments=SEAM)
    commit(series, f"Arguments: the seam\n\n{FIELDS}")
    write(series, pool="class Pool:\n    seam = 1\n", extra="x = 1\n")
    commit(series, f"Pool: the seam\n\n{FIELDS}")
    export(series, tmp_path / "work" / "treewy" / "patches", Upstream.parse(UPSTREAM))
    # The next release moves the place of the first seam.
    write(top, arguments="new first line\n" + ARGUMENTS.replace("line 5\n", "line five\n"), other="y = 1\n")
    commit(top, "next release")
    git(top, "tag", NEW)
    return tmp_path / "work" / "treewy"


def test_walk_through(work):
    env = {**environment(work), "OLD": OLD, "NEW": NEW, "CHECKOUT": "../sglang"}
    before = {p.name: p.read_bytes() for p in (work / "patches").iterdir()}
    (blocks,) = sessions("checkout").values()
    printed = run(blocks, work, env)
    assert "Imported 2 patches" in printed and "Exported 2 patches" in printed
    assert "applies cleanly" in printed and "Applied 2 patches" in printed and "state:   applied" in printed
    assert "python/sglang/srt/arguments.py" in printed, "what SGLang changed around the seams is shown"
    series = Series.load(work / "patches")
    assert (series.upstream.tag, series.upstream.version) == (NEW, NEW[1:])
    patched = git(work.parent / "sglang", "show", "treewy:python/sglang/srt/arguments.py")
    assert patched == "new first line\n" + SEAM.replace("line 5\n", "line five\n")
    after = {p.name: p.read_bytes() for p in (work / "patches").iterdir()}
    assert after.keys() == before.keys() and after["UPSTREAM"] != before["UPSTREAM"]
    assert git(work.parent / "sglang-new", "status", "--porcelain") == "", "revert left the new release as it was"


def test_the_variables_of_the_page_are_the_ones_that_are_set():
    from document_blocks import ROOT, blocks_of

    first = blocks_of(ROOT / "docs" / "newer-sglang.md")[0].text
    assert [line.partition("=")[0] for line in first.split()] == ["OLD", "NEW", "CHECKOUT"]
    assert f"OLD={Series.load().upstream.tag}\n" in first, "the page starts from the pin"


def test_without_the_package(work):
    """The last section: git am alone, then the stamp."""
    top = work.parent / "sglang"
    git(top, "checkout", "-q", "-b", "plain", OLD)
    git(top, "am", "-q", "--keep-cr", *map(str, sorted((work / "patches").glob("*.patch"))))
    shutil.copytree(top, work / "copy")
    env = environment(work)
    done = subprocess.run(["treewy", "patch", "apply", "copy", "--patches", "patches"], cwd=work, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "the stamp was written" in done.stdout, done.stderr
