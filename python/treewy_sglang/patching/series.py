"""The patch series: UPSTREAM (the pin), `series` (the order) and the patches themselves."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

from .errors import BadSeries
from .unidiff import FilePatch, parse

# Upper bound on the lines that all patches together may add to SGLang: seams stay small.
MAX_ADDED_LINES = 600

# What the header of each patch must say (DEP-3 style: continuation lines are indented).
REQUIRED_FIELDS = ("Seam", "Why no hook", "Can go when")

PREFIX = "python/sglang/"
_NAME = re.compile(r"(\d{4})-[a-z0-9][a-z0-9.-]*\.patch")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELD = re.compile(r"([A-Z][A-Za-z -]{2,30}):(?:\s+(.*))?")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def locate() -> Path:
    """The series of this package: ../../patches in a source tree, package data in a wheel."""
    package = Path(__file__).resolve().parents[1]
    # A source tree first: a build may leave a stale copy of the series inside the package.
    source = package.parents[1] / "patches"
    if package.parent.name == "python" and (source / "UPSTREAM").is_file():
        return source
    if (package / "patches" / "UPSTREAM").is_file():
        return package / "patches"
    raise BadSeries(
        f"The patch series is missing: neither {package / 'patches'} (installed) nor {source} (source tree) "
        "holds a file UPSTREAM. Reinstall the package."
    )


@dataclass(frozen=True)
class PinnedFile:
    path: str  # python/sglang/...
    before: Optional[str]  # sha256; None: the series adds the file
    after: str

    @property
    def relative(self) -> str:
        """Path below the sglang package directory."""
        return self.path[len(PREFIX) :]


@dataclass(frozen=True)
class Upstream:
    header: str  # all lines above the list of files, kept as written by hand
    tag: str
    version: str
    files: tuple[PinnedFile, ...]

    @classmethod
    def parse(cls, text: str, where: str = "UPSTREAM") -> "Upstream":
        keys: dict[str, str] = {}
        files: list[PinnedFile] = []
        header: list[str] = []
        for number, line in enumerate(text.split("\n"), 1):
            words = line.split()
            if len(words) == 3 and (words[0] == "-" or _SHA256.fullmatch(words[0])):
                before, after, path = words
                if not _SHA256.fullmatch(after) or not path.startswith(PREFIX):
                    raise BadSeries(f"{where}: line {number}: expected 'BEFORE AFTER python/sglang/...'.")
                files.append(PinnedFile(path, None if before == "-" else before, after))
                continue
            if files and words:
                raise BadSeries(f"{where}: line {number}: only files may follow the first file.")
            if not files:
                header.append(line)
            if words and not line.startswith("#"):
                key, colon, value = line.partition(":")
                if not colon or not value.strip():
                    raise BadSeries(f"{where}: line {number}: expected 'key: value'.")
                keys[key.strip()] = value.strip()
        for key in ("tag", "version"):
            if key not in keys:
                raise BadSeries(f"{where}: has no line '{key}: ...'.")
        return cls("\n".join(header).rstrip("\n") + "\n", keys["tag"], keys["version"], tuple(files))

    def format(self, files: tuple[PinnedFile, ...]) -> str:
        rows = [f"{f.before or '-':<64} {f.after} {f.path}\n" for f in sorted(files, key=lambda f: f.path)]
        return self.header + "".join(rows)


@dataclass(frozen=True)
class Patch:
    name: str
    subject: str
    fields: Mapping[str, str]
    files: tuple[FilePatch, ...]

    @property
    def added(self) -> int:
        return sum(f.added for f in self.files)


def header_fields(message: str) -> dict[str, str]:
    """'Field: text' lines of a commit message; indented lines continue the field above."""
    fields: dict[str, str] = {}
    current = None
    for line in message.split("\n"):
        match = _FIELD.fullmatch(line)
        if match:
            current = match[1]
            fields[current] = match[2] or ""
        elif current and line[:1] in (" ", "\t") and line.strip():
            fields[current] = f"{fields[current]} {line.strip()}".strip()
        else:
            current = None
    return fields


def missing_fields(message: str) -> list[str]:
    fields = header_fields(message)
    return [name for name in REQUIRED_FIELDS if not fields.get(name)]


@dataclass(frozen=True)
class Series:
    source: str  # where it came from, for messages
    upstream: Upstream
    patches: tuple[Patch, ...]
    digest: str

    @classmethod
    def load(cls, directory: Optional[Path] = None) -> "Series":
        directory = Path(directory) if directory is not None else locate()
        if not (directory / "UPSTREAM").is_file():
            raise BadSeries(f"{directory} holds no patch series: the file UPSTREAM is missing.")
        names = sorted(p.name for p in directory.iterdir() if p.suffix == ".patch")
        files = {}
        for name in ["UPSTREAM", "series", *names]:
            try:
                files[name] = (directory / name).read_bytes()
            except OSError as error:
                raise BadSeries(f"{directory / name} cannot be read: {error.strerror}.") from None
        return cls.from_files(files, str(directory))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], source: str) -> "Series":
        """`files`: UPSTREAM, series and every *.patch, by name."""
        upstream = Upstream.parse(files["UPSTREAM"].decode(), f"{source}/UPSTREAM")
        names = [n for n in files["series"].decode().split("\n") if n and not n.startswith("#")]
        present = [name for name in files if name.endswith(".patch")]
        if sorted(names) != sorted(present):
            odd = sorted(set(names) ^ set(present)) or "a name that stands there twice"
            raise BadSeries(f"{source}/series and the patch files beside it disagree: {odd}.")
        if not names:
            raise BadSeries(f"{source}/series names no patch.")
        patches = []
        for number, name in enumerate(names, 1):
            match = _NAME.fullmatch(name)
            if not match or int(match[1]) != number:
                raise BadSeries(f"{source}/series: entry {number} is {name!r}, expected {number:04d}-name.patch.")
            header, file_patches = parse(files[name], name)
            message = header.decode()
            subject = re.search(r"^Subject: \[PATCH\] (.+)$", message, re.M)
            if not subject:
                raise BadSeries(f"{name}: has no line 'Subject: [PATCH] ...'.")
            patches.append(Patch(name, subject[1], header_fields(message), file_patches))
        digest = hashlib.sha256()
        for name in ["UPSTREAM", "series", *names]:
            digest.update(b"%s\0%d\0" % (name.encode(), len(files[name])) + files[name])
        series = cls(source, upstream, tuple(patches), digest.hexdigest())
        series._check()
        return series

    def _check(self) -> None:
        listed = [f.path for f in self.upstream.files]
        if len(set(listed)) != len(listed):
            raise BadSeries(f"{self.source}/UPSTREAM lists a file twice.")
        first: dict[str, FilePatch] = {}
        for patch in self.patches:
            for file_patch in patch.files:
                first.setdefault(file_patch.path, file_patch)
        if set(listed) != set(first):
            odd = sorted(set(listed) ^ set(first))
            raise BadSeries(f"{self.source}: UPSTREAM and the patches do not touch the same files: {odd}.")
        for pinned in self.upstream.files:
            if first[pinned.path].adds_file != (pinned.before is None):
                raise BadSeries(f"{self.source}: UPSTREAM and the patches disagree whether {pinned.path} is new.")

    @property
    def added(self) -> int:
        return sum(patch.added for patch in self.patches)

    def mode(self, path: str) -> Optional[int]:
        """Permission bits of a file that the series adds."""
        return next((f.mode for p in self.patches for f in p.files if f.path == path and f.adds_file), None)

    def forward(self, contents: Mapping[str, Optional[bytes]]) -> dict[str, Optional[bytes]]:
        """Original contents by path -> patched contents, verified against UPSTREAM."""
        result = dict(contents)
        for patch in self.patches:
            for file_patch in patch.files:
                result[file_patch.path] = file_patch.apply(result[file_patch.path], patch.name)
        return self._verified(result, "after")

    def backward(self, contents: Mapping[str, Optional[bytes]]) -> dict[str, Optional[bytes]]:
        """Patched contents by path -> original contents, for the paths given."""
        result = dict(contents)
        for patch in reversed(self.patches):
            for file_patch in reversed(patch.files):
                if file_patch.path in result:
                    result[file_patch.path] = file_patch.reversed().apply(
                        result[file_patch.path], f"{patch.name} (reversed)"
                    )
        return self._verified(result, "before")

    def _verified(self, contents: dict[str, Optional[bytes]], side: str) -> dict[str, Optional[bytes]]:
        for pinned in self.upstream.files:
            if pinned.path not in contents:
                continue
            data = contents[pinned.path]
            found = None if data is None else sha256(data)
            wanted = getattr(pinned, side)
            if found != wanted:
                raise BadSeries(
                    f"{self.source}: the patches give {pinned.path} sha256 {found}, UPSTREAM says {wanted} "
                    f"({side} patching). The series is damaged: reinstall the package, or export it again."
                )
        return contents
