"""Unified diffs as git writes them: parse, apply, reverse. Exact context at the exact line, no fuzz."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Optional

from .errors import BadSeries

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_GIT = re.compile(rb"diff --git a/(\S+) b/(\S+)\n")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d{6}))?\n")
_NO_NEWLINE = b"\\ No newline at end of file\n"


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends. Only LF ends a line (bytes.splitlines would also split at CR)."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    if parts[-1]:
        lines.append(parts[-1])
    return lines


def blob_id(data: bytes) -> str:
    """The name git gives to this content; it stands in the index line of a diff."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Hunk:
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[tuple[bytes, bytes], ...]  # (b" " | b"-" | b"+", line with its end)

    def reversed(self) -> "Hunk":
        swap = {b" ": b" ", b"-": b"+", b"+": b"-"}
        return Hunk(
            self.new_start,
            self.new_count,
            self.old_start,
            self.old_count,
            tuple((swap[sign], line) for sign, line in self.lines),
        )


@dataclass(frozen=True)
class FilePatch:
    path: str  # as in the git repository: python/sglang/...
    old_id: Optional[str]  # git blob id; None: there is no file on that side
    new_id: Optional[str]
    mode: Optional[int]  # permission bits of an added file
    hunks: tuple[Hunk, ...]

    @property
    def adds_file(self) -> bool:
        return self.old_id is None

    @property
    def added(self) -> int:
        return sum(sign == b"+" for hunk in self.hunks for sign, _ in hunk.lines)

    @property
    def removed(self) -> int:
        return sum(sign == b"-" for hunk in self.hunks for sign, _ in hunk.lines)

    def reversed(self) -> "FilePatch":
        return FilePatch(
            self.path, self.new_id, self.old_id, self.mode, tuple(h.reversed() for h in self.hunks)
        )

    def apply(self, old: Optional[bytes], where: str) -> Optional[bytes]:
        """The content after the patch (None: no file). `where` names the patch in errors."""
        _expect_id(old, self.old_id, where, self.path, "before")
        source = split_lines(old or b"")
        result: list[bytes] = []
        position = 0
        for hunk in self.hunks:
            start = hunk.old_start - 1 if hunk.old_count else hunk.old_start
            if start < position:
                raise BadSeries(f"{where}: {self.path}: hunks overlap at line {hunk.old_start}.")
            result += source[position:start]
            position = start
            for sign, line in hunk.lines:
                if sign == b"+":
                    result.append(line)
                    continue
                if position >= len(source) or source[position] != line:
                    found = repr(source[position]) if position < len(source) else "the end of the file"
                    raise BadSeries(
                        f"{where}: {self.path}: line {position + 1} is {found}, the patch expects {line!r}."
                    )
                if sign == b" ":
                    result.append(line)
                position += 1
        result += source[position:]
        new = b"".join(result)
        if self.new_id is None and not new:
            return None
        _expect_id(new, self.new_id, where, self.path, "after")
        return new


def _expect_id(data: Optional[bytes], wanted: Optional[str], where: str, path: str, when: str) -> None:
    found = None if data is None else blob_id(data)
    if found != wanted:
        raise BadSeries(
            f"{where}: {path} is git blob {found or '(no file)'} {when} the patch, "
            f"its index line says {wanted or '(no file)'}."
        )


def parse(data: bytes, where: str) -> tuple[bytes, tuple[FilePatch, ...]]:
    """Split a patch file into its header (all before the first diff) and its file patches."""
    lines = split_lines(data)
    first = next((i for i, line in enumerate(lines) if line.startswith(b"diff --git ")), None)
    if first is None:
        raise BadSeries(f"{where}: holds no diff.")
    header = b"".join(lines[:first])
    files: list[FilePatch] = []
    i = first

    def bad(what: str) -> BadSeries:
        return BadSeries(f"{where}: line {i + 1}: {what}.")

    while i < len(lines):
        match = _GIT.fullmatch(lines[i])
        if not match or match[1] != match[2]:
            raise bad("expected 'diff --git a/PATH b/PATH' with one plain path (no rename, no quoting)")
        path = match[1].decode()
        _check_path(path, where)
        i += 1
        mode = None
        new_file = i < len(lines) and lines[i].startswith(b"new file mode ")
        if new_file:
            mode = int(lines[i].split()[-1], 8) & 0o777
            i += 1
        index = _INDEX.fullmatch(lines[i]) if i < len(lines) else None
        if not index:
            raise bad("expected 'index OLD..NEW' with full ids (mode changes, deletions and renames are not supported)")
        i += 1
        hunks: list[Hunk] = []
        if i < len(lines) and lines[i].startswith(b"--- "):
            names = (b"--- /dev/null\n" if new_file else b"--- a/" + match[1] + b"\n", b"+++ b/" + match[1] + b"\n")
            if tuple(lines[i : i + 2]) != names:
                raise bad(f"the '---' and '+++' lines do not name {path}")
            i += 2
            while i < len(lines) and lines[i].startswith(b"@@"):
                hunk, i = _parse_hunk(lines, i, where)
                hunks.append(hunk)
        if not hunks and not new_file:
            raise bad(f"no hunks for {path} (binary files are not supported)")
        old_id, new_id = index[1].decode(), index[2].decode()
        if new_file != (set(old_id) == {"0"}):
            raise bad(f"the index line and 'new file mode' disagree on {path}")
        files.append(FilePatch(path, None if new_file else old_id, new_id, mode, tuple(hunks)))
    paths = [f.path for f in files]
    if len(set(paths)) != len(paths):
        raise BadSeries(f"{where}: names a file twice.")
    return header, tuple(files)


def _parse_hunk(lines: list[bytes], i: int, where: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[i])
    if not match:
        raise BadSeries(f"{where}: line {i + 1}: not a hunk header.")
    old_start, new_start = int(match[1]), int(match[3])
    old_count = int(match[2]) if match[2] is not None else 1
    new_count = int(match[4]) if match[4] is not None else 1
    old_left, new_left = old_count, new_count
    body: list[tuple[bytes, bytes]] = []
    i += 1
    while True:
        if i < len(lines) and lines[i] == _NO_NEWLINE and body:
            sign, line = body[-1]
            body[-1] = (sign, line[:-1])
            i += 1
            continue
        if not old_left and not new_left:
            break
        sign = lines[i][:1] if i < len(lines) else b""
        if sign not in (b" ", b"-", b"+"):
            raise BadSeries(f"{where}: line {i + 1}: the hunk ends before its counted lines.")
        old_left -= sign != b"+"
        new_left -= sign != b"-"
        if old_left < 0 or new_left < 0:
            raise BadSeries(f"{where}: line {i + 1}: the hunk has more lines than its header counts.")
        body.append((sign, lines[i][1:]))
        i += 1
    return Hunk(old_start, old_count, new_start, new_count, tuple(body)), i


def _check_path(path: str, where: str) -> None:
    parts = path.split("/")
    if parts[:2] != ["python", "sglang"] or len(parts) < 3 or any(p in ("", ".", "..") for p in parts):
        raise BadSeries(f"{where}: {path} is not a path below python/sglang/.")
