from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from treewy_sglang.patching import (
    BadSeries,
    BadTarget,
    CannotWrite,
    NotPatched,
    Refused,
    Series,
    apply,
    check,
    find_target,
    inspect,
    revert,
    verify_installed,
)
from treewy_sglang.patching.series import sha256
from treewy_sglang.patching.state import JOURNAL, STAMP, UNDO
from treewy_sglang.patching.target import same_version
from treewy_sglang.patching.transaction import lock

from .conftest import BASE, git, make_checkout, make_package, snapshot


def state(target, series) -> str:
    return inspect(target, series).state


def assert_patched(root: Path, patched_files) -> None:
    for path, data in {**BASE, **patched_files}.items():
        assert (root / path).read_bytes() == data, path


def test_apply_and_revert_restore_every_byte(target, series, package, patched_files):
    site = package.parent
    before = snapshot(site)
    assert check(target, series).state == "unpatched"
    assert snapshot(site) == before

    assert "Applied 3 patches (7 files) for v1.2.3" in apply(target, series, "9.9")
    assert_patched(package, patched_files)
    after = snapshot(site)
    changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    touched = {f"sglang/{p}" for p in patched_files}
    assert changed == touched | {"sglang/srt/extra", "sglang/srt/extra/deep", f"sglang/{STAMP}", f"sglang/{UNDO}"}
    for path in touched & before.keys():
        assert before[path][:3] == after[path][:3], "mode and owner"
    assert (package / "srt/extra/deep/seam.py").stat().st_mode & 0o777 == 0o644
    assert check(target, series).applied

    assert "Reverted 7 files" in revert(target, series)
    assert snapshot(site) == before
    assert "Nothing to revert" in revert(target, series)
    assert snapshot(site) == before


def test_twice_is_harmless(target, series, package):
    apply(target, series)
    before = snapshot(package)
    times = {p: (package / p).stat().st_mtime_ns for p in before}
    assert "Already applied" in apply(target, series)
    assert snapshot(package) == before
    assert {p: (package / p).stat().st_mtime_ns for p in before} == times


def test_the_stamp(target, series, package):
    apply(target, series, "9.9")
    stamp = json.loads((package / STAMP).read_text())
    assert (stamp["tag"], stamp["version"], stamp["treewy"]) == ("v1.2.3", "1.2.3", "9.9")
    assert stamp["series"] == series.digest
    assert [(f["path"], f["after"]) for f in stamp["files"]] == [
        (f.relative, sha256((package / f.relative).read_bytes())) for f in series.upstream.files
    ]
    first = snapshot(package)
    revert(target, series)
    apply(target, series, "9.9")
    assert snapshot(package) == first, "the same stamp and undo archive each time"


def test_checkout_layout(tmp_path, series, patched_files):
    top = make_checkout(tmp_path / "checkout", edits=())
    before = snapshot(top / "python")
    for path in (top, top / "python", top / "python" / "sglang"):
        target = find_target(path)
        assert (target.layout, target.root) == ("checkout", top / "python" / "sglang")
        assert inspect(target, series).version == "1.2.3"
        apply(target, series)
        assert_patched(target.root, patched_files)
        revert(target, series)
        assert snapshot(top / "python") == before
        assert git(top, "status", "--porcelain") == ""


def test_checkout_of_another_tag(tmp_path, series):
    top = make_checkout(tmp_path / "checkout", edits=())
    git(top, "commit", "-q", "--allow-empty", "-m", "next")
    assert state(find_target(top), series) == "unpatched", "own commits on top of the tag do not matter"
    git(top, "tag", "gateway-v9")
    assert state(find_target(top), series) == "unpatched"
    git(top, "tag", "v1.3.0")
    with pytest.raises(Refused, match=r"SGLang 1\.3\.0; .* SGLang 1\.2\.3 \(tag v1\.2\.3\)"):
        apply(find_target(top), series)


def test_source_archive_without_version(tmp_path, series, patched_files):
    top = make_checkout(tmp_path / "checkout", edits=())
    shutil.rmtree(top / ".git")
    (top / "python/sglang/version.py").write_text('__version__ = "0.0.0.dev0"\n')
    status = inspect(find_target(top), series)
    assert (status.state, status.version, status.layout) == ("unpatched", None, "checkout")
    assert "hashes" in status.notes[0]
    apply(find_target(top), series)


