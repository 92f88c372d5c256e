"""What a running server is asked. Each takes (server, size) and returns plain data; what the data must show is decided later,
so that it can be kept and compared with that of another server."""

from __future__ import annotations

import concurrent.futures
import json
import random
import threading
import time
import uuid
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable

from server_harness import Aborts, answer, ask_all, margins, wait_idle

from treewy_sglang.demo.prompts import mixed


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    prompts: int = 64
    spare: int = 16  # more prompts, for those whose reference holds a near tie
    new_tokens: int = 512
    at_a_time: int = 16
    sampled: int = 20000  # tokens at temperature 1
    long: int = 10000  # tokens of the long answer
    mixed: int = 2000  # requests of the mixed load


FULL = Size()
QUICK = Size(prompts=16, spare=8, new_tokens=64, at_a_time=8, sampled=4000, long=2000, mixed=200)


def greedy(server, size: Size, aborts: bool = True) -> dict[str, Any]:
    """Prompts of mixed length, `at_a_time` at a time, with aborts in between; the last ones again, from the prefix cache."""
    prompts = mixed(size.prompts + size.spare)
    load = SimpleNamespace(new_tokens=size.new_tokens, at_a_time=size.at_a_time)
    beside = Aborts(server, prompts) if aborts else None
    began = time.monotonic()
    answers = ask_all(server, prompts, load, beside=beside, return_logprob=True, top_logprobs_num=2)
    seconds = time.monotonic() - began
    if beside is not None:
        beside.finish()
    again = ask_all(server, prompts[-8:], load)
    verified = sum(a.meta.get("spec_verify_ct", 0) for a in answers)
    histogram: dict[str, int] = {}
    for a in answers:
        for length, count in enumerate(a.meta.get("spec_correct_drafts_histogram") or []):
            histogram[str(length)] = histogram.get(str(length), 0) + count
    return {
        "answers": [{"tokens": a.tokens, "gaps": margins(a)} for a in answers],
        "again": [a.tokens for a in again],
        "cached": sum(a.meta["cached_tokens"] for a in again),
        "accepted": sum(map(lambda a: len(a.tokens), answers)) / verified if verified else None,
        "histogram": histogram,
        "retracted": sum(a.meta.get("num_retractions", 0) for a in answers),
        "seconds": seconds,
    }


SAMPLED_LENGTH = 8


