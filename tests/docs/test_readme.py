"""The README promises only what is there: files, targets, commands, operators, flags."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [p for p in ROOT.rglob("*.md") if not {".venv", "build", ".demo"} & set(p.relative_to(ROOT).parts)]


def shell_blocks(text):
    return re.findall(r"```sh\n(.*?)```", text, re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
        if not re.match(r"[a-z]+:", link):
            assert (document.parent / link).exists(), f"{document.name} cites {link}, which does not exist"


def test_make_targets_exist():
    cited = {t for p in DOCUMENTS for t in re.findall(r"\bmake ([a-z][a-z-]*)\b", re.sub(r"^(?!.*`make|make ).*$", "", p.read_text(), flags=re.M))
             if f"`make {t}" in p.read_text() or f"\nmake {t}" in p.read_text()}
    assert {"demo", "serve", "test"} <= cited
    for target in sorted(cited):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"make {target}: {done.stderr}"


def test_the_two_commands_are_the_shell_blocks():
    """Both run in CI: `make test` is what is running now, `make demo` is run whole by tests/server."""
    assert [b.strip() for b in shell_blocks(README)] == ["make demo", "make test"]


def test_treewy_commands_answer():
    """Every `treewy a b` in the documents is a command of the program."""
    cited = {c for p in DOCUMENTS for c in re.findall(r"treewy (patch [a-z]+|doctor|demo|serve)\b", p.read_text())}
    assert cited
    for command in sorted(cited):
        done = subprocess.run([sys.executable, "-m", "treewy_sglang", *command.split(), "--help"], capture_output=True, text=True)
        assert done.returncode == 0, f"treewy {command}: {done.stderr}"


def test_operators_exist():
    torch = pytest.importorskip("torch")
    import treewy_sglang.ops  # noqa: F401  (registers)

    for name in ("tree_verify", "tree_conv_verify", "commit", "parents_from_links"):
        assert f"`{name}`" in README
        assert hasattr(torch.ops.treewy, name)


def test_front_page_is_short():
    assert len(README.splitlines()) <= 80


def test_the_pin_is_written_once():
    """Only patches/UPSTREAM holds the version that is installed."""
    for path in [ROOT / "Makefile", ROOT / "setup.py", ROOT / "pyproject.toml", *ROOT.glob("tools/*.py")]:
        assert not re.search(r"sglang==\d", path.read_text()), path