def test_commits_in_a_checkout_only_need_the_stamp(tmp_path, series):
    top = make_checkout(tmp_path / "checkout")
    target = find_target(top)
    assert state(target, series) == "unstamped"
    with pytest.raises(Refused, match="no stamp"):
        check(target, series)
    with pytest.raises(NotPatched, match="patch apply"):
        verify_installed(target.root, series)
    assert "patched already; the stamp was written" in apply(target, series)
    assert verify_installed(target.root, series).applied
    assert git(top, "status", "--porcelain").splitlines() == [f"?? python/sglang/{name}" for name in (STAMP, UNDO)]
    revert(target, series)
    assert state(target, series) == "unpatched"
    assert git(top, "diff", "v1.2.3", "--stat") == ""


@pytest.mark.parametrize("version", ["1.2.4", "1.2.3.post1", "1.2.3rc1", "1.2"])
def test_wrong_version(tmp_path, series, version):
    root = make_package(tmp_path / "site", version)
    before = snapshot(tmp_path)
    for operation in (apply, check):
        with pytest.raises(Refused, match=rf"This is SGLang {version}; .* for SGLang 1\.2\.3 \(tag v1\.2\.3\)"):
            operation(find_target(root), series)
    with pytest.raises(NotPatched, match=r"Install sglang==1\.2\.3"):
        verify_installed(root, series)
    assert "Nothing to revert" in revert(find_target(root), series)
    assert snapshot(tmp_path) == before


def test_versions(tmp_path, series):
    assert same_version("1.2.3+cu130", "1.2.3") and not same_version("1.2.30", "1.2.3")
    root = make_package(tmp_path / "site")
    shutil.rmtree(tmp_path / "site/sglang-1.2.3.dist-info")
    assert inspect(find_target(root), series).version == "1.2.3", "from version.py"
    for version in ("1.2.3", "1.2.4"):
        info = tmp_path / f"site/sglang-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    assert "several dist-info" in inspect(find_target(root), series).detail


def test_modified_file(target, series, package):
    path = package / "srt/pool.py"
    path.write_bytes(path.read_bytes() + b"# mine\n")
    before = snapshot(package)
    for operation in (apply, check, verify_installed):
        with pytest.raises((Refused, NotPatched)) as caught:
            operation(package if operation is verify_installed else target, series)
        sentence = str(caught.value)
        pinned = next(f for f in series.upstream.files if f.relative == "srt/pool.py")
        assert "sglang/srt/pool.py" in sentence
        for digest in (sha256(path.read_bytes()), pinned.before, pinned.after):
            assert digest in sentence
    with pytest.raises(Refused, match="no patch of TreeWY is here"):
        revert(target, series)
    assert snapshot(package) == before


def test_line_ends_changed(target, series, package):
    path = package / "srt/server_args.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(Refused, match=r"Only the line ends differ \(CRLF\).*autocrlf"):
        apply(target, series)


def test_line_ends_of_the_series_are_kept(target, series, package):
    apply(target, series)
    assert (package / "srt/dos.txt").read_bytes() == b"one\r\n2\rthree\r\nfour\r\n"


def test_missing_file(target, series, package):
    (package / "srt/pool.py").unlink()
    with pytest.raises(Refused, match="sglang/srt/pool.py is missing"):
        apply(target, series)


def test_a_file_stands_where_one_would_be_added(target, series, package):
    (package / "srt/extra/deep").mkdir(parents=True)
    (package / "srt/extra/deep/seam.py").write_text("mine\n")
    with pytest.raises(Refused, match="seam.py has been changed: .* no file was expected there"):
        apply(target, series)
    with pytest.raises(Refused):
        revert(target, series)
    assert (package / "srt/extra/deep/seam.py").read_text() == "mine\n"


def test_odd_files_are_refused(target, series, package, tmp_path):
    path = package / "srt/pool.py"
    path.rename(tmp_path / "pool.py")
    path.symlink_to(tmp_path / "pool.py")
    with pytest.raises(Refused, match="pool.py is a symbolic link"):
        apply(target, series)
    path.unlink()
    path.mkdir()
    with pytest.raises(Refused, match="not a regular file"):
        apply(target, series)
    path.rmdir()
    (package / "srt").rename(tmp_path / "srt")
    (package / "srt").symlink_to(tmp_path / "srt")
    with pytest.raises(Refused, match="srt is a symbolic link"):
        apply(target, series)


