"""examples/ and the documents' blocks that need a server, on the server with a chain of drafts that is running anyway."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from server_harness import check_log, wait_idle

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))

from document_blocks import URL, all_blocks, environment, make_scratch, run, sessions  # noqa: E402

# Not one server more: the tests join those of test_end_to_end.py for this mode.
chain3 = pytest.mark.parametrize("server", ["chain3"], indirect=True)
PROMPT = 'What is a "draft"? \\ A guess.'


def example(server, *command: str) -> str:
    env = {**os.environ, "TREEWY_URL": server.url, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def verified(server) -> int:
    return server.state()["treewy"]["requests_verified"]


def expected(server, **body) -> str:
    """What the server answers to the request itself, without any client."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    choice = server.request(path, {"model": "default", "temperature": 0, "max_tokens": 64, **body})["choices"][0]
    return choice["message"]["content"] if "messages" in body else choice["text"]


@chain3
def test_openai_client(server):
    before = verified(server)
    printed = example(server, sys.executable, "examples/openai_chat.py", PROMPT)
    assert verified(server) > before, "the answers were drafted"
    completion = expected(server, prompt=PROMPT)
    chat = expected(server, messages=[{"role": "user", "content": PROMPT}])
    assert completion and chat and completion != chat
    assert f"tokens): {completion}\n" in printed
    assert f"tokens): {chat}\n" in printed
    assert f"streamed: {chat}\n" in printed, "the pieces of the stream are the answer"


@chain3
def test_curl(server):
    before = verified(server)
    printed = example(server, "sh", "examples/curl.sh", PROMPT)
    assert verified(server) > before
    assert re.search(r'"requests_verified":[1-9]', printed) and re.search(r'"stash_bytes_per_request":[1-9]', printed)
    assert printed.count("data: ") > 4 and "data: [DONE]" in printed
    import json

    answer = json.loads(printed.split("chat:\n")[1].split("\nstreamed:")[0])
    assert answer["choices"][0]["message"]["content"] == expected(server, messages=[{"role": "user", "content": PROMPT}])


def test_examples_say_what_is_wrong_without_a_server():
    env = {**os.environ, "TREEWY_URL": "http://127.0.0.1:9"}  # the discard port: nothing listens
    done = subprocess.run(["sh", "examples/curl.sh"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "127.0.0.1" in done.stderr


@chain3
@pytest.mark.parametrize("document", sorted(sessions("server")))
def test_blocks_that_need_a_server(document, server, tmp_path):
    where = make_scratch(tmp_path / "tree")
    before = verified(server)
    env = {**environment(where), "TREEWY_URL": server.url}
    printed = run(sessions("server")[document], where, env, exchange=((URL, server.url),))
    assert printed.strip()
    assert verified(server) > before, "the blocks asked this server"


def options(command: list[str]) -> dict[str, str | None]:
    """{flag: value, None for a switch}"""
    found: dict[str, str | None] = {}
    for word, after in zip(command, [*command[1:], "--"]):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


@chain3
def test_launch_commands_are_what_ran(server):
    """The launch command of the quick start for a CPU asks for nothing that this server was not started with."""
    commands = [
        shlex.split(command.replace("\\\n", " "))
        for block in all_blocks()
        for command in re.findall(r"python -m sglang\.launch_server(?:[^\n\\]|\\\n)*", block.text)
        if "--device cpu" in command and "--enable-treewy" in command
    ]
    assert commands
    ran = options(server.command())
    own = {"--model-path", "--port", "--max-running-requests", "--max-mamba-cache-size", "--max-total-tokens"}  # the same kind, another value
    for command in commands:
        sizes = {"--max-running-requests", "--max-mamba-cache-size", "--max-total-tokens"}
        assert sizes <= set(options(command)), "without them the pools take most of the machine's memory"
        for flag, value in options(command).items():
            assert flag in ran, f"{flag} is in the documents and was not tested"
            assert flag in own or ran[flag] == value, f"{flag} {value} is in the documents, {ran[flag]} was tested"


@chain3
def test_the_server_is_well_afterwards(server):
    assert wait_idle(server)["num_running_reqs"] == 0
    check_log(server)
    assert not any(server.state()["treewy"]["errors"].values())
