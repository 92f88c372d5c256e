"""apply, revert and the check at server start."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any, Optional, Union

from . import transaction
from .errors import NotPatched, PatchError, Refused
from .series import Series, sha256
from .state import (
    APPLIED,
    INTERRUPTED,
    JOURNAL,
    OUTDATED,
    PARTIAL,
    STAMP,
    STAMP_FORMAT,
    UNDO,
    UNPATCHED,
    UNSTAMPED,
    WRONG_VERSION,
    Status,
    inspect,
    read_file,
    read_record,
    upstream_path,
)
from .target import Target, find_target, find_version, installed_root
from .transaction import Change

# sha256 before, every sha256 that a TreeWY series gave it, mode if it was added
Known = tuple[Optional[str], set[str], int]
Contents = dict[str, Optional[bytes]]  # by path below the sglang directory


def apply(target: Target, series: Series, treewy_version: str = "unknown") -> str:
    """Patch `target`; returns what was done, in a sentence. Raises PatchError and changes nothing otherwise."""
    with transaction.lock(target.root):
        status = inspect(target, series)
        if status.state == APPLIED and undo_is_good(target.root, status.stamp):
            return f"Already applied: {_count(series)} in {target.root}, nothing changed."
        if status.state == OUTDATED:
            _check_outdated(target, series)
            _revert(target, series, status, force=False)
            try:
                _apply(target, series, treewy_version)
            except PatchError as error:
                raise type(error)(f"The earlier series was taken out, this one not put in: {error}") from error
            return f"Replaced an earlier series by {_count(series)} in {target.root}."
        if status.state == UNPATCHED:
            _apply(target, series, treewy_version)
            return f"Applied {_count(series)} to {target.root}."
        if status.state in (UNSTAMPED, APPLIED):
            _apply(target, series, treewy_version)
            return f"The files in {target.root} were patched already; the stamp was written."
        raise Refused(f"Not applied, nothing was changed: {status.detail}")


def check(target: Target, series: Series) -> Status:
    """The status, if the series is applied or `apply` would succeed now; raises PatchError otherwise."""
    status = inspect(target, series)
    if status.state == APPLIED:
        return status
    if status.state != UNPATCHED:
        raise Refused(status.detail)
    _patched(target, series)
    transaction.check_writable(target.root, [f.path for f in status.files])
    return status


def revert(target: Target, series: Series, force: bool = False) -> str:
    """Restore every file of SGLang. `force` also discards changes made by hand since."""
    with transaction.lock(target.root):
        status = inspect(target, series)
        return _revert(target, series, status, force)


def verify_installed(sglang_root: Union[str, Path, None] = None, series: Optional[Series] = None) -> Status:
    """For the server at start: the status if this package's series is applied and intact, else NotPatched."""
    root = Path(sglang_root) if sglang_root is not None else installed_root()
    target = find_target(root)
    status = inspect(target, series or Series.load())
    if not status.applied:
        if status.state in (UNPATCHED, OUTDATED, UNSTAMPED):
            remedy = f"Run: {sys.executable} -m treewy_sglang patch apply {target.root}"
        elif status.state == WRONG_VERSION:
            remedy = f"Install sglang=={status.pin_version}."
        elif status.state in (PARTIAL, INTERRUPTED):
            remedy = f"Run: {sys.executable} -m treewy_sglang patch revert {target.root}, then the same with apply."
        else:
            remedy = f"Install sglang=={status.pin_version} again, then: {sys.executable} -m treewy_sglang patch apply"
        raise NotPatched(f"SGLang in {target.root} does not carry this TreeWY's patches. {status.detail} {remedy}")
    return status


# Applying


def _patched(target: Target, series: Series) -> tuple[Contents, Contents]:
    """(original, patched) contents of every touched file, from a target that has either."""
    original: Contents = {}
    for pinned in series.upstream.files:
        data = read_file(target.root, pinned.relative)
        if data is not None and sha256(data) == pinned.after:
            data = series.backward({pinned.path: data})[pinned.path]
        original[pinned.relative] = data
    patched = series.forward({upstream_path(path): data for path, data in original.items()})
    return original, {path: patched[upstream_path(path)] for path in original}


def _apply(target: Target, series: Series, treewy_version: str) -> None:
    original, patched = _patched(target, series)
    undo = _pack(original)
    files = [
        {"path": f.relative, "before": f.before, "after": f.after} for f in series.upstream.files
    ]
    new = [f.relative for f in series.upstream.files if f.before is None]
    earlier = read_record(target.root, STAMP) or {}
    created = transaction.missing_directories(target.root, new) or earlier.get("created", [])
    stamp = {
        "format": STAMP_FORMAT,
        "about": "SGLang is patched by treewy; `treewy patch revert` restores the original.",
        "treewy": treewy_version,
        "tag": series.upstream.tag,
        "version": series.upstream.version,
        "series": series.digest,
        "patches": [patch.name for patch in series.patches],
        "undo": sha256(undo),
        "created": created,
        "files": files,
    }
    changes = [Change(UNDO, read_file(target.root, UNDO), undo)]
    for pinned in series.upstream.files:
        path = pinned.relative
        now = read_file(target.root, path)
        if now != patched[path]:
            changes.append(Change(path, now, patched[path], series.mode(pinned.path) or 0o644))
    changes.append(Change(STAMP, read_file(target.root, STAMP), _json(stamp)))
    transaction.run(target.root, changes, stamp)


