"""The matrix without a server: its judges say no where they should, its scenarios hang together, its replay is the recurrence."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import random
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from matrix import drift, refusals, runner, scenarios, verdicts
from matrix.loads import LOADS, QUICK
from matrix.verdicts import Missed
from server_harness import ROOT

sys.path.insert(0, str(drift.HOOK))
import drift_recorder  # noqa: E402


def answers(*tokens, gaps=1.0):
    return [{"tokens": list(t), "gaps": [gaps] * len(t)} for t in tokens]


def test_splits_are_found_and_judged_by_their_gap():
    reference = answers([1, 2, 3], [4, 5, 6], [7, 8])
    reference[1]["gaps"] = [2.0, 0.1, 3.0]
    got = answers([1, 2, 3], [4, 9, 6], [7, 8, 8])
    found = verdicts.splits(reference, got, tie=0.25)
    assert found == {"answers": 3, "split": 2, "compared": 3 + 2 + 3, "gaps": [0.1, math.inf], "gap": math.inf, "wide": [[2, 2, math.inf]]}
    assert verdicts.splits(reference, reference, 0.0)["gap"] == verdicts.splits(reference, reference, 0.0)["split"] == 0
    with pytest.raises(Missed, match="2 answers beside 3"):
        verdicts.splits(reference, got[:2], 0.25)


def test_prompts_with_a_near_tie_give_way():
    reference = [{"tokens": [1], "gaps": [g]} for g in (1.0, 1e-6, 2.0, 3.0)]
    assert verdicts.without_near_ties(reference, 1e-4, 2) == [0, 2]
    with pytest.raises(Missed, match="3 answers without a near tie, 4 wanted"):
        verdicts.without_near_ties(reference, 1e-4, 4)


@pytest.mark.parametrize("ours, theirs, fine", [(45, 44, True), (44, 47, True), (60, 20, False), (0, 0, True), (5, 3, True)])
def test_how_often_answers_split_is_compared_with_its_noise(ours, theirs, fine):
    a, b = ({"split": n, "compared": 5000} for n in (ours, theirs))
    if fine:
        assert 0.01 <= verdicts.no_more_frequent(a, b) <= 1
    else:
        with pytest.raises(Missed, match="more frequent"):
            verdicts.no_more_frequent(a, b)


def test_how_wide_splits_are_is_compared_with_another_mode():
    draw = random.Random(4)
    narrow, wide = ([draw.random() * scale for _ in range(40)] for scale in (0.2, 0.6))
    found = lambda gaps: {"gaps": gaps, "gap": max(gaps, default=0.0), "split": len(gaps)}  # noqa: E731
    assert verdicts.no_wider(found(narrow), found(wide)) > 0.5 and verdicts.no_wider(found(wide), found(wide)) >= 0.5
    assert verdicts.no_wider(found([]), found([])) == 1.0
    with pytest.raises(Missed, match="wider: up to 0.[45]"):
        verdicts.no_wider(found(wide), found(narrow))
    with pytest.raises(Missed, match="the other has none"):
        verdicts.no_wider(found([0.1]), found([]))


def test_near_ties_are_judged_strictly_and_beside_snapshots():
    plain, ours = answers([1, 2, 3], [4, 5], gaps=0.5), answers([1, 2, 9], [4, 5], gaps=0.5)
    data = {name: {"greedy": {"answers": a, "accepted": 2.0}} for name, a in (("bf16-plain", plain), ("bf16-chain3-snapshots", ours), ("bf16-chain3", ours))}
    judged = lambda check: runner.judge(check, data, QUICK)  # noqa: E731
    beside = scenarios.near("bf16-plain", "bf16-chain3", "bfloat16", "bf16-chain3-snapshots")
    assert judged(beside)["outcome"] == "ok" and beside.starts == ("bf16-plain", "bf16-chain3-snapshots", "bf16-chain3")
    assert judged(scenarios.near("bf16-plain", "bf16-chain3", "bfloat16"))["outcome"] == "MISSED"
    assert judged(scenarios.near_ties("chain3"))["outcome"] == "ok"
    data["bf16-chain3"] = {"greedy": {"answers": plain, "accepted": 2.0}}
    assert judged(beside)["outcome"] == "ok" and judged(scenarios.near_ties("chain3"))["outcome"] == "MISSED"


def draw_samples(seed, count, weights, copy=0.0):
    """Answers of eight tokens; with probability `copy` a token repeats the one before, as wrongly accepted drafts would."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        tokens = []
        for _ in range(8):
            again = tokens and rng.random() < copy
            tokens.append(tokens[-1] if again else rng.choices(range(len(weights)), weights)[0])
        out.append(tokens)
    return out


