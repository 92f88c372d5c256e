"""Every operation that changes the disk, in one place, so that tests can make each of them fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional


def write(path: Path, data: bytes, mode: int, owner: Optional[tuple[int, int]] = None) -> None:
    """A new file, on the disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        if owner is not None and owner != (os.fstat(fd).st_uid, os.fstat(fd).st_gid):
            try:
                os.chown(fd, *owner)
            except PermissionError:
                pass  # not root: the file stays with the user who patches
        os.chmod(fd, mode)
        file.flush()
        os.fsync(fd)


def replace(source: Path, destination: Path) -> None:
    os.replace(source, destination)


def unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def mkdir(path: Path) -> None:
    """A directory that belongs to whoever owns its parent, where that can be."""
    os.mkdir(path)
    os.chmod(path, 0o755)
    parent, own = path.parent.stat(), path.stat()
    if (parent.st_uid, parent.st_gid) != (own.st_uid, own.st_gid):
        try:
            os.chown(path, parent.st_uid, parent.st_gid)
        except PermissionError:
            pass


def rmdir(path: Path) -> None:
    os.rmdir(path)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system can
    finally:
        os.close(fd)
