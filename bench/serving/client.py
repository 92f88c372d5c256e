"""SGLang's own serving client as a child process: one run, and its result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, Optional, Sequence

from .rows import Case

PROGRESS = re.compile(r"(\d+)/(\d+) \[")


class ClientFailed(RuntimeError):
    """The client ended with an error, or some of its requests were not answered."""


# Imports the client once, which takes as long as many a run, and forks for every run that stdin asks for: a JSON line
# [arguments, log file]. Answers each with the child's process id, and with its exit code once it ended.
HOST = """
import json, os, sys
from sglang.benchmark.serving import cli_main
print("ready", flush=True)
for line in sys.stdin:
    arguments, log = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            for stream in (1, 2):
                os.dup2(sink, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["sglang.bench_serving", *arguments]
            cli_main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Host:
    """SGLang's client in a process that has imported it and is forked for every run."""

    def __init__(self, python: str, log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as sink:
            self.process = subprocess.Popen(
                [python, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, env=environment()
            )
        self.log = log

    def start(self, arguments: Sequence[str], log: Path) -> "Forked":
        """Waits until the client is imported; raises ClientFailed where that fails."""
        log.unlink(missing_ok=True)
        log.touch()
        try:
            self.process.stdin.write(json.dumps([list(arguments), str(log)]).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line()
            while line and not line.isdigit():  # "ready", and what libraries print while they are imported
                line = self._line()
            return Forked(self, int(line))
        except (OSError, ValueError):
            raise ClientFailed(f"the client could not be imported; {last_lines(self.log)}") from None

    def _line(self) -> bytes:
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what it was not there to read
                stream.close()


class Forked:
    """One run of the client; what is needed of a Popen."""

    def __init__(self, host: Host, pid: int):
        self.host, self.pid, self.returncode = host, pid, None
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        line = self.host._line()
        self.returncode = int(line) if line else -1

    def poll(self) -> Optional[int]:
        return self.returncode

    def kill(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self) -> None:
        self._waiter.join()


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }


def command(case: Case, url: str, model: Path, output: Path, warmup: int, arguments: Sequence[str]) -> list[str]:
    """Random prompts of one length, sent as token ids, all at once but for the concurrency; no request waits for a rate."""
    return [
        "--backend", "sglang", "--base-url", url, "--model", str(model),
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
    host: Host,
) -> dict:  # fmt: skip
    """Returns the figures; raises ClientFailed. The client's output stays in `folder`."""
    name = f"client-{case.mode}-{case.memory}-{case.mem_fraction or case.slots}-c{case.concurrency}-r{case.repeat}"
    output, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    output.unlink(missing_ok=True)
    began = time.monotonic()
    child = host.start(command(case, url, model, output, warmup, arguments), log)
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