def test_hard_links_into_a_cache_are_broken_not_written_through(target, series, package, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    for number, path in enumerate(sorted(p for p in package.rglob("*") if p.is_file())):
        os.link(path, cache / str(number))
    before = snapshot(cache)
    apply(target, series)
    assert snapshot(cache) == before
    revert(target, series)
    assert snapshot(cache) == before


def test_partly_patched(target, series, package, patched_files):
    original = snapshot(package)
    for path in ("srt/pool.py", "srt/tail.h"):
        (package / path).write_bytes(patched_files[path])
    assert state(target, series) == "partial"
    for operation in (apply, check):
        with pytest.raises(Refused, match=r"Only 2 of 7 files are patched .*patch revert"):
            operation(target, series)
    with pytest.raises(NotPatched, match="patch revert"):
        verify_installed(package, series)
    assert "Reverted 2 files" in revert(target, series)
    assert snapshot(package) == original


def test_changed_after_patching(target, series, package):
    original = snapshot(package)
    apply(target, series)
    for path in ("srt/pool.py", "srt/extra/deep/seam.py"):
        (package / path).write_bytes(b"debugging\n")
    before = snapshot(package)
    assert state(target, series) == "modified"
    with pytest.raises(NotPatched, match="has been changed"):
        verify_installed(package, series)
    with pytest.raises(Refused, match=r"was changed after it was patched \(and 1 more\).*--force"):
        revert(target, series)
    with pytest.raises(Refused):
        apply(target, series)
    assert snapshot(package) == before
    revert(target, series, force=True)
    assert snapshot(package) == original


@pytest.mark.parametrize("loss", ["undo", "stamp", "both", "damaged undo", "damaged stamp"])
def test_lost_stamp_or_undo(target, series, package, loss):
    original = snapshot(package)
    apply(target, series)
    complete = snapshot(package)
    if loss in ("undo", "both"):
        (package / UNDO).unlink()
    if loss in ("stamp", "both"):
        (package / STAMP).unlink()
    if loss == "damaged undo":
        (package / UNDO).write_bytes((package / UNDO).read_bytes()[:100])
    if loss == "damaged stamp":
        (package / STAMP).write_text("{}")
    if "undo" in loss:
        assert verify_installed(package, series).applied, "the files and the stamp are right"
    else:
        with pytest.raises(NotPatched, match="no stamp"):
            verify_installed(package, series)
    apply(target, series)
    assert {p for p in complete if complete[p] != snapshot(package)[p]} <= {STAMP}
    assert verify_installed(package, series).applied
    if "undo" in loss:
        (package / UNDO).unlink()
    revert(target, series)
    assert {p for p in snapshot(package)} - {"srt/extra", "srt/extra/deep"} == set(original)
    assert all(snapshot(package)[p] == original[p] for p in original)


def test_an_earlier_series_is_replaced(target, series, package, shorter_patches, patched_files):
    original = snapshot(package)
    earlier = Series.load(shorter_patches)
    apply(target, earlier, "0.1")
    assert state(target, series) == "outdated"
    with pytest.raises(Refused, match=r"Another TreeWY series is applied \(by treewy 0\.1\)"):
        check(target, series)
    with pytest.raises(NotPatched, match="patch apply"):
        verify_installed(package, series)
    assert "Replaced an earlier series" in apply(target, series)
    assert_patched(package, patched_files)
    assert verify_installed(package, series).applied
    assert not (package / "srt/gone").exists()
    revert(target, series)
    assert snapshot(package) == original


def test_an_earlier_series_is_reverted_by_its_own_undo(target, series, package, shorter_patches):
    original = snapshot(package)
    apply(target, Series.load(shorter_patches))
    revert(target, series)
    assert snapshot(package) == original


def test_an_earlier_series_without_its_undo(target, series, package, shorter_patches):
    apply(target, Series.load(shorter_patches))
    (package / UNDO).unlink()
    before = snapshot(package)
    with pytest.raises(Refused, match=r"Install sglang==1\.2\.3 again"):
        revert(target, series)
    with pytest.raises(Refused, match="nothing was changed"):
        apply(target, series)
    assert snapshot(package) == before


def test_an_earlier_series_below_half_of_ours(target, series, package, shorter_patches, patched_files):
    """Files that only the earlier series touched count too."""
    apply(target, Series.load(shorter_patches))
    for path, data in patched_files.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(data)
    assert state(target, series) == "modified"
    assert "srt/" in inspect(target, series).detail


def test_sglang_was_installed_again(target, series, package, tmp_path):
    original = snapshot(package)
    apply(target, series)
    for path, data in BASE.items():
        (package / path).write_bytes(data)
    shutil.rmtree(package / "srt/extra")
    status = inspect(target, series)
    assert status.state == "unpatched" and "left over" in status.notes[0]
    apply(target, series)
    revert(target, series)
    assert snapshot(package) == original


def test_another_version_was_installed_over_it(target, series, package):
    apply(target, series)
    site = package.parent
    shutil.rmtree(site / "sglang-1.2.3.dist-info")
    shutil.rmtree(package / "srt/extra")
    other = make_package(site / "other", "1.3.0")
    (other / "srt/pool.py").write_text("new\n")
    shutil.copytree(site / "other", site, dirs_exist_ok=True)
    shutil.rmtree(site / "other")
    with_stamp = snapshot(package)
    with pytest.raises(Refused, match=r"1\.3\.0"):
        apply(target, series)
    assert snapshot(package) == with_stamp
    revert(target, series)
    assert (package / "srt/pool.py").read_text() == "new\n"
    assert set(with_stamp) - set(snapshot(package)) == {STAMP, UNDO}


def test_a_damaged_series_writes_nothing(target, package, patches, copy_of):
    copy = copy_of(patches)
    path = next(copy.glob("0003-*"))
    path.write_bytes(path.read_bytes().replace(b"+check\n", b"+chuck\n"))
    before = snapshot(package)
    for operation in (check, apply):
        with pytest.raises(BadSeries, match="0003"):
            operation(target, Series.load(copy))
    assert snapshot(package) == before


def test_stale_bytecode_goes(target, series, package):
    pool, cache = package / "srt/pool.py", package / "srt/__pycache__"
    compiled = Path(py_compile.compile(str(pool), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))
    other = cache / "pool.cpython-399.opt-1.pyc"
    other.write_bytes(compiled.read_bytes())
    kept = Path(py_compile.compile(str(package / "srt/untouched.py")))

    def value() -> str:
        code = "import sglang.srt.pool as p; print(p.Pool().alloc())"
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert value() == "1"
    apply(target, series)
    assert not compiled.exists() and not other.exists() and kept.exists()
    assert value() == "2"
    py_compile.compile(str(pool), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    py_compile.compile(str(package / "srt/extra/deep/seam.py"))
    revert(target, series)
    assert value() == "1"
    assert not (package / "srt/extra").exists(), "bytecode of added files does not keep their directory alive"


def test_files_of_others_in_an_added_directory_stay(target, series, package):
    apply(target, series)
    (package / "srt/extra/notes").write_text("mine\n")
    revert(target, series)
    assert sorted(p.name for p in (package / "srt/extra").iterdir()) == ["notes"]


@pytest.fixture
def as_another_user():
    """Root may write everywhere: give root's rights up for the test."""
    if os.geteuid() != 0:
        yield
        return
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)
    os.setresgid(0, 0, 0)


@pytest.fixture
def open_directory():
    """pytest's own directories are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
        for path in Path(name).rglob("*"):
            if path.is_dir():
                path.chmod(0o755)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("closed", ["everything", "one directory"])
def test_no_permission(open_directory, series, patched, closed, request):
    site = open_directory / "site"
    package = make_package(site)
    (package / "srt/pool.py").chmod(0o644)
    target = find_target(package)
    if patched:
        apply(target, series)
    if closed == "one directory":
        package.chmod(0o777)
        (package / "srt").chmod(0o555)
    else:
        for path in (package, package / "srt"):
            path.chmod(0o555)
    before = snapshot(site)
    request.getfixturevalue("as_another_user")
    if patched:
        assert "Already applied" in apply(target, series)
        assert verify_installed(package, series).applied
    for operation in (revert,) if patched else (check, apply):
        with pytest.raises(CannotWrite, match=rf"No permission to write in {package}.* \(it belongs to \w+\); nothing"):
            operation(target, series)
    assert snapshot(site) == before


def test_one_at_a_time(target, series, package):
    with lock(package):
        for operation in (apply, revert):
            with pytest.raises(Refused, match="Another `treewy patch` is at work"):
                operation(target, series)
    apply(target, series)
    assert not (package / JOURNAL).exists()


@pytest.mark.parametrize("path", ["../outside.py", "/outside.py", "srt/../../outside.py"])
def test_a_forged_stamp_reaches_nothing_outside(target, series, package, path):
    apply(target, series)
    stamp = json.loads((package / STAMP).read_text())
    outside = package.parent / "outside.py"
    outside.write_bytes(b"mine\n")
    stamp["files"].append({"path": path, "before": None, "after": sha256(b"mine\n")})
    (package / STAMP).write_text(json.dumps(stamp))
    revert(target, series)
    assert outside.exists()


def test_targets(tmp_path, package):
    site = package.parent
    assert find_target(site) == find_target(package) == find_target(str(package) + "/")
    assert find_target(site).layout == "package"
    (tmp_path / "link").symlink_to(package)
    assert find_target(tmp_path / "link").root == package
    for path, message in [
        (tmp_path / "nowhere", "not a directory"),
        (package / "version.py", "not a directory"),
        (package / "srt", "is not SGLang"),
        (tmp_path, "is not SGLang"),
    ]:
        with pytest.raises(BadTarget, match=message):
            find_target(path)
