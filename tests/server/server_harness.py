"""Asking, comparing, and SGLang's own checks."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    tokens: list[int]
    meta: dict


def answer(reply: dict) -> Answer:
    return Answer(reply["output_ids"], reply["meta_info"])


def ask_all(server, prompts, load, beside=None, **more) -> list[Answer]:
    """All prompts, `load.at_a_time` at a time; `beside(i)` is called just before the i-th is sent."""

    def ask(i: int) -> Answer:
        if beside is not None:
            beside(i)
        return answer(server.generate(prompts[i], load.new_tokens, **more))

    with concurrent.futures.ThreadPoolExecutor(load.at_a_time) as pool:
        return list(pool.map(ask, range(len(prompts))))


class Aborts:
    """Requests that are given up half-way beside those that are compared: by hanging up, and by /abort_request."""

    def __init__(self, server, prompts):
        self.server, self.prompts = server, prompts
        self.threads, self.failures = [], []
        self.hung_up = self.aborted = 0

    def __call__(self, i: int) -> None:
        if i % 2 == 0:
            thread = threading.Thread(target=self.guard, args=(self.hang_up if i % 4 else self.abort, i))
            thread.start()
            self.threads.append(thread)

    def guard(self, act, i: int) -> None:
        try:
            act(i)
        except Exception as error:  # reported by finish()
            self.failures.append(f"{act.__name__} beside prompt {i}: {error!r}")

    def prompt(self, i: int) -> list[int]:
        # The prefix of a prompt that is being compared, so that an abort touches states that others share.
        return self.prompts[i][: max(8, len(self.prompts[i]) * 3 // 4)]

    def hang_up(self, i: int) -> None:
        stream = self.server.stream(self.prompt(i), 800)
        for _ in range(3):
            next(stream)
        stream.close()
        self.hung_up += 1

    def abort(self, i: int) -> None:
        name = uuid.uuid4().hex
        stream = self.server.stream(self.prompt(i), 800, rid=name)
        next(stream)
        self.server.request("/abort_request", {"rid": name})
        *_, last = stream
        reason = last["meta_info"]["finish_reason"]
        assert reason["type"] == "abort", reason
        assert last["meta_info"]["completion_tokens"] < 800
        self.aborted += 1

    def finish(self) -> None:
        for thread in self.threads:
            thread.join(300)
        assert not self.failures, self.failures
        assert self.hung_up and self.aborted, (self.hung_up, self.aborted)


def margins(reference_answer: Answer) -> list[float]:
    """Logarithm of how much likelier the chosen token was than the next best, token by token."""
    return [top[0][0] - top[1][0] for top in reference_answer.meta["output_top_logprobs"]]


def difference(got: list[int], expected: Answer) -> str | None:
    """None when equal token for token, else where the first difference is and how close the decision was there."""
    if got == expected.tokens:
        return None
    for i, (a, b) in enumerate(zip(got, expected.tokens)):
        if a != b:
            margin = margins(expected)[i] if "output_top_logprobs" in expected.meta else float("nan")
            return f"token {i} is {a} and not {b} (the reference chose it by a margin of {margin:.2g})"
    return f"{len(got)} tokens instead of {len(expected.tokens)}"


def wait_idle(server, timeout: float = 60.0) -> dict:
    """Wait until the scheduler has gone through its idle loop after now: it checks its pools for leaks there, and then
    publishes its load."""
    asked = time.time()
    while True:
        assert server.alive(), server.log_end()
        server.state()  # wakes a scheduler that sleeps while idle
        found = server.request("/v1/loads")["loads"][0]
        if found["num_running_reqs"] == found["num_waiting_reqs"] == 0 and found["timestamp"] > asked:
            return found
        assert time.time() - asked < timeout, f"not idle after {timeout} s: {found}"
        time.sleep(0.3)


# What SGLang 0.5.17 writes when a pool, a request slot or the prefix cache does not add up, and what a crash leaves.
COMPLAINTS = ("leak detected", "Leak Detected", "double free", "use-after-free", "Traceback", "AssertionError", "TreeWY operators skipped")


def check_log(server) -> None:
    text = server.log_text()
    for complaint in COMPLAINTS:
        assert complaint not in text, f"{server.log} says {complaint!r}:\n" + "\n".join(
            line for line in text.splitlines() if complaint in line
        )


def treewy(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "treewy_sglang", *arguments], capture_output=True, text=True)


def installed() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "sglang is not installed in this Python: use `make test`"
    return Path(next(iter(spec.submodule_search_locations)))


def path_environment(*entries: Path) -> dict[str, str]:
    inherited = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    return {"PYTHONPATH": os.pathsep.join([*map(str, entries), *inherited])}


def copy_of_sglang(where: Path) -> Path:
    """The installed SGLang again in `where`, with its metadata so that the version is known there."""
    source = installed()
    shutil.copytree(source, where / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    for info in source.parent.glob("sglang-*.dist-info"):
        shutil.copytree(info, where / info.name)
    return where / "sglang"
