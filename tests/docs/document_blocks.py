"""Fenced blocks of README.md and docs/, and how each is run.

A block in sh or python runs in a copy of the tree's top level, with the Python of this test, unless a comment right above it
says something else:

    <!-- run: sglang -->     there too, but `treewy patch` finds an unpatched SGLang made of the files that patches touch
    <!-- run: checkout -->   beside a small git repository that stands for SGLang (test_newer_sglang.py)
    <!-- run: server -->     with a server at 127.0.0.1:30000, whose port is exchanged (tests/server/test_examples.py)
    <!-- not run (KIND): reason -->   KIND is one of NOT_RUN

Blocks of one document that run in the same place are one session: in order, with one shell.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("scratch", "sglang", "checkout", "server")
# Why a block may not be run. elsewhere: the reason is the test that runs it, path::name.
NOT_RUN = ("gpu", "network", "long", "elsewhere")
LANGUAGES = ("sh", "python", "text")
URL = "http://127.0.0.1:30000"


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str
    text: str
    comment: str | None

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def place(self) -> str | None:
        if self.comment is None and self.language in ("sh", "python") and self.document.name != "README.md":
            return "scratch"
        found = re.fullmatch(r"run: (\w+)", self.comment or "")
        return found[1] if found else None

    @property
    def not_run(self) -> tuple[str, str] | None:
        """(kind, reason)"""
        found = re.fullmatch(r"not run \((\w+)\): (.+)", self.comment or "")
        return (found[1], found[2]) if found else None


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    found = []
    for match in re.finditer(r"(?:^<!-- (?P<comment>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", text, re.S | re.M):
        line = text.count("\n", 0, match.start("text")) + 1
        comment = match["comment"] if re.match(r"(not )?run\b", match["comment"] or "") else None
        found.append(Block(document, line, match["language"].strip(), match["text"], comment))
    return found


def all_blocks() -> list[Block]:
    return [b for d in documents() for b in blocks_of(d)]


def sessions(place: str) -> dict[str, list[Block]]:
    """{name of the document: its blocks that run in `place`, in order}. In scratch, where blocks leave nothing for others to
    find, the same command on several pages runs once."""
    found: dict[str, list[Block]] = {}
    seen: set[str] = set()
    for block in all_blocks():
        if block.place != place or (place == "scratch" and block.text in seen):
            continue
        seen.add(block.text)
        found.setdefault(block.document.name, []).append(block)
    return found


def make_scratch(where: Path) -> Path:
    """A directory that looks like the top of the tree and takes what the blocks write. patches/ is a copy."""
    where.mkdir()
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name not in ("build", "dist"):
            (where / entry.name).symlink_to(entry)
    return where


def environment(where: Path, *first_on_path: Path) -> dict[str, str]:
    """`python` and `treewy` are this test's; modules of `first_on_path` come before everything else."""
    programs = where.parent / f"{where.name}-bin"
    programs.mkdir(exist_ok=True)
    for name, command in (("python", sys.executable), ("treewy", f"{sys.executable} -m treewy_sglang")):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    inherited = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*map(str, first_on_path), str(ROOT / "python"), *inherited]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def script(blocks: list[Block]) -> str:
    """One shell script; a python block becomes a here-document. Each block says where it is from when it starts."""
    parts = ["set -eu"]
    for block in blocks:
        parts.append(f"echo '--- {block.name}' >&2")
        parts.append(block.text.rstrip() if block.language == "sh" else f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
    return "\n".join(parts) + "\n"


def run(blocks: list[Block], where: Path, env: dict[str, str], exchange: tuple[tuple[str, str], ...] = (), timeout: float = 300) -> str:
    """Run in one bash; return what it printed. An AssertionError shows all of it, with the block that failed last."""
    text = script(blocks)
    for old, new in exchange:
        text = text.replace(old, new)
    done = subprocess.run(["bash", "-c", text], cwd=where, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