EIGHT = [8, 5, 4, 3, 2, 1, 1, 1]


def test_chi_square_is_the_textbook_value():
    statistic, freedom, p = verdicts.chi_square({"a": 30, "b": 70}, {"a": 50, "b": 50})
    assert statistic == pytest.approx(8.3333, abs=1e-3) and freedom == 1 and p == pytest.approx(0.003892, abs=1e-5)
    # Categories expected fewer than five times are one: here a single one is left with them.
    assert verdicts.chi_square({"a": 50, "b": 1, "c": 2}, {"a": 50, "d": 1})[1] in (0, 1)


def test_equal_distributions_pass_and_the_rate_of_false_alarms_is_small():
    found = [verdicts.same_distribution(draw_samples(2 * i, 2500, EIGHT), draw_samples(2 * i + 1, 2500, EIGHT)) for i in range(10)]
    assert min(f["corrected"] for f in found) > 0.001 and found[0]["tests"] == 8 + 7 + 1
    assert found[0]["tokens"] == [20000, 20000] and found[0]["vocabulary"] == 8


@pytest.mark.parametrize(
    "weights, copy", [([8, 5, 4, 3, 2, 1, 1, 2], 0.0), (EIGHT, 0.12), ([9, 5, 4, 3, 2, 1, 1, 1], 0.1)], ids=["marginal", "pairs", "both"]
)
def test_another_distribution_is_found_out(weights, copy):
    with pytest.raises(Missed, match="another distribution"):
        verdicts.same_distribution(draw_samples(1, 2500, EIGHT), draw_samples(2, 2500, weights, copy))


def test_a_constant_is_no_distribution():
    with pytest.raises(Missed, match="too little variety"):
        verdicts.same_distribution([[1] * 8] * 100, [[1] * 8] * 100)


def test_acceptance_window_by_window():
    events = [1, *range(3, 2001, 2), *range(2001, 4001)]
    accepted = verdicts.acceptance(events)
    assert len(accepted) == 3 and accepted[0] == 2.0 and accepted[-1] == 1.0
    verdicts.flat([1.8, 1.9, 1.85, 1.8])
    with pytest.raises(Missed, match="falls"):
        verdicts.flat([1.9, 1.8, 1.5, 1.2])
    with pytest.raises(Missed, match="too few"):
        verdicts.flat([1.9, 1.8])


def test_drift_is_held_against_plain_decoding():
    plain = {"0": [1e-6, 2e-6], "1": [1e-6, 1e-6]}
    assert verdicts.drift(plain, plain)["worst"] == 2e-6
    for worse in ({"0": [1e-6, 9e-6], "1": [1e-6, 1e-6]}, {"0": [1e-6, math.nan], "1": [1e-6, 1e-6]}, {"0": [1e-6]}):
        with pytest.raises(Missed):
            verdicts.drift(worse, plain)


LOG = """
[..] TreeWY: draft state per request: snapshot=52690944 stash=1380864 bytes (T=64, layers=3, rows=48)
[..] TreeWY is active: drafts of up to 64 nodes, stash 1.32 MiB per running request instead of 50.25 MiB of snapshots; 833
state slots of 0.79 MiB (with snapshots: 38); running requests 48 (with snapshots: 12).
"""


