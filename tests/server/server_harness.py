"""Asking, comparing, and SGLang's own checks."""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import dataclass


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
