from __future__ import annotations

import os
import re
import subprocess

import pytest

from treewy_sglang.patching import BadTarget, Refused, Series
from treewy_sglang.patching.exporting import export, import_series
from treewy_sglang.patching.series import Upstream

from .conftest import FIELDS, TAG, UPSTREAM, git, make_checkout, snapshot

PIN = Upstream.parse(UPSTREAM)


@pytest.fixture
def checkout(tmp_path):
    """At the tag, without commits."""
    return make_checkout(tmp_path / "checkout", edits=())


def commit(checkout, subject="A seam", fields=FIELDS, **files):
    for name, data in (files or {"pool": b"changed\n"}).items():
        (checkout / "python/sglang/srt" / f"{name}.py").write_bytes(data)
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "--allow-empty-message", "-m", f"{subject}\n\n{fields}")


def files_of(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def test_round_trip(checkout, patches, series, tmp_path):
    assert "Imported 3 patches" in import_series(checkout, series, patches)
    assert "they add" in export(checkout, tmp_path / "out", PIN)
    assert files_of(tmp_path / "out") == files_of(patches)
    assert "(0 files changed)" in export(checkout, tmp_path / "out", PIN)
    assert [line for line in git(checkout, "log", "--reverse", "--format=%s", f"{TAG}..").splitlines()] == [
        p.subject for p in series.patches
    ]
    assert (checkout / "python/sglang/srt/tool.sh").stat().st_mode & 0o111, "modes survive"


def test_the_users_settings_do_not_matter(checkout, patches, series, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(
        "[user]\n name = Ünï Cödé\n email = x@y\n[diff]\n noprefix = true\n context = 9\n algorithm = patience\n"
        " renames = copies\n mnemonicPrefix = true\n external = false\n orderFile = /nonexistent\n"
        " interHunkContext = 9\n"
        "[core]\n abbrev = 7\n autocrlf = true\n hooksPath = /nonexistent\n pager = false\n quotePath = false\n"
        "[format]\n signature = me\n signOff = true\n[color]\n ui = always\n[am]\n threeWay = true\n"
        "[apply]\n whitespace = fix\n"
        "[commit]\n gpgSign = true\n[log]\n showSignature = true\n"
        "[i18n]\n logOutputEncoding = latin1\n commitEncoding = latin1\n"
    )
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u0")
    monkeypatch.setenv("LC_ALL", "C")
    (checkout / ".git/info/attributes").write_text("*.py diff=python\n*.h diff=cpp\n")
    import_series(checkout, series, patches)
    export(checkout, tmp_path / "out", PIN)
    assert files_of(tmp_path / "out") == files_of(patches)


def test_plain_git_takes_the_patches(checkout, patches, series):
    """Without this package: `git am` and `git apply` know them."""
    names = [str(patches / p.name) for p in series.patches]
    git(checkout, "apply", "--check", names[0])
    git(checkout, "am", "-q", "--keep-cr", *names)
    git(checkout, "-c", "core.whitespace=cr-at-eol", "diff", "--check", TAG)


def test_what_is_written(patches):
    for path in patches.glob("*.patch"):
        text = path.read_bytes().decode()
        lines = text.split("\n")
        assert lines[0] == f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
        assert lines[1].endswith("treewy.invalid>") and lines[2].startswith("Subject: [PATCH] ")
        assert "Some One" not in text and "Date:" not in text and "git version" not in text
    assert (patches / "series").read_text().split() == [
        "0001-arguments-the-flag.patch",
        "0002-pool-the-seam.patch",
        "0003-arguments-check-the-flag.patch",
    ]
    assert "@@ class Pool:\n" not in text
    second = (patches / "0002-pool-the-seam.patch").read_text()
    assert " python/sglang/srt/extra/deep/seam.py (new): +2 -0\n" in second


def test_hunks_name_their_function(checkout, tmp_path):
    source = "class A:\n    def first(self):\n" + "        x = 1\n" * 20 + "\n    def second(self):\n        pass\n"
    commit(checkout, "One", untouched=source.encode())
    commit(checkout, "Two", untouched=source.replace("x = 1\n" * 1 + "\n    def sec", "x = 2\n\n    def sec").encode())
    export(checkout, tmp_path / "out", PIN)
    assert re.search(rb"^@@ \S+ \S+ @@ def first\(self\):$", (tmp_path / "out/0002-two.patch").read_bytes(), re.M)


def test_stale_patches_go_and_the_rest_stays(checkout, tmp_path):
    commit(checkout, "Old name")
    export(checkout, tmp_path / "out", PIN)
    (tmp_path / "out/README.md").write_text("kept\n")
    git(checkout, "commit", "-q", "--amend", "-m", f"New name\n\n{FIELDS}")
    export(checkout, tmp_path / "out", PIN)
    assert sorted(files_of(tmp_path / "out")) == ["0001-new-name.patch", "README.md", "UPSTREAM", "series"]
    assert (tmp_path / "out/UPSTREAM").read_text().startswith(UPSTREAM)


def test_rebased_commits_export_alike(checkout, tmp_path):
    commit(checkout)
    export(checkout, tmp_path / "one", PIN)
    environment = {**os.environ, "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z"}
    amend = ["commit", "-q", "--amend", "--no-edit", "--author=Other <o@o>", "--date=2002-02-02T00:00:00Z"]
    command = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@x", *amend]
    subprocess.run(command, check=True, env=environment)
    export(checkout, tmp_path / "two", PIN)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_uncommitted_changes_are_mentioned(checkout, tmp_path):
    commit(checkout)
    (checkout / "python/sglang/srt/pool.py").write_text("more\n")
    assert "Uncommitted changes" in export(checkout, tmp_path / "out", PIN)


@pytest.mark.parametrize("field", ["Seam", "Why no hook", "Can go when"])
def test_a_message_without_its_fields(checkout, tmp_path, field):
    commit(checkout, fields=FIELDS.replace(f"{field}:", "Other thing:"))
    with pytest.raises(Refused, match=f"A seam.*lacks '{field}:'"):
        export(checkout, tmp_path / "out", PIN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "subject, text, message",
    [
        ("[cpu] A seam", "", "not begin with"),
        ("Süam", "", "plain ASCII"),
        ("A seam\nmore", "", "followed by an empty one"),
        ("A seam", "\n---\nmore\n", "start of a diff or mail"),
        ("A seam", "\ndiff --git a/x b/x\n", "start of a diff or mail"),
    ],
)
def test_a_message_that_would_not_come_back(checkout, tmp_path, subject, text, message):
    commit(checkout, subject, FIELDS + text)
    with pytest.raises(Refused, match=message):
        export(checkout, tmp_path / "out", PIN)


def test_unicode_in_the_text_comes_back(checkout, tmp_path):
    commit(checkout, fields=FIELDS + "\nA line: naïve.   \n\n\n\n# Not a comment\n  indented\n")
    export(checkout, tmp_path / "one", PIN)
    other = make_checkout(tmp_path / "other", edits=())
    import_series(other, Series.load(tmp_path / "one"), tmp_path / "one")
    export(other, tmp_path / "two", PIN)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_changes_that_a_series_cannot_hold(checkout, tmp_path):
    def refused(message):
        with pytest.raises(Refused, match=message):
            export(checkout, tmp_path / "out", PIN)
        git(checkout, "reset", "-q", "--hard", TAG)

    refused("nothing to export")
    git(checkout, "rm", "-q", "python/sglang/srt/pool.py")
    commit(checkout, untouched=b"x = 2\n")
    refused("deletions")
    git(checkout, "mv", "python/sglang/srt/pool.py", "python/sglang/srt/pond.py")
    commit(checkout, untouched=b"x = 2\n")
    refused("deletions")
    (checkout / "python/sglang/srt/pool.py").chmod(0o755)
    commit(checkout, untouched=b"x = 2\n")
    refused("mode changes")
    commit(checkout, pool=bytes(range(256)))
    refused("binary")
    (checkout / "test.py").write_text("x\n")
    commit(checkout)
    refused("not a path below python/sglang/")
    before = (checkout / "python/sglang/srt/pool.py").read_bytes()
    commit(checkout, "One")
    commit(checkout, "Two", pool=before, untouched=b"x = 2\n")
    refused("takes the change back")
    git(checkout, "checkout", "-q", "-b", "side")
    commit(checkout, "Side")
    git(checkout, "checkout", "-q", "main")
    commit(checkout, "Main", untouched=b"x = 2\n")
    git(checkout, "merge", "-q", "-m", "merge", "side")
    refused("is a merge")
    git(checkout, "checkout", "-q", "--orphan", "alone")
    git(checkout, "commit", "-qm", "alone")
    with pytest.raises(Refused):
        export(checkout, tmp_path / "out", PIN)


def test_wrong_checkouts(tmp_path, checkout, patches, series):
    with pytest.raises(BadTarget, match="no python/sglang"):
        export(tmp_path, tmp_path / "out", PIN)
    git(checkout, "tag", "-d", TAG)
    with pytest.raises(Refused, match="no tag v1.2.3"):
        export(checkout, tmp_path / "out", PIN)
    git(checkout, "tag", TAG)
    (checkout / "python/sglang/srt/pool.py").write_text("mine\n")
    with pytest.raises(Refused, match="uncommitted"):
        import_series(checkout, series, patches)
    commit(checkout)
    with pytest.raises(Refused, match="is not v1.2.3"):
        import_series(checkout, series, patches)


def test_import_that_does_not_fit_changes_nothing(checkout, patches, series):
    (checkout / "python/sglang/srt/server_args.py").write_text("other\n")
    git(checkout, "commit", "-qam", "other base")
    git(checkout, "tag", "-f", TAG)
    before, head = snapshot(checkout / "python"), git(checkout, "rev-parse", "HEAD")
    with pytest.raises(Refused, match="git am refused"):
        import_series(checkout, series, patches)
    assert (snapshot(checkout / "python"), git(checkout, "rev-parse", "HEAD")) == (before, head)
    assert not (checkout / ".git/rebase-apply").exists()
