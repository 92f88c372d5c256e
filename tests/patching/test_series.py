from __future__ import annotations

import re
from pathlib import Path

import pytest

from treewy_sglang.patching import BadSeries, Series, locate
from treewy_sglang.patching import series as series_module
from treewy_sglang.patching.series import MAX_ADDED_LINES, REQUIRED_FIELDS, Upstream, header_fields, missing_fields

from .conftest import BASE, FIELDS, UPSTREAM


def files_of(patches: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in patches.iterdir()}


def test_forward_and_backward(series, patched_files):
    base = {f.path: BASE.get(f.relative) for f in series.upstream.files}
    patched = series.forward(base)
    assert {p[len("python/sglang/") :]: d for p, d in patched.items()} == patched_files
    assert series.backward(patched) == base
    assert series.backward({"python/sglang/srt/pool.py": patched_files["srt/pool.py"]}) == {
        "python/sglang/srt/pool.py": BASE["srt/pool.py"]
    }


def test_the_digest_covers_every_byte(patches):
    files = files_of(patches)
    digests = {Series.from_files(files, "x").digest}
    for name in files:
        if name.endswith(".patch"):
            digests.add(Series.from_files({**files, name: files[name].replace(b"never.", b"soon.")}, "x").digest)
    digests.add(Series.from_files({**files, "UPSTREAM": b"#\n" + files["UPSTREAM"]}, "x").digest)
    digests.add(Series.from_files({**files, "series": b"#\n" + files["series"]}, "x").digest)
    assert len(digests) == 6


def damage(files, name, old, new):
    assert old in files[name], (name, old)
    return {**files, name: files[name].replace(old, new)}


def test_damaged_series_are_refused(patches):
    files = files_of(patches)
    first, second, third = sorted(n for n in files if n.endswith(".patch"))
    some_hash = re.search(rb"^[0-9a-f]{64}", files["UPSTREAM"], re.M)[0]
    cases = [
        (damage(files, "series", first.encode() + b"\n", b""), "disagree"),
        (damage(files, "series", first.encode(), third.encode()), "disagree"),
        ({n: d for n, d in files.items() if n != second}, "disagree"),
        ({**files, "series": b"\n".join(f.encode() for f in (second, first, third))}, "entry 1 is"),
        (damage(files, "UPSTREAM", b"version: 1.2.3\n", b""), "no line 'version"),
        (damage(files, "UPSTREAM", b"tag: v1.2.3\n", b"tag\n"), "key: value"),
        (damage(files, "UPSTREAM", b"python/sglang/srt/pool.py", b"python/sglang/srt/pond.py"), "same files"),
        (damage(files, "UPSTREAM", b"python/sglang/srt/pool.py", b"python/sglang/srt/tool.sh"), "twice"),
        (damage(files, "UPSTREAM", b" python/sglang/srt/pool.py", b" srt/pool.py"), "expected 'BEFORE AFTER"),
        (damage(files, "UPSTREAM", some_hash, b"-"), "whether"),
        (damage(files, first, b"[PATCH] ", b""), "Subject"),
        ({"UPSTREAM": files["UPSTREAM"], "series": b""}, "names no patch"),
    ]
    for broken, message in cases:
        with pytest.raises(BadSeries, match=message):
            Series.from_files(broken, "x")


def test_a_wrong_hash_or_patch_is_found_before_anything_is_written(patches):
    files = files_of(patches)
    base = {f.path: BASE.get(f.relative) for f in Series.from_files(files, "x").upstream.files}
    rows = re.findall(r"^\S+ +([0-9a-f]{64}) (\S+)$", files["UPSTREAM"].decode(), re.M)
    assert len(rows) == len(base)
    for after, path in rows:
        broken = Series.from_files(damage(files, "UPSTREAM", after.encode(), b"0" * 64), "x")
        with pytest.raises(BadSeries, match=f"{path} sha256 .* damaged"):
            broken.forward(base)
    for name in files:
        if name.endswith(".patch"):
            broken = Series.from_files({**files, name: re.sub(rb"\n\+(?!\+)", b"\n+!", files[name])}, "x")
            with pytest.raises(BadSeries, match=name):
                broken.forward(base)


def test_upstream_keeps_its_head(series):
    assert series.upstream.header == UPSTREAM
    assert Upstream.parse(series.upstream.format(series.upstream.files)) == series.upstream


def test_fields_continue_on_indented_lines():
    assert header_fields(FIELDS) == {"Seam": "one line more.", "Why no hook": "none there.", "Can go when": "never."}
    assert missing_fields("Seam:\nWhy no hook: x\n\n y\nCan go when:\n  later\n") == ["Seam"]


def test_missing_directory_or_file(tmp_path, patches, copy_of):
    with pytest.raises(BadSeries, match="UPSTREAM is missing"):
        Series.load(tmp_path)
    copy = copy_of(patches)
    (copy / "series").unlink()
    with pytest.raises(BadSeries, match="series cannot be read: No such file"):
        Series.load(copy)


def test_where_the_series_lives(tmp_path, patches, copy_of, monkeypatch):
    source = tmp_path / "repo" / "python" / "treewy_sglang" / "patching" / "series.py"
    wheel = tmp_path / "site-packages" / "treewy_sglang" / "patching" / "series.py"
    for file in (source, wheel):
        monkeypatch.setattr(series_module, "__file__", str(file))
        with pytest.raises(BadSeries, match="Reinstall"):
            locate()
    copy_of(patches, "repo/patches")
    copy_of(patches, "repo/python/treewy_sglang/patches")
    copy_of(patches, "site-packages/treewy_sglang/patches")
    copy_of(patches, "patches")  # two levels above the wheel's package: not the package's
    monkeypatch.setattr(series_module, "__file__", str(source))
    assert locate() == tmp_path / "repo" / "patches"
    monkeypatch.setattr(series_module, "__file__", str(wheel))
    assert locate() == tmp_path / "site-packages" / "treewy_sglang" / "patches"


# The real series


@pytest.fixture(scope="module")
def real() -> Series:
    return Series.load()


def test_every_patch_says_why_it_is_there(real):
    for patch in real.patches:
        assert not [f for f in REQUIRED_FIELDS if not patch.fields.get(f)], patch.name


def test_the_seams_are_small(real):
    assert real.added <= MAX_ADDED_LINES == 600


def test_upstream_lists_what_the_patches_touch(real):
    touched = {f.path for patch in real.patches for f in patch.files}
    assert {f.path for f in real.upstream.files} == touched


def test_nothing_of_the_machine_it_was_exported_on(real):
    for path in Path(real.source).glob("*.patch"):
        header, _, _ = path.read_text().partition("\ndiff --git ")
        assert not re.search(r"^(Date|Message-Id|Signed-off-by):|/home/|/root/|/tmp/", header, re.M), path.name
        assert header.count("From: ") == 1 and "treewy.invalid" in header


def test_the_pin_is_written_once(real):
    """No other file of the package or of the build repeats tag or version as code."""
    top = Path(real.source).parent
    if not (top / "python" / "treewy_sglang").is_dir():
        top = None
    package = Path(series_module.__file__).parents[1]
    build = [top / name for name in ("setup.py", "pyproject.toml", "Makefile")] if top else []
    version = re.escape(real.upstream.version)
    pin = re.compile(rf"""sglang\s*==\s*{version}|["']v?{version}["']""")
    files = [*package.rglob("*.py"), *(p for p in build if p.is_file())]
    assert [str(p) for p in files if pin.search(p.read_text())] == []