def sampled(server, size: Size) -> dict[str, Any]:
    """Answers of eight tokens to one prompt at temperature 1, nothing cut off; for a checkpoint of a tiny vocabulary."""
    prompt = [t % 8 for t in mixed(1)[0]]
    parameters = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": SAMPLED_LENGTH, "ignore_eos": True, "n": 50}
    rounds = -(-size.sampled // (SAMPLED_LENGTH * parameters["n"]))
    samples, verified = [], 0
    for _ in range(rounds):
        replies = server.request("/generate", {"input_ids": prompt, "sampling_params": parameters})
        samples += [answer(r).tokens for r in replies]
        verified += sum(answer(r).meta.get("spec_verify_ct", 0) for r in replies)
    tokens = sum(map(len, samples))
    return {"samples": samples, "accepted": tokens / verified if verified else None}


def long(server, size: Size) -> dict[str, Any]:
    """One greedy answer of many tokens, alone, with the number of tokens after every step."""
    events, last = [], None
    for last in server.stream(mixed(5)[4], size.long, return_logprob=True, top_logprobs_num=2):
        events.append(last["meta_info"]["completion_tokens"])
    if last is None or last["meta_info"]["completion_tokens"] != size.long:
        raise AssertionError(f"the answer ended early: {last and last['meta_info']}")
    reply = answer(last)
    return {
        "answers": [{"tokens": reply.tokens, "gaps": margins(reply)}],
        "events": events,
        "verified": reply.meta.get("spec_verify_ct"),
    }


def mixed_load(server, size: Size, at_a_time: int = 32) -> dict[str, Any]:
    """Short requests of every kind: greedy and sampled, whole, streamed, given up by hanging up, by /abort_request and before
    the first token. Ends with a proven idle pass of SGLang's leak check."""
    draw = random.Random(7)
    prompts = mixed(256, seed=3)
    kinds = ["whole"] * 6 + ["stream", "hang up", "abort", "abort at once"]
    plan = []
    for i in range(size.mixed):
        prompt = prompts[draw.randrange(256)]
        plan.append((kinds[i % 10], prompt[: draw.randint(4, min(300, len(prompt)))], draw.randint(1, 24), draw.choice([0.0, 0.7, 1.0])))
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def one(item) -> str:
        kind, prompt, tokens, temperature = item
        parameters = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        if kind == "whole":
            got = len(server.generate(prompt, tokens, sampling_params=parameters)["output_ids"])
            assert got == tokens, f"{got} tokens instead of {tokens}"
            return kind
        name = uuid.uuid4().hex
        if kind != "stream":
            parameters["max_new_tokens"] = 400  # so that it is running when it is given up
        stream = server.stream(prompt, tokens, rid=name, sampling_params=parameters)
        if kind == "stream":
            *_, last = stream
            assert len(last["output_ids"]) == tokens, last["meta_info"]
        elif kind == "hang up":
            next(stream)
            stream.close()
        else:
            if kind == "abort":
                next(stream)
                server.request("/abort_request", {"rid": name})
            else:
                timer = threading.Timer(draw.random() * 0.05, server.request, ("/abort_request", {"rid": name}))
                timer.start()
            *_, last = stream
            reason = last["meta_info"]["finish_reason"]["type"]
            assert reason in ("abort", "length"), reason
            return f"{kind}: {reason}"
        return kind

    def counted(item) -> None:
        outcome = one(item)
        with lock:
            counts[outcome] = counts.get(outcome, 0) + 1

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(counted, plan))
    seconds = time.monotonic() - began
    idle = wait_idle(server)
    text = server.log_text()
    found = {
        "counts": counts,
        "seconds": seconds,
        "retractions": text.count("Testing retraction") + text.count("KV cache pool is full. Retract"),
        "running": idle["num_running_reqs"],
        "waiting": idle["num_waiting_reqs"],
    }
    server.request("/flush_cache", {})
    found["used_after_flush"] = wait_idle(server)["num_used_tokens"]
    return found


REGEX = r"(yes|no), [0-9]{2,4}( drafts| trees)"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "nodes": {"type": "integer", "minimum": 1, "maximum": 128}},
    "required": ["name", "nodes"],
    "additionalProperties": False,
}


def grammar(server, size: Size) -> dict[str, Any]:
    """Greedy answers under a regular expression and under a JSON schema, beside unconstrained ones."""
    prompts = mixed(12, seed=5)
    forms: list[tuple[str, dict]] = [("regex", {"regex": REGEX}), ("schema", {"json_schema": json.dumps(SCHEMA)}), ("free", {})]

    def one(i: int) -> dict[str, Any]:
        form, constraint = forms[i % 3]
        parameters = {"temperature": 0.0, "max_new_tokens": 96, **constraint}
        reply = server.request("/generate", {"input_ids": prompts[i], "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 2})
        a = answer(reply)
        return {"form": form, "text": reply["text"], "finish": a.meta["finish_reason"]["type"], "tokens": a.tokens, "gaps": margins(a)}

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        return {"answers": list(pool.map(one, range(12)))}


def sequence(server, size: Size) -> dict[str, Any]:
    """Tokens and logarithmic probabilities of eight prompts, one request at a time, on a server that has answered nothing."""
    answers = [answer(server.generate(p, 64, return_logprob=True)) for p in mixed(8)]
    return {"answers": [{"tokens": a.tokens, "logprobs": [x[0] for x in a.meta["output_token_logprobs"]]} for a in answers]}


LOADS: dict[str, Callable[..., dict[str, Any]]] = {
    f.__name__: f for f in (greedy, sampled, long, mixed_load, grammar, sequence)
}
