"""Prompts in, tokens out, on CPU in float32: the text with drafts is the text without, whatever the drafts are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matrix import loads
from server_harness import ROOT, Aborts, ask_all, check_log, difference, margins, wait_idle

from treewy_sglang.demo.server import CHAIN3, NGRAM16, PLAIN, TREE16, ServerFailed


def test_prompts_are_of_mixed_length_and_share_prefixes(prompts, load):
    lengths = sorted(map(len, prompts))
    assert lengths[0] == 8 and lengths[-1] == 700 and len(prompts) == load.prompts
    assert prompts[1][:200] == prompts[5][:200] and prompts[1] != prompts[5]


def test_reference_text_is_worth_comparing(reference):
    """No short cycle, no constant: else equality would say little about the state."""
    for a in reference:
        pairs = {tuple(a.tokens[i : i + 4]) for i in range(len(a.tokens) - 3)}
        assert len(pairs) > len(a.tokens) / 4, f"{len(pairs)} different runs of four tokens in {len(a.tokens)}"
    assert len({tuple(a.tokens) for a in reference}) == len(reference)


def test_decisions_are_wider_than_rounding(plain, reference, decided, load):
    """Equality is no luck: batch size changes the logarithmic probabilities by far less than any choice was won by."""
    one_by_one, together = plain
    noise = max(
        abs(x[0] - y[0])
        for a, b in zip(one_by_one, together)
        for x, y in zip(a.meta["output_token_logprobs"], b.meta["output_token_logprobs"])
    )
    narrowest = min(m for a in reference for m in margins(a))
    skipped = decided[-1] + 1 - len(decided)
    print(f"rounding {noise:.2g}, narrowest decision {narrowest:.2g}, prompts replaced for a near tie: {skipped}")
    assert len(reference) == load.prompts, f"{skipped} of {len(together)} prompts have a near tie"
    assert narrowest > 2 * noise


def test_reference_is_what_transformers_generates(reference, prompts, load, checkpoint):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # as for the servers: faster on a busy machine
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    wrong = []
    for i in range(10):
        ids = torch.tensor([prompts[i]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=load.new_tokens, do_sample=False)
        if reason := difference(out[0, ids.shape[1] :].tolist(), reference[i]):
            wrong.append(f"prompt {i} ({len(prompts[i])} tokens): {reason}")
    assert not wrong, "\n".join(wrong)


def test_without_the_flag_patched_is_unpatched_to_the_bit(plain, unpatched_answers):
    for i, (a, b) in enumerate(zip(plain[0], unpatched_answers, strict=True)):
        assert a.tokens == b.tokens, f"prompt {i}"
        # JSON carries the shortest decimal that gives the same float back: equal numbers are equal bits.
        assert a.meta["output_token_logprobs"] == b.meta["output_token_logprobs"], f"prompt {i}"


@pytest.fixture(scope="session")
def answered(server, prompts, load):
    """All prompts through `server`, with aborts in between."""
    aborts = Aborts(server, prompts)
    answers = ask_all(server, prompts, load, beside=aborts)
    aborts.finish()
    return answers


def test_same_tokens_as_without_drafts(answered, reference, prompts):
    wrong = [
        f"prompt {i} ({len(prompts[i])} tokens): {reason}"
        for i, (a, expected) in enumerate(zip(answered, reference, strict=True))
        if (reason := difference(a.tokens, expected))
    ]
    assert not wrong, "\n".join(wrong)


def test_drafts_were_accepted_in_part(answered, server):
    """Speculation happened, and paths of several lengths were committed: none, some, and more than one draft."""
    histogram: dict[int, int] = {}
    for a in answered:
        assert a.meta["spec_verify_ct"] > 0
        for length, count in enumerate(a.meta["spec_correct_drafts_histogram"]):
            histogram[length] = histogram.get(length, 0) + count
    verified = sum(a.meta["spec_verify_ct"] for a in answered)
    tokens = sum(a.meta["completion_tokens"] for a in answered)
    print(f"{server.mode.name}: accepted length {tokens / verified:.2f}, drafts accepted per verify {histogram}")
    assert tokens / verified > 1.02, f"accepted length {tokens / verified:.3f}: {histogram}"
    assert sum(count > 0 for count in histogram.values()) >= 3, f"one kind of outcome only: {histogram}"


def test_treewy_is_what_ran(answered, server):
    facts = server.state()["treewy"]
    assert facts["requests_verified"] >= sum(a.meta["spec_verify_ct"] for a in answered)
    assert facts["nodes_verified"] == facts["requests_verified"] * server.mode.nodes
    assert 0 < facts["stash_bytes_per_request"] < facts["snapshot_bytes_per_request"]
    assert not any(facts["errors"].values()), facts["errors"]


def test_treewy_plan_says_what_the_server_says(answered, server, checkpoint):
    from treewy_sglang.planner import Draft, Server, load, plan

    nodes, topk = server.mode.nodes, 1 if server.mode is CHAIN3 else 2  # any tree takes the same memory
    fits = plan(load(str(checkpoint)), Draft.make(nodes=nodes, topk=topk), Server(device="cpu", gpu_memory=2.0)).fits
    facts = server.state()["treewy"]
    assert fits["treewy"].total == pytest.approx(facts["stash_bytes_per_request"], rel=0.01)
    assert fits["snapshot"].total == pytest.approx(facts["snapshot_bytes_per_request"], rel=0.01)
    said = f"snapshot={fits['snapshot'].total} stash={fits['treewy'].total} bytes (T={nodes}, "
    assert said in server.log_text()


def test_streaming(answered, server, prompts, reference, load):
    """Tokens come piece by piece, and together they are the answer."""
    pieces, arrivals = [], []
    for event in server.stream(prompts[3], load.new_tokens):
        pieces.append(event)
        arrivals.append(time.monotonic())
    lengths = [e["meta_info"]["completion_tokens"] for e in pieces]
    assert len(pieces) > 4 and lengths == sorted(lengths) and lengths[-1] == load.new_tokens
    assert arrivals[-1] > arrivals[0]
    assert not difference(pieces[-1]["output_ids"], reference[3])


def test_prefix_cache_answers_the_same(answered, server, prompts, reference, load):
    """Asked again, the prompts come from the prefix cache, state included, and the answers stay."""
    # The last ones: at full size the states of the first have made room for others by now.
    again = ask_all(server, prompts[-8:], load)
    assert sum(a.meta["cached_tokens"] for a in again) > 0
    assert not [r for a, e in zip(again, reference[-8:]) if (r := difference(a.tokens, e))]


def test_a_grammar_is_answered_with_an_error_and_the_server_goes_on(answered, server, prompts, reference, load):
    with pytest.raises(ServerFailed, match="Grammar-based generation"):
        server.request("/generate", {"input_ids": prompts[0], "sampling_params": {"regex": "[0-9]{3}", "max_new_tokens": 4}})
    assert not difference(server.generate(prompts[0], load.new_tokens)["output_ids"], reference[0])


@pytest.mark.full
def test_many_short_requests(answered, server, load):
    """Greedy and sampled, whole, streamed and given up at every stage, more at a time than run; then all is free."""
    found = loads.mixed_load(server, loads.Size(mixed=60), at_a_time=2 * load.at_a_time)
    assert sum(found["counts"].values()) == 60 and any("abort" in kind for kind in found["counts"]), found
    assert found["running"] == found["waiting"] == found["used_after_flush"] == 0, found
    check_log(server)


def test_no_slot_is_lost(answered, server):
    """SGLang checks pools, request slots and prefix cache whenever it idles, and ends the server when they are off."""
    found = wait_idle(server)
    assert found["num_running_reqs"] == 0
    check_log(server)
    assert "flushed" in str(server.request("/flush_cache", {})).lower()
    after = wait_idle(server)
    assert after["num_used_tokens"] == 0, after
    check_log(server)
    assert not any(server.state()["treewy"]["errors"].values())


def test_demo_from_the_readme(tmp_path):
    """`make demo` as a user types it; outside `make test`'s own environment, the program behind it."""
    options = f"--device cpu --json {tmp_path / 'demo.json'}"
    if Path(sys.prefix) == ROOT / ".venv":
        command = ["make", "demo", f"ARGS={options}"]
    else:
        command = [sys.executable, "-m", "treewy_sglang.demo", "run", *options.split()]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, *others = json.loads((tmp_path / "demo.json").read_text())
    assert [r["mode"] for r in (plain, *others)] == [m.name for m in (PLAIN, CHAIN3, TREE16, NGRAM16)]
    for r in others:
        assert r["texts"] == plain["texts"] and r["accepted"] > 1
        assert 0 < r["stash_bytes"] < r["snapshot_bytes"]
        assert r["mode"] in done.stdout
