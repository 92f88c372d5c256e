"""SGLang's own serving client as a child process: one run, and its result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Callable, Optional, Sequence

from .rows import Case

PROGRESS = re.compile(r"(\d+)/(\d+) \[")


class ClientFailed(RuntimeError):
    """The client ended with an error, or some of its requests were not answered."""


def command(
    case: Case, url: str, model: Path, output: Path, warmup: int, arguments: Sequence[str], python: str
) -> list[str]:
    """Random prompts of one length, sent as token ids, all at once but for the concurrency; no request waits for a rate."""
    return [
        python, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url, "--model", str(model),
        "--tokenizer", str(model), "--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1",
        "--random-input-len", str(case.input_len), "--random-output-len", str(case.output_len),
        "--num-prompts", str(case.prompts), "--max-concurrency", str(case.concurrency), "--warmup-requests", str(warmup),
        "--flush-cache", "--seed", str(1 + case.repeat), "--output-file", str(output), "--output-details", *arguments,
    ]  # fmt: skip


def figures(result: dict) -> dict:
    """A row's figures from one line of the client's output file."""
    wrong = [text for text in result.get("errors") or [] if text]
    if wrong:
        raise ClientFailed(f"{len(wrong)} of {len(result['errors'])} requests failed, the first with: {wrong[0][:300]}")
    accept = result.get("accept_length")
    return {
        "accept_len": None if accept is None else round(accept, 3),
        "output_tok_s": round(result["output_throughput"], 2),
        "ttft_p50_ms": round(result["median_ttft_ms"], 2),
        "ttft_p99_ms": round(result["p99_ttft_ms"], 2),
        "tpot_p50_ms": round(result["median_tpot_ms"], 3),
        "tpot_p99_ms": round(result["p99_tpot_ms"], 3),
        "duration_s": round(result["duration"], 2),
        "completed": result["completed"],
    }


def run(
    case: Case, url: str, model: Path, folder: Path, *, warmup: int, arguments: Sequence[str], timeout: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None, alive: Callable[[], bool] = lambda: True,
    python: str,
) -> dict:  # fmt: skip
    """Returns the figures; raises ClientFailed. The client's output stays in `folder`."""
    name = f"client-{case.mode}-{case.memory}-{case.mem_fraction or case.slots}-c{case.concurrency}-r{case.repeat}"
    output, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    output.unlink(missing_ok=True)
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    began = time.monotonic()
    with open(log, "w") as sink:
        child = subprocess.Popen(
            command(case, url, model, output, warmup, arguments, python), stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT, env=env,
        )  # fmt: skip
        try:
            while child.poll() is None:
                if time.monotonic() - began > timeout:
                    raise ClientFailed(f"no result after {timeout:.0f} s; {last_lines(log)}")
                if not alive():
                    raise ClientFailed("the server ended")
                time.sleep(0.2)
                seen = progress(log)
                if seen is not None and seen[1] == case.prompts:
                    on_progress(*seen)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if child.returncode != 0 or not output.exists():
        raise ClientFailed(f"the client ended with exit code {child.returncode}; {last_lines(log)}")
    return figures(json.loads(output.read_text().splitlines()[-1]))


def progress(log: Path) -> Optional[tuple[int, int]]:
    with open(log, "rb") as f:
        f.seek(max(0, log.stat().st_size - 400))
        found = PROGRESS.findall(f.read().decode(errors="replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def last_lines(log: Path, count: int = 4) -> str:
    lines = [line for line in re.split(r"[\r\n]+", log.read_text(errors="replace")) if line.strip()]
    return " | ".join(lines[-count:])[-600:]
