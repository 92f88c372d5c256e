from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewy_sglang.patching.errors import BadSeries
from treewy_sglang.patching.unidiff import blob_id, parse, split_lines

PATH = "python/sglang/a.py"


def make_diff(old: bytes, new: bytes, context: int = 3) -> bytes:
    """The diff of two files, by difflib (on latin-1 text, so that every byte is a character)."""
    a, b = ([line.decode("latin-1") for line in split_lines(data)] for data in (old, new))
    head = f"diff --git a/{PATH} b/{PATH}\nindex {blob_id(old)}..{blob_id(new)} 100644\n"
    head += f"--- a/{PATH}\n+++ b/{PATH}\n"
    body = []
    for line in list(difflib.unified_diff(a, b, n=context))[2:]:
        body.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return (head + "".join(body)).encode("latin-1")


line = st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"d\re\n", b"- x\n", b"@@ \n", b"\xff\n"])
lines = st.lists(line, max_size=30)
text = st.builds(lambda body, tail: b"".join(body) + tail, lines, st.sampled_from([b"", b"tail", b"t\r"]))


@settings(max_examples=300, deadline=None)
@given(text, text, st.integers(0, 4))
def test_random_edits_apply_and_reverse(old, new, context):
    if old == new or not old or not new:
        return
    header, (patch,) = parse(b"Header\n" + make_diff(old, new, context), "x")
    assert header == b"Header\n"
    assert patch.apply(old, "x") == new
    assert patch.reversed().apply(new, "x") == old


def test_only_line_feed_ends_a_line():
    assert split_lines(b"a\r\nb\rc\x0bd\n\x0ce") == [b"a\r\n", b"b\rc\x0bd\n", b"\x0ce"]
    assert split_lines(b"") == []


def test_no_fuzz_and_no_offset():
    old = b"".join(b"line %d\n" % i for i in range(20))
    _, (patch,) = parse(make_diff(old, old.replace(b"line 9\n", b"nine\n")), "0001-x.patch")
    for other in (b"more\n" + old, old[7:], old.replace(b"line 7", b"line seven"), old + b"end\n", b""):
        with pytest.raises(BadSeries, match=r"0001-x\.patch: python/sglang/a\.py"):
            patch.apply(other, "0001-x.patch")
    with pytest.raises(BadSeries, match="no file"):
        patch.apply(None, "0001-x.patch")


def test_context_is_compared_even_where_the_ids_agree():
    old, new = b"a\nb\nc\n", b"a\nB\nc\n"
    lying = make_diff(old, new).replace(b"\n c\n", b"\n C\n")
    _, (patch,) = parse(lying, "x")
    with pytest.raises(BadSeries, match=r"line 3 is b'c\\n', the patch expects b'C\\n'"):
        patch.apply(old, "x")


GOOD = make_diff(b"a\nb\nc\n", b"a\nB\nc\n")


@pytest.mark.parametrize(
    "data, message",
    [
        (b"nothing\n", "holds no diff"),
        (GOOD.replace(b"a/python/sglang/a.py b/", b"a/python/sglang/other.py b/", 1), "one plain path"),
        (GOOD.replace(b"python/sglang/a.py", b"python/sglang/../a.py"), "not a path below"),
        (GOOD.replace(b"python/sglang/a.py", b"test/a.py"), "not a path below"),
        (GOOD.replace(b"python/sglang/a.py", b"python/sglang//a.py"), "not a path below"),
        (GOOD.replace(b"+++ b/python/sglang/a.py", b"+++ b/python/sglang/b.py"), "do not name"),
        (GOOD.replace(b"index ", b"old mode 100644\nnew mode 100755\nindex "), "mode changes"),
        (GOOD.replace(b"index ", b"deleted file mode 100644\nindex "), "deletions"),
        (GOOD.replace(blob_id(b"a\nb\nc\n").encode(), b"abcdef0"), "full ids"),
        (GOOD.replace(b"@@ -1,3 +1,3 @@", b"@@ -1,4 +1,4 @@"), "ends before its counted lines"),
        (GOOD.replace(b"@@ -1,3 +1,3 @@", b"@@ -1,3 +1,2 @@"), "more lines than its header counts"),
        (GOOD.replace(b"@@ -1,3", b"@@ -x,3"), "not a hunk header"),
        (GOOD + b"-- \n2.39\n", "expected 'diff --git"),
        (GOOD + GOOD, "names a file twice"),
        (GOOD.split(b"---")[0] + b"Binary files differ\n", "binary"),
        (GOOD.replace(b"index ", b"new file mode 100644\nindex "), "do not name|disagree"),
    ],
)
def test_what_it_does_not_understand_it_refuses(data, message):
    with pytest.raises(BadSeries, match=message):
        parse(data, "x")