def test_start_lines_are_what_the_glue_writes():
    from treewy_sglang.sglang.sizing import Plan, start_line

    lines = verdicts.start_lines(LOG)
    assert lines["slots"] == 833 and lines["snapshot_slots"] == 38 and lines["running"] == 48 and lines["rows"] == 48
    plan = Plan(slot_bytes=2**20, row_bytes=2**18, snapshot_bytes=2**24, slots_per_request=3, requested=8, slots=30, rows=8,
                snapshot_slots=9, default_slots=24, ratio=0.9, rest_bytes=2**30, context_tokens=4104)  # fmt: skip
    again = verdicts.start_lines(LOG.split("[..] TreeWY is")[0] + start_line(plan, 16, 8))
    assert (again["slots"], again["snapshot_slots"], again["running"], again["snapshot_running"]) == (30, 9, 8, 3)
    with pytest.raises(Missed, match="lacks"):
        verdicts.start_lines("an ordinary log")
    # 833 slots beside 48 rows of 1.32 MiB, which would be 79 slots more.
    assert verdicts.share_of_bare_budget(lines, round(0.79 * 2**20)) == pytest.approx(833 / (833 + 80), abs=2e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scenarios_hang_together(device):
    possible = scenarios.for_device(scenarios.starts(), device)
    rows = scenarios.checks(possible)
    assert len({r.name for r in rows}) == len(rows)
    used = {name for r in rows for name in r.starts}
    assert used == set(possible)
    assert {load for s in possible.values() for load in s.loads} <= set(LOADS) | {"drift", "refusals"}


def test_no_buffer_comes_without_the_overlap_scheduler():
    """SGLang asserts it; on a CPU it never shows, because there is no overlap scheduler there."""
    found = [s for s in scenarios.starts().values() if "no_buffer" in s.arguments]
    assert len(found) >= 10 and all("--disable-overlap-schedule" in s.arguments for s in found)


def test_what_argparse_says_is_part_of_a_refusal(monkeypatch):
    def prepare_server_args(words):
        argparse.ArgumentParser(prog="server").parse_args(words)

    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", SimpleNamespace(prepare_server_args=prepare_server_args))
    assert "unrecognized arguments: --dtype float64" in refusals.parse(["--dtype", "float64"])
    assert refusals.parse([]) is None


def test_every_demand_has_a_row():
    rows = "\n".join(r.name for r in scenarios.checks(scenarios.starts()))
    for demand in ("f32-tree64-extra_buffer = ", "f32-ngram16-retract = ", "bf16-chain3-flashinfer ~ bf16-plain", "bf16-tree16: parts from snapshots at near ties only", "drift-tree16",
                   "acceptance stays flat, tokens equal", "sampled-tree16: chi-square", "memory-64: state slots at least 70%",
                   "memory-4: state slots at least 97%", "f32-tree16-tp2 = ", "everything is free at the end", "patched = unpatched",
                   "adaptive", "no-cuda-graph", "no-overlap", "no-radix", "chunked", "flashinfer", "grammar-tree16", "qwen35-moe"):  # fmt: skip
        assert demand in rows, demand


def test_lanes_of_the_rented_host_name_what_there_is():
    script = (ROOT / "bench" / "host.sh").read_text()
    lanes = dict(re.findall(r"^    (\w+)\) echo (.+) ;;$", script, re.M))
    starts = scenarios.for_device(scenarios.starts(), "cuda")
    names = {*starts, *(r.name for r in scenarios.checks(starts))}
    patterns = [pattern.strip("'") for words in lanes.values() for pattern in words.split()]
    assert len(lanes) == 6 and [p for p in patterns if not fnmatch.filter(names, p)] == []
    missed = [n for n in starts if not n.endswith("-tp2") and not any(fnmatch.fnmatch(n, p) for p in patterns)]
    assert missed == [], "servers in no lane"
    done = subprocess.run(["bash", str(ROOT / "bench" / "host.sh"), "everything"], capture_output=True, text=True)
    assert done.returncode == 2 and "no step everything" in done.stderr


def test_a_missing_ffmpeg_is_no_complaint_and_another_traceback_is():
    video = "[start of libtorchcodec loading traceback]\nTraceback (most recent call last):\n[end of libtorchcodec loading traceback].\n"
    assert scenarios.complaints(f"a\n{video}b") == []
    assert scenarios.complaints(f"{video}Traceback (most recent call last):\n{video}") == ["Traceback"]


def test_outcomes_are_told_apart():
    check = scenarios.equal("a", "b", load="long")
    same = {"long": {"answers": answers([1, 2])}}
    other = {"long": {"answers": answers([1, 3])}}
    assert runner.judge(check, {"a": same, "b": same}, QUICK)["outcome"] == "ok"
    assert runner.judge(check, {"a": same, "b": other}, QUICK)["outcome"] == "MISSED"
    assert runner.judge(check, {"a": same, "b": {"error": "the server ended\nwith 1"}}, QUICK) == {
        "check": "b = a", "outcome": "failed", "detail": "b: the server ended"}  # fmt: skip
    assert runner.judge(check, {"a": same}, QUICK)["outcome"] == "not run"
    assert runner.judge(check, {"a": same, "b": {}}, QUICK)["outcome"] == "failed"


def test_a_failed_start_is_a_row_and_is_tried_again(tmp_path, monkeypatch):
    tried = []

    def one(self, start):
        tried.append(start.name)
        return {"error": "it ended"} if start.name == "f32-plain" else {"greedy": {"answers": []}, "end": {}}

    monkeypatch.setattr(runner.Run, "one", one)
    monkeypatch.setattr(runner.Environments, "of", lambda self, patched: {})
    monkeypatch.setattr(scenarios, "model_directory", lambda name, work: tmp_path)
    call = ["--device", "cpu", "--scenarios", "f32-chain3-no_buffer", "--work", str(tmp_path), "--json", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    assert runner.main(call) == 1 and runner.main(call) == 1
    assert sorted(tried) == ["f32-chain3-no_buffer", "f32-plain", "f32-plain"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["outcome"] == "failed" and rows[0]["detail"] == "f32-plain: it ended" and rows[0]["device"]
    assert runner.main([*call, "--budget", "1"]) == 1  # no time for another try: the row says what came of the last one
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[0]["outcome"] == "failed"
    assert runner.main([*call, "--budget", "1", "--fresh"]) == 1


def test_rows_of_what_is_kept_say_where_it_comes_from(tmp_path, monkeypatch):
    kept = tmp_path / "data-cuda-full"
    kept.mkdir()
    about = {"device": "NVIDIA H200", "commit": "abc"}
    for name, retracted in (("f32-chain3-retract", 7), ("f32-tree16-retract", 0)):
        (kept / f"{name}.json").write_text(json.dumps({"greedy": {"retracted": retracted}, "about": about}))
    (kept / "f32-ngram16-retract.json").write_text(json.dumps({"error": "it ended"}))
    monkeypatch.setattr(runner.Run, "all", lambda *_: pytest.fail("a server was started"))
    call = ["--work", str(tmp_path), "--report", "--json", str(tmp_path / "rows.jsonl"), "--scenarios", "*were retracted"]
    assert runner.main(call) == 1
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["check"], r["outcome"], r["device"], r["commit"]) for r in rows] == [
        ("f32-chain3-retract: requests were retracted", "ok", "NVIDIA H200", "abc"),
        ("f32-tree16-retract: requests were retracted", "MISSED", "NVIDIA H200", "abc")]  # fmt: skip


def test_servers_start_in_the_order_of_the_patterns_until_too_many_have_failed(tmp_path, monkeypatch):
    begun = []

    def server(self, start):
        begun.append(start.name)
        raise runner.ServerFailed("it ended")

    monkeypatch.setattr(runner.Run, "server", server)
    monkeypatch.setattr(runner.Environments, "of", lambda self, patched: {})
    monkeypatch.setattr(scenarios, "model_directory", lambda name, work: tmp_path)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    wanted = ["bf16-chain3", "sampled-chain3", "f32-chain3-no_buffer"]
    call = ["--device", "cpu", "--work", str(tmp_path), "--json", str(tmp_path / "rows.jsonl"), "--scenarios", *wanted]
    assert runner.main([*call, "--prepare"]) == 0 and begun == []
    assert runner.main([*call, "--give-up", "4"]) == 1
    assert begun == ["bf16-plain", "bf16-chain3", "sampled-plain", "sampled-chain3"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    unrun = [r["detail"] for r in rows if r["outcome"] == "not run"]
    assert unrun and all("4 servers had failed" in detail for detail in unrun)
    assert {r["outcome"] for r in rows} == {"failed", "not run"}


def test_ports_are_free_and_are_not_given_twice():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        found = runner.ports(used, used + 99)
        first, second = next(found), next(found)
    assert used < first < second < used + 99


def test_a_signal_stops_the_servers_too(tmp_path, monkeypatch):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    ended = []
    monkeypatch.setattr(runner.os, "_exit", ended.append)
    run = runner.Run(SimpleNamespace(budget=0, device="cpu", size="quick", work=tmp_path), QUICK)
    run.live.add(sleeper)
    run.stop_all(15, None)
    assert sleeper.wait(10) == -9 and ended == [143]


def test_on_cuda_no_command_line_is_parsed_in_a_fork(monkeypatch, tmp_path):
    """What looks at the device before a fork leaves the child without CUDA: every case has an interpreter of its own."""
    asked = []

    def ask(command, **_):
        names = command[command.index(str(tmp_path / "config-dense")) + 1 :]
        asked.append(names)
        return SimpleNamespace(returncode=0, stdout=json.dumps({n: n for n in names}), stderr="")

    monkeypatch.setattr(refusals.subprocess, "run", ask)
    found = refusals.run("cuda", tmp_path, tmp_path, {})
    assert sorted(asked) == sorted([n] for n in refusals.cases("cuda"))
    assert found == {n: n for n in refusals.cases("cuda")}
    monkeypatch.setattr(refusals, "parse", lambda words: "parsed here")
    monkeypatch.setattr(refusals, "in_a_fork", lambda words: pytest.fail("forked"))
    for module in ("sglang.srt.configs.model_config", "sglang.srt.layers.quantization", "sglang.srt.server_args"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    for package in ("sglang", "sglang.srt", "sglang.srt.configs", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))
    refusals.main(["cuda", "model", "dense", "replayssm"])


def test_refusals_are_judged_by_their_words():
    right = {name: " ".join(words) or None for name, (_, words) in refusals.cases("cuda").items()}
    assert refusals.wrong(right, "cuda") == []
    changed = {**right, "nothing wrong": "refused", "replayssm": None, "float32": "no", "pdmux": "x pdmux"}
    assert [w.split(":")[0] for w in refusals.wrong(changed, "cuda")] == ["nothing wrong", "replayssm", "float32"]
    assert len(refusals.wrong({}, "cpu")) == len(refusals.cases("cpu"))


def test_a_server_chooses_the_rows_that_are_about_it():
    call = [sys.executable, str(ROOT / "tests" / "server" / "matrix"), "--list", "--scenarios", "bf16-adaptive"]
    listed = subprocess.run(call, capture_output=True, text=True).stdout
    assert "bf16-adaptive ~ bf16-plain" in listed and "bf16-adaptive: healthy" in listed
    assert "bf16-chain3-flashinfer" not in listed


def test_the_command_lists_what_it_would_run():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "server" / "matrix"), "--list", "--scenarios", "memory-*"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "memory-64-treewy: NEXTN tree, topk 8, 64 nodes" in done.stdout, done.stderr


def test_the_small_qwen35_computes_what_the_small_qwen3_next_computes(tmp_path):
    """Its layers are laid out as in public checkpoints; the same random layers give the same logits, to the bit."""
    import torch
    from matrix import qwen35
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from treewy_sglang.demo import checkpoint as small

    source = tmp_path / "next"
    source.mkdir()
    weights = small.make_weights(small.model_config())
    weights["lm_head.weight"] = torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(small.model_config()))
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = AutoModelForImageTextToText.from_pretrained(qwen35.write(tmp_path / "moe", True, source), dtype=torch.float32)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits
    assert torch.equal(ours, theirs)
    dense = qwen35.convert(weights, moe=False)
    assert "model.layers.0.mlp.gate_proj.weight" in dense and not any("expert" in name for name in dense)