def _check_outdated(target: Target, series: Series) -> None:
    """Before an earlier series is taken out: would ours apply to what it leaves?"""
    stamp = read_record(target.root, STAMP) or {}
    original = _originals(target, series, [stamp])
    for pinned in series.upstream.files:
        data = original[pinned.relative] if pinned.relative in original else read_file(target.root, pinned.relative)
        found = None if data is None else sha256(data)
        if found != pinned.before:
            raise Refused(
                f"Not applied, nothing was changed: without the earlier series sglang/{pinned.relative} has sha256 "
                f"{found}, expected {pinned.before}."
            )


# Reverting


def _revert(target: Target, series: Series, status: Status, force: bool) -> str:
    root = target.root
    stamp = read_record(root, STAMP)
    journal = read_record(root, JOURNAL)
    records = [r for r in (journal, stamp) if r]
    if status.state == WRONG_VERSION and not records and stamp is None:
        return f"Nothing to revert: {status.detail}"
    # A stamp of another version was left behind when SGLang was installed again: its files are no longer ours.
    version = find_version(target)
    reinstalled = bool(records) and version is not None and all(
        r.get("version") != version.partition("+")[0] for r in records
    )
    known = _known(series, records, status)
    current = {path: read_file(root, path) for path in known}
    dirty = []
    changes = []
    originals: Optional[Contents] = None
    for path, (before, afters, mode) in sorted(known.items()):
        data = current[path]
        found = None if data is None else sha256(data)
        if found == before:
            continue
        if found not in afters:
            if reinstalled:
                continue
            if not force:
                dirty.append(path)
                continue
        if before is None:
            changes.append(Change(path, data, None, mode))
            continue
        if originals is None:
            originals = _originals(target, series, records)
        restored = originals.get(path)
        if restored is None or sha256(restored) != before:
            raise Refused(
                f"Not reverted, nothing was changed: the original of sglang/{path} is in neither {UNDO} nor this "
                f"package's patches. Install sglang=={status.pin_version} again."
            )
        changes.append(Change(path, data, restored))
    if dirty:
        if not records and not changes:
            raise Refused(f"Nothing to revert: no patch of TreeWY is here. {status.detail}")
        raise Refused(
            f"Not reverted, nothing was changed: sglang/{dirty[0]} was changed after it was patched"
            + (f" (and {len(dirty) - 1} more)" if len(dirty) > 1 else "")
            + "; `treewy patch revert --force` discards that change."
        )
    restored_count = len(changes)
    for name in (STAMP, UNDO):
        data = read_file(root, name)
        if data is not None:
            changes.append(Change(name, data, None))
    if not changes and journal is None:
        transaction.clean(root)  # a run may have died while it wrote its journal
        return f"Nothing to revert: {root} is unpatched."
    created = [d for r in records for d in r.get("created", [])]
    record: dict[str, Any] = {
        **(records[0] if records else {"format": STAMP_FORMAT, "version": series.upstream.version}),
        "created": created,
        "files": [
            {"path": path, "before": before, "after": after}
            for path, (before, afters, _) in sorted(known.items())
            for after in sorted(afters)
        ],
    }
    transaction.run(root, changes, record, remove=created, sweep=[*known, STAMP, UNDO])
    return f"Reverted {restored_count} files in {root}; SGLang is as it was before patching."


def _known(series: Series, records: list[dict[str, Any]], status: Status) -> dict[str, Known]:
    """All files that a TreeWY series may have touched here."""
    known: dict[str, Known] = {}
    for record in records:
        for entry in record["files"]:
            before, afters, mode = known.get(entry["path"], (entry.get("before"), set(), 0o644))
            known[entry["path"]] = (before, afters | {entry["after"]}, mode)
    if status.state != WRONG_VERSION:
        for pinned in series.upstream.files:
            before, afters, _ = known.get(pinned.relative, (pinned.before, set(), 0o644))
            if before == pinned.before:
                mode = series.mode(pinned.path) or 0o644
                known[pinned.relative] = (before, afters | {pinned.after}, mode)
    return known


def _originals(target: Target, series: Series, records: list[dict[str, Any]]) -> Contents:
    """From the undo archive; what it lacks, by our own patches in reverse."""
    originals: Contents = {}
    archive = read_file(target.root, UNDO)
    if archive is not None:
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
                originals = {name: zipped.read(name) for name in zipped.namelist()}
        except (zipfile.BadZipFile, OSError, ValueError, KeyError):
            originals = {}
    for pinned in series.upstream.files:
        good = originals.get(pinned.relative)
        if pinned.before is None or (good is not None and sha256(good) == pinned.before):
            continue
        data = read_file(target.root, pinned.relative)
        if data is not None and sha256(data) == pinned.after:
            originals[pinned.relative] = series.backward({pinned.path: data})[pinned.path]
    return originals


def undo_is_good(root: Path, stamp: Optional[dict[str, Any]]) -> bool:
    archive = read_file(root, UNDO)
    return archive is not None and sha256(archive) == (stamp or {}).get("undo")


def _pack(original: Contents) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for path, data in sorted(original.items()):
            if data is not None:
                info = zipfile.ZipInfo(path)  # fixed date: the same files give the same archive
                info.compress_type = zipfile.ZIP_DEFLATED
                zipped.writestr(info, data)
    return buffer.getvalue()


def _json(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _count(series: Series) -> str:
    patches, files = len(series.patches), len(series.upstream.files)
    return f"{patches} patch{'es' * (patches > 1)} ({files} file{'s' * (files > 1)}) for {series.upstream.tag}"
