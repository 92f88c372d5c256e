"""Change several files, all or none.

Order on disk: the journal; every new content as a temporary file beside its target; one os.replace (or unlink) per
file in the order given; stale bytecode removed; the journal removed. An error on the way puts the old contents back.
If the process dies on the way, the journal stays, and says which files were on the move.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from . import fs
from .errors import CannotWrite, Interrupted, PatchError, Refused
from .state import JOURNAL

_TEMPORARY = ".treewy-new"


@dataclass(frozen=True)
class Change:
    path: str  # below the sglang directory
    old: Optional[bytes]  # None: no file
    new: Optional[bytes]
    mode: int = 0o644  # of a file that is not there yet; others keep theirs


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{_TEMPORARY}")


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """One `treewy patch` at a time on a target; the lock is on the directory, so no file is left behind."""
    try:
        import fcntl
    except ImportError:  # no such lock outside POSIX
        yield
        return
    fd = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"Another `treewy patch` is at work on {root}; try again when it has ended.") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


def check_writable(root: Path, paths: Sequence[str]) -> None:
    for directory in sorted({_existing_parent(root, path) for path in [*paths, JOURNAL]}):
        if not os.access(directory, os.W_OK | os.X_OK):
            raise no_permission(directory)


def no_permission(directory: Path) -> CannotWrite:
    try:
        import pwd

        owner = pwd.getpwuid(directory.stat().st_uid).pw_name
    except (ImportError, KeyError, OSError):
        owner = "another user"
    return CannotWrite(
        f"No permission to write in {directory} (it belongs to {owner}); nothing was changed. "
        "Run the command as that user, or install SGLang in a virtual environment of your own."
    )


def run(
    root: Path,
    changes: Sequence[Change],
    journal: dict[str, Any],
    remove: Sequence[str] = (),
    sweep: Sequence[str] = (),
) -> None:
    """`journal`: what a later run must know if this one dies; `remove`: directories to remove at the end if they are
    empty, the deepest first; `sweep`: paths whose temporary files an earlier run may have left."""
    check_writable(root, [c.path for c in changes])
    journal_path = root / JOURNAL
    taken_over = journal_path.exists()
    made = missing_directories(root, [c.path for c in changes if c.new is not None])
    begun: list[Change] = []
    try:
        data = (json.dumps(journal, indent=1) + "\n").encode()
        fs.write(temporary(journal_path), data, 0o644)
        fs.replace(temporary(journal_path), journal_path)
        for change in changes:
            if change.new is not None:
                _stage(root, change.path, change.new, change.mode)
        fs.sync_directory(root)
        for change in changes:
            begun.append(change)
            _move(root, change.path, change.new is not None)
        _forget_bytecode(root, changes)
        clean(root, sweep)
        for relative in remove:
            _remove_directory(root / relative)
        for directory in {(root / c.path).parent for c in changes}:
            if directory.is_dir():
                fs.sync_directory(directory)
        fs.unlink(journal_path)  # from here on it is done: nothing may fail below
    except BaseException as error:
        try:
            _undo(root, changes, begun, made)
            if not taken_over:
                fs.unlink(journal_path)
        except BaseException as second:
            raise Interrupted(
                f"Stopped half-way ({_reason(error)}) and could not put the files back ({_reason(second)}): "
                f"{root} is half patched. `treewy patch revert` restores the original once the cause is removed."
            ) from error
        if isinstance(error, PermissionError):
            raise no_permission(Path(error.filename).parent if error.filename else root) from error
        if isinstance(error, OSError):
            raise CannotWrite(f"Writing failed ({_reason(error)}); nothing was changed.") from error
        raise


def _undo(root: Path, changes: Sequence[Change], begun: Sequence[Change], made: Sequence[str]) -> None:
    for change in reversed(begun):
        if change.old is not None and change.old != _content(root / change.path):
            _stage(root, change.path, change.old, change.mode)
            _move(root, change.path, True)
        elif change.old is None:
            fs.unlink(root / change.path)
    clean(root, [c.path for c in changes])
    _forget_bytecode(root, begun)
    for relative in made:
        _remove_directory(root / relative)


def clean(root: Path, paths: Sequence[str] = ()) -> None:
    """Remove temporary files."""
    for path in [*paths, JOURNAL]:
        if temporary(root / path).parent.is_dir():
            fs.unlink(temporary(root / path))


def _content(path: Path) -> Optional[bytes]:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _stage(root: Path, relative: str, data: bytes, mode: int) -> None:
    path = root / relative
    for directory in reversed(path.relative_to(root).parents):
        if not (root / directory).is_dir():
            fs.mkdir(root / directory)
    owner = None
    try:
        info = path.stat()
        mode, owner = stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid)
    except FileNotFoundError:
        # A new file belongs to whoever owns the directory.
        info = path.parent.stat()
        owner = (info.st_uid, info.st_gid)
    fs.write(temporary(path), data, mode, owner)


def _move(root: Path, relative: str, present: bool) -> None:
    # os.replace and not a write in place: installers link files of one cache into many environments.
    if present:
        fs.replace(temporary(root / relative), root / relative)
    else:
        fs.unlink(root / relative)


def _forget_bytecode(root: Path, changes: Sequence[Change]) -> None:
    """Python trusts bytecode by time and size of its source, or (unchecked-hash) blindly: remove it."""
    for change in changes:
        path = root / change.path
        if path.suffix != ".py":
            continue
        stale = set((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
        if sys.pycache_prefix:
            stale.add(Path(importlib.util.cache_from_source(str(path))))
        for compiled in sorted(stale):
            fs.unlink(compiled)


def missing_directories(root: Path, paths: Sequence[str]) -> list[str]:
    """Directories that these files need and that are not there, the deepest first."""
    missing = {str(d) for path in paths for d in Path(path).parents if not (root / d).is_dir()}
    return sorted(missing, key=lambda d: (-d.count("/"), d))


def _remove_directory(path: Path) -> None:
    for directory in (path / "__pycache__", path):
        if directory.is_dir() and not any(directory.iterdir()):
            fs.rmdir(directory)


def _existing_parent(root: Path, relative: str) -> Path:
    directory = (root / relative).parent
    while not directory.is_dir():
        directory = directory.parent
    return directory


def _reason(error: BaseException) -> str:
    if isinstance(error, PatchError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
