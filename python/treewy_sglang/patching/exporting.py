"""For developers: commits over the tag -> patches/, and back. Needs git.

The same commits give the same bytes on every machine: no author, date, commit id or git version is written, and the
settings of the user's git that shape a diff are overridden.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Optional

from .errors import BadSeries, BadTarget, Refused
from .series import MAX_ADDED_LINES, REQUIRED_FIELDS, PinnedFile, Series, Upstream, missing_fields, sha256
from .unidiff import parse, split_lines

# `git am` wants an author; the series has one for all.
_FROM = "TreeWY maintainers <maintainers@treewy.invalid>"
_DIFF = (
    "diff-tree -p --full-index --no-renames --no-color --no-ext-diff --no-textconv --no-relative --unified=3 "
    "--inter-hunk-context=0 --diff-algorithm=myers --indent-heuristic --ignore-submodules=none -O/dev/null "
    "--src-prefix=a/ --dst-prefix=b/"
).split()


def git(checkout: Path, *arguments: str) -> bytes:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    for who in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{who}_NAME"], environment[f"GIT_{who}_EMAIL"] = _FROM[:-1].split(" <")
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, env=environment)
    except FileNotFoundError:
        raise Refused("git is not installed; export and import need it (apply and revert do not).") from None
    if done.returncode:
        error = done.stderr.decode(errors="replace").strip() or done.stdout.decode(errors="replace").strip()
        raise Refused(f"git {arguments[0]} failed in {checkout}: {error}")
    return done.stdout


def _tag_commit(checkout: Path, tag: str) -> str:
    if not (checkout / "python" / "sglang").is_dir():
        raise BadTarget(f"CHECKOUT {checkout} is not an SGLang checkout: it has no python/sglang.")
    try:
        return git(checkout, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}").decode().strip()
    except Refused:
        raise Refused(f"{checkout} has no tag {tag} (or is not a git checkout): git fetch --tags.") from None


def export_files(checkout: Path, upstream: Upstream) -> dict[str, bytes]:
    """UPSTREAM, series and patches by name, from the commits between the tag and HEAD."""
    base = _tag_commit(checkout, upstream.tag)
    head = git(checkout, "rev-parse", "HEAD").decode().strip()
    merge_base = git(checkout, "merge-base", base, head).decode().strip()
    if merge_base != base:
        raise Refused(f"HEAD of {checkout} is not on top of {upstream.tag}.")
    rows = git(checkout, "rev-list", "--reverse", "--topo-order", "--parents", f"{base}..{head}").decode().split("\n")
    commits = [row.split() for row in rows if row]
    if not commits:
        raise Refused(f"{checkout} has no commits on top of {upstream.tag}: nothing to export.")
    files: dict[str, bytes] = {}
    touched: dict[str, None] = {}
    for number, (commit, *parents) in enumerate(commits, 1):
        if len(parents) != 1:
            raise Refused(f"Commit {commit[:12]} is a merge; the series must be linear (git rebase {upstream.tag}).")
        message = _message(checkout, commit)
        subject, _, body = message.partition("\n")
        name = f"{number:04d}-{_slug(subject)}.patch"
        diff = _with_functions(git(checkout, *_DIFF, parents[0], commit), checkout, parents[0])
        try:
            _, patches = parse(diff, f"commit {commit[:12]} ({subject})")
        except BadSeries as error:
            raise Refused(f"Not exportable: {error}") from None
        touched |= dict.fromkeys(p.path for p in patches)
        summary = "".join(f" {p.path}{' (new)' * p.adds_file}: +{p.added} -{p.removed}\n" for p in patches)
        header = (
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: {_FROM}\nSubject: [PATCH] {subject}\n\n"
            f"{body.strip(chr(10))}\n---\n{summary}\n"
        )
        files[name] = header.encode() + diff
    pinned = []
    for path in touched:
        before, after = _blob(checkout, base, path), _blob(checkout, head, path)
        if before == after:
            raise Refused(f"The series touches {path} and then takes the change back; squash those commits.")
        if after is None:
            raise Refused(f"The series removes {path}; that is not supported.")
        pinned.append(PinnedFile(path, None if before is None else sha256(before), sha256(after)))
    files["series"] = "".join(f"{name}\n" for name in sorted(files)).encode()
    files["UPSTREAM"] = upstream.format(tuple(pinned)).encode()
    series = Series.from_files(files, f"export of {checkout}")
    series.forward({f.path: _blob(checkout, base, f.path) for f in series.upstream.files})
    return files


def export(checkout: Path, output: Path, upstream: Upstream) -> str:
    files = export_files(checkout, upstream)
    output.mkdir(parents=True, exist_ok=True)
    changed = 0
    for name in sorted(p.name for p in output.glob("*.patch")):
        if name not in files:
            (output / name).unlink()
            changed += 1
    for name, data in files.items():
        path = output / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
            changed += 1
    series = Series.load(output)
    result = (
        f"Exported {len(series.patches)} patches to {output} ({changed} files changed); "
        f"they add {series.added} lines of {MAX_ADDED_LINES}."
    )
    if git(checkout, "status", "--porcelain", "--untracked-files=no").strip():
        result += " Uncommitted changes in the checkout are not in them."
    return result


def import_series(checkout: Path, series: Series, directory: Path) -> str:
    """The series as commits on HEAD, which must be the tag."""
    base = _tag_commit(checkout, series.upstream.tag)
    if git(checkout, "rev-parse", "HEAD").decode().strip() != base:
        raise Refused(f"HEAD of {checkout} is not {series.upstream.tag}: git checkout -b treewy {series.upstream.tag}.")
    if git(checkout, "status", "--porcelain", "--untracked-files=no").strip():
        raise Refused(f"{checkout} has uncommitted changes.")
    settings = [
        "commit.gpgSign=false",
        "i18n.commitEncoding=UTF-8",
        "core.autocrlf=false",
        "core.hooksPath=/dev/null",
        "am.threeWay=false",
        "am.keepcr=true",
        "apply.ignoreWhitespace=no",
    ]
    options = [word for setting in settings for word in ("-c", setting)]
    paths = [str((directory / p.name).resolve()) for p in series.patches]
    try:
        git(checkout, *options, "am", "--quiet", "--keep-cr", "--whitespace=nowarn", *paths)
    except Refused as error:
        git(checkout, "am", "--abort")
        raise Refused(f"git am refused the series, nothing was changed: {error}") from None
    return f"Imported {len(series.patches)} patches as commits on {series.upstream.tag} in {checkout}."


def _message(checkout: Path, commit: str) -> str:
    # The raw object: `git log` and `git show` obey settings.
    raw = git(checkout, "cat-file", "commit", commit).partition(b"\n\n")[2]
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Refused(f"Commit {commit[:12]}: the message is not UTF-8.") from None
    # As git itself cleans a message: no trailing blanks, no double empty lines.
    message = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.split("\n"))).strip("\n")
    subject, _, rest = message.partition("\n")
    what = f"Commit {commit[:12]} ({subject})"
    if not subject.isascii() or subject.startswith("["):
        raise Refused(f"{what}: the subject must be plain ASCII and not begin with '['.")
    if rest and not rest.startswith("\n"):
        raise Refused(f"{what}: the subject must be one line, followed by an empty one.")
    missing = missing_fields(rest)
    if missing:
        raise Refused(
            f"{what}: the message lacks {', '.join(repr(f + ':') for f in missing)}; "
            f"each patch must say {', '.join(repr(f + ':') for f in REQUIRED_FIELDS)} (see patches/README.md)."
        )
    for line in rest.split("\n"):
        if re.match(r"---|diff -|Index: |>*From ", line):
            raise Refused(f"{what}: the line {line!r} of the message would be taken for the start of a diff or mail.")
    return message


def _slug(subject: str) -> str:
    words = re.findall(r"[a-z0-9]+", subject.lower())
    slug = words[0] if words else "patch"
    for word in words[1:]:
        if len(slug) + 1 + len(word) > 48:
            break
        slug += f"-{word}"
    return slug[:48]


def _blob(checkout: Path, commit: str, path: str) -> Optional[bytes]:
    if not git(checkout, "ls-tree", "--name-only", "--full-tree", commit, "--", path).strip():
        return None
    return git(checkout, "cat-file", "blob", f"{commit}:{path}")


def _with_functions(diff: bytes, checkout: Path, parent: str) -> bytes:
    """Hunk headers that name the function around: found here, since git's choice depends on its attributes."""
    result: list[bytes] = []
    source: list[bytes] = []
    for line in split_lines(diff):
        if line.startswith(b"diff --git a/"):
            path = line[len(b"diff --git a/") :].split(b" b/")[0].decode()
            source = split_lines(_blob(checkout, parent, path) or b"")
            pattern = rb"\s*(?:class|def|async def)\s" if path.endswith(".py") else rb"[A-Za-z_$]"
        match = re.match(rb"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@", line)
        if match:
            above = source[: max(int(match[1]) - 1, 0)]
            name = next((text.strip()[:80] for text in reversed(above) if re.match(pattern, text)), b"")
            line = match[0] + (b" " + name if name else b"") + b"\n"
        result.append(line)
    return b"".join(result)


