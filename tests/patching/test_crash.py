"""All or nothing, whatever operation fails, and whenever the process dies."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from treewy_sglang.patching import (
    CannotWrite,
    Interrupted,
    NotPatched,
    Refused,
    Series,
    apply,
    inspect,
    revert,
    verify_installed,
)
from treewy_sglang.patching.state import JOURNAL

from .conftest import Faults, snapshot


class Died(BaseException):
    pass


ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"),
    PermissionError(errno.EACCES, "Permission denied"),
    KeyboardInterrupt(),
]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def operations(series, shorter_patches):
    """name -> (what comes before, the operation)."""
    earlier = Series.load(shorter_patches)
    return {
        "apply": (lambda target: None, lambda target: apply(target, series)),
        "revert": (lambda target: apply(target, series), lambda target: revert(target, series)),
        "replace": (lambda target: apply(target, earlier), lambda target: apply(target, series)),
    }


@pytest.mark.parametrize("name", ["apply", "revert"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_one_failure_changes_nothing(target, series, package, shorter_patches, name, error):
    before, operation = operations(series, shorter_patches)[name]
    before(target)
    start = snapshot(package)
    for at in range(1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, error)
            if not isinstance(error, OSError):
                expected = type(error)
            else:
                expected = CannotWrite
            try:
                operation(target)
            except expected as caught:
                if expected is CannotWrite:
                    assert "nothing was changed" in str(caught)
            except Interrupted:
                pytest.fail(f"operation {at} was not taken back")
            else:
                assert not faults.reached
                break
        assert snapshot(package) == start, f"after failure {at}"
    assert at > 15
    assert snapshot(package) != start


@pytest.mark.parametrize("name", ["apply", "revert", "replace"])
def test_death_at_every_step_is_seen_and_mended(target, series, package, shorter_patches, name):
    before, operation = operations(series, shorter_patches)[name]
    original = snapshot(package)
    seen = set()
    for at in range(1, 1000):
        before(target)
        start = snapshot(package)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, Died(), dies=True)
            try:
                operation(target)
                died = False
            except (Interrupted, Died):
                died = True
            assert died == faults.reached
        status = inspect(target, series)
        seen.add(status.state)
        if status.state == "interrupted":
            with pytest.raises(Refused, match="interrupted.*treewy patch revert"):
                apply(target, series)
            with pytest.raises(NotPatched, match="interrupted"):
                verify_installed(package, series)
        elif status.state != "applied" and snapshot(package) != start:
            # Nothing was moved yet: at most the journal's own temporary file, which the next run takes.
            extra = snapshot(package).keys() ^ start.keys()
            assert status.state == "unpatched" or extra <= {f".{JOURNAL}.treewy-new"}, (at, status.state, extra)
        revert(target, series)
        assert snapshot(package) == original, f"death {at}"
        if not died:
            break
    assert at > 15 and "interrupted" in seen


def test_death_while_mending(target, series, package):
    """`revert` of an interrupted run dies too, at every step of both."""
    original = snapshot(package)
    for first in range(1, 1000, 3):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, first, Died(), dies=True)
            try:
                apply(target, series)
            except (Interrupted, Died):
                pass
        if not faults.reached:
            break
        for second in range(1, 1000):
            with pytest.MonkeyPatch.context() as patch:
                faults = Faults(patch, second, Died(), dies=True)
                try:
                    revert(target, series)
                except (Interrupted, Died):
                    pass
            if not faults.reached:
                break
        assert snapshot(package) == original, first
    assert first > 15


def test_failure_while_mending_leaves_it_mendable(target, series, package):
    original = snapshot(package)
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, 20, Died(), dies=True)
        with pytest.raises(Interrupted, match="half patched.*treewy patch revert"):
            apply(target, series)
    for at in range(1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, ERRORS[0])
            try:
                revert(target, series)
            except (CannotWrite, Interrupted):
                assert inspect(target, series).state == "interrupted"
            if not faults.reached:
                break
    assert at > 5
    assert snapshot(package) == original


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1, "files": 3}'])
def test_unreadable_journal(target, series, package, damage):
    original = snapshot(package)
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, 22, Died(), dies=True)
        with pytest.raises(Interrupted):
            apply(target, series)
    (package / JOURNAL).write_text(damage)
    assert inspect(target, series).state == "interrupted"
    revert(target, series)
    left = {p for p in snapshot(package) if p not in original}
    assert left <= {"srt/extra", "srt/extra/deep"}, "the journal knew of these directories"
    assert all(snapshot(package)[p] == original[p] for p in original)


KILLED = """
import os, signal, sys
from treewy_sglang.patching import Series, apply, find_target, fs
real, count = fs.replace, 0
def replace(*arguments):
    global count
    count += 1
    if count == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
fs.replace = replace
apply(find_target(sys.argv[1]), Series.load(sys.argv[2]))
"""


def test_a_killed_process(target, series, package, patches):
    original = snapshot(package)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, package, patches], env=environment)
    assert done.returncode == -9
    assert inspect(target, series).state == "interrupted"
    revert(target, series)
    assert snapshot(package) == original
