"""The flag on a real SGLang: a copy of the installed package with the series applied, and the same without it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from treewy_sglang import patching
from treewy_sglang.sglang import config

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="sglang is not installed")

PACKAGE = Path(__file__).resolve().parents[2] / "python"

# Prints one line of JSON per case: what the resolved arguments hold, or the error that refused them.
SCRIPT = """
import json, os, sys
from sglang.srt.server_args import prepare_server_args

for arguments in json.loads(sys.argv[1]):
    os.environ.pop("SGLANG_MAMBA_CONV_DTYPE", None)
    try:
        args = prepare_server_args(arguments)
        answer = dict(
            flag=args.enable_treewy,
            algorithm=args.speculative_algorithm,
            conv=os.environ.get("SGLANG_MAMBA_CONV_DTYPE"),
        )
    except SystemExit:
        answer = dict(refused="arguments")
    except Exception as error:
        answer = dict(refused=f"{type(error).__name__}: {error}")
    print("ANSWER", json.dumps(answer), flush=True)
"""

CHAIN = "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = "--speculative-algorithm NEXTN --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64"


def link_or_copy(source, target):
    try:
        os.link(source, target)  # the patch tool replaces files and never writes into one
    except OSError:
        shutil.copy2(source, target)


def copy_of_sglang(where: Path) -> Path:
    installed = Path(SPEC.submodule_search_locations[0])
    shutil.copytree(installed, where / "sglang", copy_function=link_or_copy)
    for info in installed.parent.glob("sglang-*.dist-info"):
        shutil.copytree(info, where / info.name)
    return where


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    where = copy_of_sglang(tmp_path_factory.mktemp("patched"))
    patching.apply(patching.find_target(where / "sglang"), patching.Series.load())
    return where


@pytest.fixture
def unpatched(tmp_path):
    """Whatever the installed package is: the environment may have patched it."""
    where = copy_of_sglang(tmp_path)
    target, series = patching.find_target(where / "sglang"), patching.Series.load()
    if patching.inspect(target, series).applied:
        patching.revert(target, series)
    return where


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen3-Next configuration; no weights are read while arguments are resolved."""
    from transformers import Qwen3NextConfig

    where = tmp_path_factory.mktemp("model")
    config = Qwen3NextConfig(
        num_hidden_layers=4, hidden_size=128, vocab_size=256, linear_num_key_heads=2, linear_num_value_heads=4
    ).to_dict()
    config.update(architectures=["Qwen3NextForCausalLM"], full_attention_interval=4, torch_dtype="float32")
    (where / "config.json").write_text(json.dumps(config))
    return str(where)


def ask(sglang_at: Path, model: str, *cases: str):
    models = (sglang_at / "sglang/srt/models").glob("*.py")
    lines = [["--model-path", model, "--device", "cpu", "--dtype", "float32", *case.split()] for case in cases]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (sglang_at, PACKAGE / "treewy_sglang/sglang/cpu/overlay", PACKAGE))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(m.stem for m in models if m.stem != "qwen3_next"),  # a faster import
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(lines)], env=environment, capture_output=True, text=True, timeout=300
    )
    answers = [json.loads(line.split(" ", 1)[1]) for line in run.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(answers) == len(cases), run.stdout[-2000:] + run.stderr[-4000:]
    return answers


def test_patched_server_takes_the_flag_or_says_why_not(patched, model):
    chain, tree, ngram, without, plain, long, tp = ask(
        patched,
        model,
        f"--enable-treewy {CHAIN}",
        f"--enable-treewy {TREE}",
        "--enable-treewy --speculative-algorithm NGRAM",
        CHAIN,
        "--enable-treewy",
        "--enable-treewy --speculative-algorithm NGRAM --speculative-num-draft-tokens 129",
        f"--enable-treewy --tp-size 4 {CHAIN}",
    )
    assert chain == tree == dict(flag=True, algorithm="EAGLE", conv="float32")
    assert ngram == dict(flag=True, algorithm="NGRAM", conv="float32")
    assert without["flag"] is False
    assert "--speculative-algorithm NEXTN" in plain["refused"]
    assert "129" in long["refused"]
    assert "not --tp-size 4" in tp["refused"]


def test_unpatched_server_does_not_know_the_flag(unpatched, model):
    assert ask(unpatched, model, f"--enable-treewy {CHAIN}") == [dict(refused="arguments")]


def stamp_of(where, monkeypatch):
    """The check that validate() makes first, on an SGLang that lies elsewhere."""
    monkeypatch.setattr(sys.modules["sglang"], "__file__", str(where / "sglang/__init__.py"))
    config.require_stamp()


def test_a_missing_patch_or_a_changed_file_is_refused_at_start(patched, unpatched, tmp_path, monkeypatch):
    import sglang  # noqa: F401

    stamp_of(patched, monkeypatch)
    with pytest.raises(patching.NotPatched, match="patch apply"):
        stamp_of(unpatched, monkeypatch)
    where = tmp_path / "changed"
    shutil.copytree(patched, where, copy_function=link_or_copy)
    seam = where / "sglang/srt/layers/attention/attention_registry.py"
    text = seam.read_text()
    seam.unlink()
    seam.write_text(text.replace("runner.server_args.enable_treewy", "False"))
    with pytest.raises(patching.NotPatched, match="attention_registry.py"):
        stamp_of(where, monkeypatch)