def record(tokens=50, dtype="float32"):
    import torch

    torch.manual_seed(3)
    H, HV, K, W = 1, 2, 64, 4
    channels, dtype = (2 * H + HV) * K, getattr(torch, dtype)
    return {
        "mixed_qkv": torch.randn(tokens, channels).to(dtype), "a": torch.randn(tokens, HV).to(dtype), "b": torch.randn(tokens, HV).to(dtype),
        "conv_weight": torch.randn(channels, W).to(dtype) * 0.5, "conv_bias": None, "A_log": torch.randn(HV), "dt_bias": torch.randn(HV),
        "key_heads": H, "state": torch.zeros(HV, K, K),
    }  # fmt: skip


def test_the_replay_is_the_recurrence_of_the_reference():
    import torch

    from treewy_sglang import reference

    r = record()
    zeros = (torch.zeros(1, r["mixed_qkv"].shape[1], 3), torch.zeros(1, 2, 64, 64))
    truth = reference.tree_conv_verify(
        r["mixed_qkv"], r["conv_weight"], None, zeros[0], r["a"], r["b"], r["A_log"], r["dt_bias"], zeros[1],
        torch.tensor([0]), torch.arange(-1, 49)[None], nodes=torch.tensor([49]),
    ).states[0]  # fmt: skip
    state, tokens = drift.replay(r)
    assert tokens == 50 and (state - truth).abs().max() < 1e-6 * truth.abs().max()
    r["state"] = truth.float()
    errors, _ = drift.errors(r)
    assert len(errors) == 2 and max(errors) < 1e-5
    r["state"][1, 0] += 1.0
    errors, _ = drift.errors(r)
    assert errors[0] < 1e-5 < 1e-2 < errors[1]


