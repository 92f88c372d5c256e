"""What --enable-treewy refuses, given as command lines to SGLang itself: each ends before a weight is loaded, with its sentence.

On CPU SGLang is imported once and every command line is parsed in a process forked off; on CUDA each has an interpreter.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Mapping

from treewy_sglang.demo.server import CHAIN3

FLAG = ("--enable-treewy",)
CHAIN = (*FLAG, *CHAIN3.arguments)


def _chain(**changes: int) -> tuple[str, ...]:
    words = list(CHAIN)
    for name, value in changes.items():
        words[words.index(f"--speculative-{name.replace('_', '-')}") + 1] = str(value)
    return tuple(words)


# name: (command line, words of the sentence). The sentence need not be ours: what SGLang itself refuses first is refused too.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nothing wrong": (CHAIN, ()),
    "no drafts": (FLAG, ("--enable-treewy", "--speculative-algorithm")),
    "replayssm": ((*CHAIN, "--enable-linear-replayssm-spec"), ("--enable-linear-replayssm-spec",)),
    "too many nodes": (_chain(num_steps=129, num_draft_tokens=130), ("130", "128")),
    "too few candidates": (_chain(eagle_topk=2, num_draft_tokens=100), ("100 nodes", "--speculative-num-draft-tokens")),
    "pipeline": ((*CHAIN, "--pp-size", "2"), ("pp",)),
    "page-major": ((*CHAIN, "--enable-page-major-kv-layout"), ("page",)),
    "unified memory": ((*CHAIN, "--enable-unified-memory"), ("unified",)),
    "prefill server": ((*CHAIN, "--disaggregation-mode", "prefill"), ("--disaggregation-mode",)),
    "another state dtype": ((*CHAIN, "--mamba-ssm-dtype", "float64"), ("float64",)),
}
ON_CUDA = {
    "float32": ((*CHAIN, "--dtype", "float32"), ("float32", "--dtype bfloat16")),
    "two-batch overlap": ((*CHAIN, "--enable-two-batch-overlap"), ("overlap",)),
    "pdmux": ((*CHAIN, "--enable-pdmux"), ("pdmux",)),
    "adaptive from few steps": ((*CHAIN, "--speculative-adaptive"), ("--speculative-adaptive", "--speculative-num-steps 7")),
}
ON_CPU = {
    "tensor parallelism": ((*CHAIN, "--tp-size", "2"), ("--tp-size 2",)),
    "adaptive": ((*CHAIN, "--speculative-adaptive"), ("--speculative-adaptive",)),
    "torch.compile": ((*CHAIN, "--enable-torch-compile"), ("--enable-torch-compile",)),
}
# A model without Gated DeltaNet layers.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
NGRAM = (*FLAG, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "16")


def cases(device: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    return {**CASES, **(ON_CUDA if device == "cuda" else ON_CPU), "no linear layers": (NGRAM, ("--enable-treewy", "Gated DeltaNet"))}


def parse(words: list[str]) -> str | None:
    """The error that SGLang's arguments end with, None if they do not."""
    from sglang.srt.server_args import prepare_server_args

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            prepare_server_args(words)
    except SystemExit:  # argparse has printed why
        return "argparse: " + (told.getvalue().strip().splitlines() or ["no word"])[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def in_a_fork(words: list[str], patience: float = 60.0) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            try:
                answer = parse(words)
            except BaseException as error:  # nothing may leave the fork
                answer = f"{type(error).__name__}: {error}"
            file.write_text(json.dumps(answer))
            os._exit(0)
        began = time.monotonic()
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() - began > patience:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"no answer after {patience:.0f} s"
            time.sleep(0.02)
        return json.loads(file.read_text()) if file.exists() else "the process ended without a word"


def run(device: str, model: Path, work: Path, environment: Mapping[str, str], at_once: int = 5) -> dict[str, Any]:
    """Answers of all cases by name. On CPU from one process that forks; on CUDA, which a fork cannot use once SGLang has
    looked at the device, from an interpreter a case, `at_once` side by side."""
    dense = work / "config-dense"
    dense.mkdir(parents=True, exist_ok=True)
    (dense / "config.json").write_text(json.dumps(DENSE))
    # So that SGLang takes the process for one of its servers, which is how --device cpu is found out.
    code = "import sys; from matrix import refusals; refusals.main(sys.argv[1:])"
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), env.get("PYTHONPATH", "")])
    if device == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"

    def ask(*names: str) -> dict[str, Any]:
        command = [sys.executable, "-c", code, device, str(model), str(dense), *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise AssertionError(f"refusals ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    if device == "cpu":
        return ask()
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return {name: text for found in pool.map(ask, cases(device)) for name, text in found.items()}


def main(argv: list[str]) -> None:
    """DEVICE MODEL DENSE [NAME]: one case here, or all of them, each in a fork."""
    # Once, before the forks; on CPU resolving arguments imports the rest, none of which touches a device.
    import sglang.srt.configs.model_config  # noqa: F401
    import sglang.srt.layers.quantization  # noqa: F401
    import sglang.srt.server_args  # noqa: F401

    device, model, dense, *names = argv
    out = {}
    for name, (words, _) in cases(device).items():
        if names and name not in names:
            continue
        path = dense if name == "no linear layers" else model
        dtype = [] if "--dtype" in words else ["--dtype", "float32" if device == "cpu" else "bfloat16"]
        # Not the backend that SGLang takes by itself on Hopper: it refuses some of these before TreeWY is asked.
        backend = ["--attention-backend", "triton"] if device == "cuda" else []
        print(name, file=sys.stderr, flush=True)
        line = ["--model-path", path, "--device", device, "--skip-tokenizer-init", *dtype, *backend, *words]
        out[name] = parse(line) if names else in_a_fork(line)
    print(json.dumps(out), flush=True)


def wrong(found: Mapping[str, Any], device: str) -> list[str]:
    """What was not refused, or without the words, or refused though nothing is wrong."""
    out = []
    for name, (_, words) in cases(device).items():
        text = found.get(name, "not run")
        if not words:
            if text is not None:
                out.append(f"{name}: {text}")
        elif text is None:
            out.append(f"{name}: served")
        elif missing := [w for w in words if w.lower() not in text.lower()]:
            out.append(f"{name}: without {missing}: {text}")
    return out
