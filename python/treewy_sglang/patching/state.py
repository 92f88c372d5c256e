"""Looking at a target: which state it is in, file by file. Reads only."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from .errors import Refused
from .series import PREFIX, Series, sha256
from .target import Target, find_version, same_version

# All that is ever left beside SGLang's own files, in the sglang directory.
STAMP = "_treewy_patch.json"
UNDO = "_treewy_patch.undo.zip"
JOURNAL = "_treewy_patch.journal.json"
STAMP_FORMAT = 1

# States of a target.
UNPATCHED = "unpatched"  # every file is SGLang's own: apply would succeed
APPLIED = "applied"  # this package's series, stamped, every file intact
OUTDATED = "outdated"  # another series of TreeWY, stamped and intact: apply replaces it
UNSTAMPED = "unstamped"  # every file is patched but no stamp says so (commits in a checkout): apply adds the stamp
PARTIAL = "partial"  # some files patched, some not
MODIFIED = "modified"  # some file is neither SGLang's nor patched
WRONG_VERSION = "wrong-version"
INTERRUPTED = "interrupted"  # a run died half-way: revert restores the original

# States of a file.
ORIGINAL, PATCHED, CHANGED, MISSING = "original", "patched", "changed", "missing"


@dataclass(frozen=True)
class FileState:
    path: str  # below the sglang directory
    state: str
    found: Optional[str]  # sha256; None: no such file
    before: Optional[str]  # sha256 before and after patching; None: no file
    after: Optional[str]
    hint: str = ""

    def sentence(self) -> str:
        if self.state == MISSING:
            return f"sglang/{self.path} is missing."
        expected = f"expected {self.before}" if self.before else "no file was expected there"
        return (
            f"sglang/{self.path} has been changed: sha256 {self.found}, {expected} "
            f"(unpatched) or {self.after} (patched).{self.hint}"
        )


@dataclass(frozen=True)
class Status:
    state: str
    detail: str  # one sentence
    root: Path
    layout: str
    version: Optional[str]
    pin_tag: str
    pin_version: str
    series: str  # digest of this package's series
    files: tuple[FileState, ...]
    stamp: Optional[dict[str, Any]] = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def applied(self) -> bool:
        return self.state == APPLIED

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "detail": self.detail,
            "root": str(self.root),
            "layout": self.layout,
            "version": self.version,
            "pin": {"tag": self.pin_tag, "version": self.pin_version},
            "series": self.series,
            "stamp": None
            if self.stamp is None
            else {key: self.stamp.get(key) for key in ("treewy", "tag", "version", "series")},
            "files": [{"path": f.path, "state": f.state, "sha256": f.found} for f in self.files],
            "notes": list(self.notes),
        }


def read_file(root: Path, relative: str) -> Optional[bytes]:
    """Content, or None if there is no file; a symbolic link on the way is refused."""
    path = root
    for part in relative.split("/"):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Refused(f"{path} cannot be read: {error.strerror}.") from None
        if stat.S_ISLNK(mode):
            raise Refused(
                f"{path} is a symbolic link: patching through it would change another installation. "
                "Install SGLang with its files copied."
            )
    if not stat.S_ISREG(mode):
        raise Refused(f"{path} is not a regular file.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}.") from None


def read_record(root: Path, name: str) -> Optional[dict[str, Any]]:
    """The stamp or the journal: None if absent, {} if unreadable."""
    try:
        record = json.loads((root / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    good = (
        isinstance(record, dict)
        and record.get("format") == STAMP_FORMAT
        and isinstance(record.get("files"), list)
        and all(isinstance(f, dict) and isinstance(f.get("path"), str) and _inside(f["path"]) for f in record["files"])
    )
    return record if good else {}


def _inside(path: str) -> bool:
    return not any(part in ("", ".", "..") for part in path.split("/"))


def inspect(target: Target, series: Series) -> Status:
    root = target.root
    version = find_version(target)
    stamp = read_record(root, STAMP)
    journal = read_record(root, JOURNAL)
    pin = series.upstream
    files = tuple(_file_state(root, f.relative, f.before, f.after) for f in pin.files)
    notes = []

    def status(state: str, detail: str) -> Status:
        return Status(
            state,
            detail,
            root,
            target.layout,
            version,
            pin.tag,
            pin.version,
            series.digest,
            files,
            stamp,
            tuple(notes),
        )

    if journal is not None:
        return status(
            INTERRUPTED,
            "An earlier `treewy patch` was interrupted here and SGLang may be half patched: "
            "`treewy patch revert` restores the original.",
        )
    if version is not None and not same_version(version, pin.version):
        return status(
            WRONG_VERSION,
            f"This is SGLang {version}; the patches are for SGLang {pin.version} (tag {pin.tag}) and no other.",
        )
    if version is None:
        notes.append("Nothing here tells the version of SGLang; the hashes of the touched files decide.")
    if stamp == {}:
        notes.append(f"The stamp {STAMP} is unreadable.")

    states = {f.state for f in files}
    # Files of another series that ours does not touch must be original, else that series is still there.
    ours = {f.path for f in files}
    foreign = tuple(
        _file_state(root, f["path"], f.get("before"), f.get("after"))
        for f in (stamp or {}).get("files", ())
        if f["path"] not in ours
    )
    foreign_clean = all(f.state == ORIGINAL for f in foreign)
    if states <= {PATCHED} and foreign_clean:
        if stamp and stamp.get("series") == series.digest:
            return status(APPLIED, f"The TreeWY series is applied and intact ({len(files)} files).")
        return status(
            UNSTAMPED,
            "Every file is patched, but no stamp of this series is there (commits in a checkout, or a patch by hand): "
            "`treewy patch apply` adds it.",
        )
    if states == {ORIGINAL} and foreign_clean:
        if stamp is not None:
            notes.append("A stamp is left over from before SGLang was installed again; apply and revert replace it.")
        return status(UNPATCHED, f"SGLang {version or pin.version} is unpatched; the series applies cleanly.")
    if stamp and stamp.get("series") != series.digest:
        stamped = [_file_state(root, f["path"], f.get("before"), f.get("after")) for f in stamp["files"]]
        others = [f for f in files if f.path not in {s.path for s in stamped}]
        if all(f.state == PATCHED for f in stamped) and all(f.state == ORIGINAL for f in others):
            return status(
                OUTDATED,
                f"Another TreeWY series is applied (by treewy {stamp.get('treewy')}): "
                "`treewy patch apply` replaces it by this package's.",
            )
    wrong = [f for f in files if f.state in (CHANGED, MISSING)]
    if wrong:
        more = f" ({len(wrong)} files in all)" if len(wrong) > 1 else ""
        return status(MODIFIED, wrong[0].sentence() + more)
    left = [f.path for f in foreign if f.state != ORIGINAL]
    if left:
        return status(MODIFIED, f"sglang/{left[0]} is not SGLang's own: an earlier TreeWY series patched it.")
    patched = [f.path for f in files if f.state == PATCHED]
    return status(
        PARTIAL,
        f"Only {len(patched)} of {len(files)} files are patched (sglang/{patched[0]} is, "
        f"sglang/{next(f.path for f in files if f.state == ORIGINAL)} is not): "
        "`treewy patch revert` restores the original.",
    )


def _file_state(root: Path, path: str, before: Optional[str], after: Optional[str]) -> FileState:
    data = read_file(root, path)
    found = None if data is None else sha256(data)
    if found == before:
        return FileState(path, ORIGINAL, found, before, after)
    if found == after:
        return FileState(path, PATCHED, found, before, after)
    if data is None:
        return FileState(path, MISSING, None, before, after)
    hint = ""
    if b"\r\n" in data and sha256(data.replace(b"\r\n", b"\n")) in (before, after):
        hint = " Only the line ends differ (CRLF): check it out again with core.autocrlf=false."
    return FileState(path, CHANGED, found, before, after, hint)


def upstream_path(relative: str) -> str:
    return PREFIX + relative
