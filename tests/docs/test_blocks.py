"""Every command block of README.md and docs/ runs, or says why it cannot."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from document_blocks import LANGUAGES, NOT_RUN, PLACES, ROOT, all_blocks, documents, environment, make_scratch, run, sessions

BLOCKS = all_blocks()
COMMANDS = [b for b in BLOCKS if b.language != "text"]
# The README has no room for comments. Its two blocks are run by what this test is part of, and by tests/server.
README = ["make demo", "make test"]


def test_every_block_has_a_language_and_a_way_to_run():
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.name}: ```{block.language}; one of {LANGUAGES}"
        if block.document.name == "README.md":
            assert block.text.strip() in README, block.name
        elif block.language == "text":
            assert block.comment is None, f"{block.name}: what a program prints is not run"
        else:
            assert block.place in PLACES or block.not_run, f"{block.name}: {block.comment!r} is no way to run it"


def test_fences_are_balanced():
    for document in documents():
        assert len(re.findall(r"^```", document.read_text(), re.M)) % 2 == 0, document


def test_no_command_hides_in_an_indented_block():
    for document in documents():
        fenced = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.S | re.M)
        hidden = re.findall(r"^    (?:\$ )?(?:python3?|pip|make|treewy|curl|docker|podman|git|sh|bash) .*$", fenced, re.M)
        assert not hidden, f"{document.name}: {hidden}: put it into a fenced block"


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = [b for b in COMMANDS if b.not_run]
    for block in left_out:
        kind, reason = block.not_run
        assert kind in NOT_RUN, f"{block.name}: {kind}; one of {NOT_RUN}"
        assert len(reason) > 15, f"{block.name}: {reason!r} is no reason"
        if kind == "elsewhere":
            file, _, name = reason.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{block.name}: there is no {reason}"
        if kind == "gpu":
            assert re.search(r"nvcc|TREEWY_CUDA=1|--gpus|bench/(kernels|serving)/run_all", block.text), f"{block.name} needs no GPU"
        if kind == "network":
            assert re.search(r"pip install|apt-get install|git clone|docker|podman", block.text), f"{block.name} needs no network"
    kinds = Counter(b.not_run[0] for b in left_out)
    assert len(left_out) < len(COMMANDS) / 2, f"{len(left_out)} of {len(COMMANDS)} blocks are not run: {kinds}"


def touched_sglang(where: Path) -> Path:
    """site-packages with the files of SGLang that the patches touch, as released; no more is needed to patch it."""
    from treewy_sglang.patching import Series, find_target, revert
    from treewy_sglang.patching.state import STAMP, UNDO

    installed = Path(importlib.util.find_spec("sglang").origin).parent
    series = Series.load()
    names = ["__init__.py", "version.py", "_version.py", STAMP, UNDO, *(f.relative for f in series.upstream.files)]
    for name in names:
        if (installed / name).is_file():
            (where / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(installed / name, where / "sglang" / name)
    for info in installed.parent.glob("sglang-*.dist-info"):
        (where / info.name).mkdir()
        shutil.copy2(info / "METADATA", where / info.name / "METADATA")
    revert(find_target(where / "sglang"), series)
    return where


@pytest.mark.parametrize("document", sorted(sessions("scratch")))
def test_blocks_that_need_nothing(document, tmp_path):
    where = make_scratch(tmp_path / "tree")
    assert run(sessions("scratch")[document], where, environment(where)).strip()


@pytest.mark.parametrize("document", sorted(sessions("sglang")))
def test_blocks_that_need_an_sglang(document, tmp_path):
    where = make_scratch(tmp_path / "tree")
    site = touched_sglang(tmp_path / "site-packages")
    printed = run(sessions("sglang")[document], where, environment(where, site))
    assert "Applied" in printed and str(site) in printed, "the blocks worked on another SGLang"


def test_launch_commands_know_their_flags():
    """Every flag of a launch command in the documents is one of the patched server's."""
    installed = Path(importlib.util.find_spec("sglang").origin).parent
    fields = set(re.findall(r"^    (\w+): A\[", (installed / "srt" / "server_args.py").read_text(), re.M))
    aliases = {"tp_size", "host", "port"}
    commands = [c for b in BLOCKS for c in re.findall(r"sglang\.launch_server(?:[^\n\\]|\\\n)*", b.text)]
    assert len(commands) >= 3
    for command in commands:
        for flag in re.findall(r"--([a-z][a-z-]+)", command):
            name = flag.replace("-", "_")
            assert name in fields | aliases or name == "enable_treewy", f"--{flag} in: {command}"


def test_the_comparison_of_blocks_fails_where_it_should(tmp_path):
    """The runner reports a failing block, and stops there."""
    document = tmp_path / "page.md"
    document.write_text("<!-- run: scratch -->\n```sh\necho one\n```\n\n```python\nraise SystemExit(3)\n```\n\n"
                        "<!-- not run (gpu): it needs one, really -->\n```sh\nfalse\n```\n")  # fmt: skip
    import document_blocks

    found = [document_blocks.Block(ROOT / "page.md", b.line, b.language, b.text, b.comment) for b in document_blocks.blocks_of(document)]
    assert [(b.language, b.place, b.not_run and b.not_run[0]) for b in found] == [
        ("sh", "scratch", None), ("python", "scratch", None), ("sh", None, "gpu")]  # fmt: skip
    where = make_scratch(tmp_path / "tree")
    assert run(found[:1], where, environment(where)) == "one\n"
    with pytest.raises(AssertionError, match="(?s)exit code 3.*page.md:7"):
        run(found[:2], where, environment(where))