def test_the_recorder_keeps_prompts_decoded_tokens_and_accepted_nodes(tmp_path):
    """Against stand-ins of the two backends: what they are given goes through, and what was accepted is written."""
    import torch

    class GDNAttnBackend:
        def forward_extend(self, layer, forward_batch, mixed_qkv, a, b):
            return "extended"

        def forward_decode(self, layer, forward_batch, mixed_qkv, a, b):
            return "decoded"

    class TreeWYGDNAttnBackend(GDNAttnBackend):
        def target_verify(self, layer, nodes, mixed_qkv, a, b):
            return "verified"

        def commit(self, accepted, track_indices, track_nodes):
            self.committed = True

    plain, ours = ModuleType("plain"), ModuleType("ours")
    plain.GDNAttnBackend, ours.TreeWYGDNAttnBackend = GDNAttnBackend, TreeWYGDNAttnBackend
    recorder = drift_recorder.Recorder(str(tmp_path / "r.pt"), tokens=7)
    drift_recorder.record_plain(recorder, plain)
    drift_recorder.record_treewy(recorder, ours)

    backend = TreeWYGDNAttnBackend()
    temporal = torch.arange(2.0 * 4).view(2, 4)
    backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda name: SimpleNamespace(temporal=temporal + name))
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32)
    backend.forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([1]), retrieve_parent_token=parents)
    layers = [SimpleNamespace(layer_id=i, conv_weights=torch.zeros(1), bias=None, A_log=torch.zeros(1), dt_bias=torch.zeros(1), num_k_heads=1) for i in (0, 2)]  # fmt: skip
    mode = SimpleNamespace(is_target_verify=lambda: False)

    def rows(first, count):
        x = torch.arange(first, first + count, dtype=torch.float32)[:, None]
        return x, x, x

    for start, prompt in ((90, 5), (0, 3)):  # the second prompt is a new request, so the first is forgotten
        for layer in layers:
            batch = SimpleNamespace(forward_mode=mode, extend_prefix_lens=torch.tensor([0]))
            assert backend.forward_extend(layer, batch, *rows(start, prompt)) == "extended"
    for layer in layers:
        assert backend.forward_decode(layer, None, *rows(3, 1)) == "decoded"
    for layer in layers:
        assert backend.target_verify(layer, 4, *rows(10, 4)) == "verified"
    backend.commit(torch.tensor([3]), None, None)
    assert backend.committed and recorder.done
    written = torch.load(tmp_path / "r.pt")
    assert sorted(written) == [0, 2]
    assert written[0]["mixed_qkv"].flatten().tolist() == [0, 1, 2, 3, 10, 12, 13]  # nodes 0, 2, 3 were accepted
    assert torch.equal(written[2]["state"], temporal[1] + 2)
    assert drift_recorder.path_to(2, None) == [0, 1, 2]


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [["sampled-chain3*", "sampled-tree16*"], ["mixed-chain3-*", "mixed-tree16-extra_buffer*"], ["long-f32-tree16*"]], ids=lambda n: n[0]
)
def test_what_a_cpu_can_show(names):
    """The same scenarios as on a GPU, in float32 on CPU: sampling, thousands of requests with retractions, a long answer."""
    command = [sys.executable, str(ROOT / "tests" / "server" / "matrix"), "--device", "cpu", "--fresh", "--scenarios", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
