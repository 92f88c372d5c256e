"""A small stand-in for SGLang and a series over it: awkward on purpose.

It has a file with CRLF line ends, one without a final newline, an executable, a file touched by two patches, and added
files (one of them empty) in a directory that is not there before.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from treewy_sglang.patching import Series, find_target
from treewy_sglang.patching import fs as patching_fs
from treewy_sglang.patching.exporting import export
from treewy_sglang.patching.series import Upstream

VERSION = "1.2.3"
TAG = f"v{VERSION}"
FIELDS = "Seam: one\n line more.\nWhy no hook: none there.\nCan go when: never.\n"
UPSTREAM = f"# a comment\nproject: SGLang\ntag: {TAG}\nversion: {VERSION}\n\n# files\n"

BASE = {
    "__init__.py": b"",
    "version.py": f'__version__ = "{VERSION}"\n'.encode(),
    "srt/server_args.py": b"".join(b"line %d\n" % i for i in range(40)),
    "srt/pool.py": b"class Pool:\n    def alloc(self):\n        return 1\n",
    "srt/dos.txt": b"one\r\ntwo\rthree\r\nfour\r\n",
    "srt/tail.h": b"#pragma once\nlast",
    "srt/tool.sh": b"#!/bin/sh\necho 1\n",
    "srt/untouched.py": b"x = 1\n",
}
EDITS = [
    (
        "Arguments: the flag",
        {
            "srt/server_args.py": BASE["srt/server_args.py"]
            .replace(b"line 3\n", b"line 3\nflag\n")
            .replace(b"line 30\n", b""),
            "srt/tail.h": b"#pragma once\n#include <cstddef>\nlast\n",
        },
    ),
    (
        "Pool: the seam",
        {
            "srt/pool.py": BASE["srt/pool.py"].replace(b"return 1", b"return 2"),
            "srt/extra/deep/__init__.py": b"",
            "srt/extra/deep/seam.py": b"def seam():\n    return 2",
            "srt/tool.sh": b"#!/bin/sh\necho 2\n",
        },
    ),
    (
        "Arguments: check the flag",
        {
            "srt/server_args.py": BASE["srt/server_args.py"]
            .replace(b"line 3\n", b"line 3\nflag\ncheck\n")
            .replace(b"line 30\n", b""),
            "srt/dos.txt": b"one\r\n2\rthree\r\nfour\r\n",
        },
    ),
]


def git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), "-c", "user.name=Some One", "-c", "user.email=one@some.example"]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def make_checkout(top: Path, edits=EDITS, base=BASE) -> Path:
    """A git checkout at the tag's commits plus one commit for each of `edits`."""
    top.mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    git(top, "config", "core.autocrlf", "false")
    write_tree(top / "python" / "sglang", base)
    (top / "python" / "sglang" / "srt" / "tool.sh").chmod(0o755)
    (top / "python" / "pyproject.toml").write_text("")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "base")
    git(top, "tag", TAG)
    for subject, files in edits:
        write_tree(top / "python" / "sglang", files)
        git(top, "add", "-A")
        git(top, "commit", "-qm", f"{subject}\n\n{FIELDS}")
    return top


def make_package(site: Path, version: str = VERSION) -> Path:
    """site-packages with SGLang as an installer leaves it; returns the sglang directory."""
    root = site / "sglang"
    write_tree(root, {**BASE, "version.py": f'__version__ = "{version}"\n'.encode()})
    (root / "srt" / "tool.sh").chmod(0o755)
    (root / "srt" / "pool.py").chmod(0o640)
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (info / "RECORD").write_text("sglang/srt/pool.py,sha256=x,1\n")
    return root


def snapshot(top: Path) -> dict[str, tuple]:
    """Every path below `top`: kind, mode, owner, sha256."""
    result = {}
    for directory, names, files in os.walk(top):
        for name in names + files:
            path = Path(directory) / name
            info = path.lstat()
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(info.st_mode) else None
            result[str(path.relative_to(top))] = (info.st_mode, info.st_uid, info.st_gid, digest)
    return result


@pytest.fixture(scope="session")
def patches(tmp_path_factory) -> Path:
    """The exported series over the stand-in. Read only."""
    top = tmp_path_factory.mktemp("series")
    export(make_checkout(top / "checkout"), top / "patches", Upstream.parse(UPSTREAM))
    return top / "patches"


@pytest.fixture(scope="session")
def shorter_patches(tmp_path_factory) -> Path:
    """An earlier series: other changes to some of the same files, and a file of its own."""
    top = tmp_path_factory.mktemp("shorter")
    edits = [("Old seam", {"srt/pool.py": b"old\n", "srt/untouched.py": b"x = 2\n", "srt/gone/old.py": b"y = 1\n"})]
    export(make_checkout(top / "checkout", edits), top / "patches", Upstream.parse(UPSTREAM))
    return top / "patches"


@pytest.fixture(scope="session")
def series(patches) -> Series:
    return Series.load(patches)


@pytest.fixture
def package(tmp_path) -> Path:
    return make_package(tmp_path / "site-packages")


@pytest.fixture
def target(package):
    return find_target(package)


@pytest.fixture
def patched_files() -> dict[str, bytes]:
    return {path: data for _, files in EDITS for path, data in files.items()}


@pytest.fixture
def copy_of(tmp_path):
    def copy(directory: Path, name: str = "copy") -> Path:
        return Path(shutil.copytree(directory, tmp_path / name))

    return copy


class Faults:
    """Makes the n-th operation that changes the disk fail (n counts from 1).

    `dies`: as if the process died there: every later operation fails too, so nothing can be cleaned up. A write that
    fails leaves half of its data.
    """

    OPERATIONS = ("write", "replace", "unlink", "mkdir", "rmdir", "sync_directory")

    def __init__(self, monkeypatch, at: int, error: BaseException, dies: bool = False) -> None:
        self.count, self.at, self.error, self.dies = 0, at, error, dies
        for name in self.OPERATIONS:
            monkeypatch.setattr(patching_fs, name, self._wrap(name, getattr(patching_fs, name)))

    def _wrap(self, name, real):
        def operation(*arguments):
            self.count += 1
            if self.count == self.at or (self.dies and self.count > self.at):
                if name == "write" and self.count == self.at:
                    path, data, *rest = arguments
                    real(path, data[: len(data) // 2], *rest)
                raise self.error
            return real(*arguments)

        return operation

    @property
    def reached(self) -> bool:
        return self.count >= self.at
