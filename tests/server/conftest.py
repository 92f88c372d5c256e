"""Servers for the end-to-end tests. Each starts once; one runs at a time, because each is three processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_harness import (
    ROOT, Answer, answer, ask_all, check_log, copy_of_sglang, installed, margins, path_environment, treewy, wait_idle,
)  # fmt: skip


def pytest_configure(config):
    config.addinivalue_line("markers", "full: takes many minutes; only with --full")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@dataclass(frozen=True)
class Load:
    """How much is asked."""

    prompts: int
    new_tokens: int
    at_a_time: int
    spare: int = 0  # more prompts for the reference, see `decided`


@pytest.fixture(scope="session")
def load(request) -> Load:
    return Load(64, 512, 16, spare=16) if request.config.getoption("--full") else Load(16, 128, 8)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    from treewy_sglang.demo.checkpoint import make_checkpoint

    return make_checkpoint(ROOT / ".demo" / "checkpoint")


@pytest.fixture(scope="session")
def candidates(load) -> list[list[int]]:
    from treewy_sglang.demo.prompts import mixed

    return mixed(load.prompts + load.spare)


@pytest.fixture(scope="session")
def patched(tmp_path_factory) -> dict[str, str]:
    """Environment of a server on a patched SGLang: the installed one if it is patched (`make test`), else a copy."""
    status = json.loads(treewy("patch", "status", "--json", str(installed())).stdout)
    if status["state"] == "applied":
        return path_environment(ROOT / "python")
    where = tmp_path_factory.mktemp("patched")
    done = treewy("patch", "apply", str(copy_of_sglang(where)))
    assert done.returncode == 0, done.stderr
    return path_environment(where, ROOT / "python")


@pytest.fixture(scope="session")
def unpatched(tmp_path_factory) -> dict[str, str]:
    """Environment of a server on SGLang as released, which finds the supplied CPU operators on its path."""
    import treewy_sglang.sglang.cpu.bootstrap as bootstrap

    where = tmp_path_factory.mktemp("unpatched")
    copy = copy_of_sglang(where)
    done = treewy("patch", "revert", str(copy))
    assert done.returncode == 0, done.stderr
    status = json.loads(treewy("patch", "status", "--json", str(copy)).stdout)
    assert status["state"] not in ("applied", "interrupted", "modified"), status
    return {**path_environment(Path(bootstrap.OVERLAY), where, ROOT / "python"), "SGLANG_USE_CPU_ENGINE": "1"}


# What an unpatched SGLang needs to be told on CPU; given to both sides of a comparison.
AS_UNPATCHED = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
IN_SEQUENCE = 8  # prompts that are asked one request at a time
# Two float32 servers that batch differently round differently, by about 1e-5 here. A token that the reference itself chose
# by less than this is no basis for a comparison, so its prompt gives way to a spare one.
NEAR_TIE = 1e-4


@pytest.fixture(scope="session")
def start(checkpoint, load):
    """start(mode, environment, name, ...) -> Server, not yet started."""
    from treewy_sglang.demo.server import Server

    def make(mode, environment, name, arguments=()):
        log = ROOT / ".demo" / "logs" / f"test-{name}.log"
        return Server(checkpoint, mode, log, running=load.at_a_time, tokens=2 * load.at_a_time * 1400,
                      environment=environment, arguments=arguments)  # fmt: skip

    return make


def in_sequence(server, prompts) -> list[Answer]:
    """Tokens and logarithmic probabilities of the first prompts, one request at a time, on a fresh server."""
    return [answer(server.generate(p, 64, return_logprob=True)) for p in prompts[:IN_SEQUENCE]]


@pytest.fixture(scope="session")
def plain(start, patched, candidates, load) -> tuple[list[Answer], list[Answer]]:
    """The patched server without drafts and without the flag: in sequence, then everything side by side."""
    from treewy_sglang.demo.server import PLAIN

    with start(PLAIN, patched, "plain-patched", AS_UNPATCHED) as server:
        one_by_one = in_sequence(server, candidates)
        server.request("/flush_cache", {})
        answers = ask_all(server, candidates, load, return_logprob=True, top_logprobs_num=2)
        wait_idle(server)
        check_log(server)
    for a in answers:
        assert len(a.tokens) == load.new_tokens
    return one_by_one, answers


@pytest.fixture(scope="session")
def decided(plain, load) -> list[int]:
    """The candidates that are compared: those in whose reference no decision is a near tie."""
    return [i for i, a in enumerate(plain[1]) if min(margins(a)) > NEAR_TIE][: load.prompts]


@pytest.fixture(scope="session")
def prompts(candidates, decided) -> list[list[int]]:
    return [candidates[i] for i in decided]


@pytest.fixture(scope="session")
def reference(plain, decided) -> list[Answer]:
    """What every server with drafts has to answer."""
    return [plain[1][i] for i in decided]


@pytest.fixture(scope="session")
def unpatched_answers(start, unpatched, candidates) -> list[Answer]:
    from treewy_sglang.demo.server import PLAIN

    with start(PLAIN, unpatched, "plain-unpatched", AS_UNPATCHED) as server:
        answers = in_sequence(server, candidates)
        wait_idle(server)
        check_log(server)
    return answers


@pytest.fixture(scope="session", params=["chain3", "tree16", "tree64", "ngram16"])
def server(request, start, patched, reference):
    """A server with drafts verified by TreeWY; the reference has been taken before it starts."""
    from treewy_sglang.demo import server as modes

    with start(getattr(modes, request.param.upper()), patched, request.param) as running:
        yield running
