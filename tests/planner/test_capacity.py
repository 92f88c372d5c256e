"""Bytes, requests and the widest draft: published figures, readings of a server on an H200, and what must hold always."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewy_sglang.planner import BUILT_IN, Draft, PlanError, Server, load, plan
from treewy_sglang.planner.capacity import MAX_NODES, METHODS, Sizes, proposed_tokens
from treewy_sglang.planner.report import as_dict

MIB, GIB = 1 << 20, 1 << 30
CHAIN3 = Draft.make(nodes=4)
BFLOAT16 = Server(state_dtype="bfloat16")


def test_published_figures_of_the_397b():
    d = as_dict(plan(load("397B-A17B"), CHAIN3, BFLOAT16))
    assert d["snapshot_bytes_per_node"] == 90 * MIB
    assert d["methods"]["snapshot"]["parts"]["states"] == 360 * MIB
    assert (
        as_dict(plan(load("397B"), Draft.make(nodes=14, topk=2), BFLOAT16))["methods"]["snapshot"]["parts"]["states"]
        == 1260 * MIB
    )
    tree = as_dict(plan(load("397B"), Draft.make(tree=[2, 2, 2]), BFLOAT16))
    assert tree["draft"] == {"nodes": 15, "drafts": 14, "topk": 2, "shape": "tree of [2, 2, 2]"}
    assert tree["snapshot_bytes_of_drafts"] == 1260 * MIB  # 1.23 GiB


def test_published_figure_of_the_35b():
    d = as_dict(plan(load("35B-A3B"), CHAIN3, BFLOAT16))
    assert d["methods"]["snapshot"]["parts"]["states"] == 120 * MIB


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_figures_are_of_all_gpus_together(tp):
    d = as_dict(plan(load("397B"), CHAIN3, dataclasses.replace(BFLOAT16, tp=tp)))
    assert d["snapshot_bytes_per_node"] == 90 * MIB
    one = as_dict(plan(load("397B"), CHAIN3, dataclasses.replace(BFLOAT16, tp=1)))
    for method in METHODS:
        whole = d["methods"][method]["draft_bytes_per_request"]
        assert whole == one["methods"][method]["draft_bytes_per_request"]
        assert d["methods"][method]["draft_bytes_per_request_per_gpu"] * tp == whole


def test_running_requests_that_an_h200_was_read_at():
    """A server with these dimensions, a chain of 3 drafts and --mem-fraction-static 0.66 logged 20 requests with
    snapshots and 36 with ReplaySSM."""
    server = Server(gpu_memory=139.2, mem_fraction=0.66, tp=1, requests=128)
    fits = plan(load("35B"), CHAIN3, server).fits
    assert (fits["snapshot"].max_running, fits["replayssm"].max_running) == (20, 36)


MEASURED = Path(__file__).resolve().parents[2] / "bench" / "results" / "serving-2026-12-01-h200-8b27d4a8a.jsonl"


@pytest.mark.parametrize("mode", ["snapshot", "replayssm", "treewy"])
def test_it_says_what_the_server_logged(mode):
    """Started on an H200 that logged 139.07 GB free before the weights were loaded."""
    rows = [r for r in map(json.loads, MEASURED.read_text().splitlines()) if r["mode"] == f"{mode}-chain4"]
    (logged,) = {(r["max_running_requests"], r["max_mamba_cache_size"], r["max_total_num_tokens"]) for r in rows}
    fit = plan(load("35B"), CHAIN3, Server(gpu_memory=139.07, mem_fraction=0.66, tp=1, requests=256)).fits[mode]
    assert fit.max_running == logged[0]
    assert fit.slots == pytest.approx(logged[1], rel=0.01)
    # What the KV cache gets is the rest: all that the estimate of the weights is off shows there, the more the smaller it is.
    assert fit.tokens == pytest.approx(logged[2], rel=0.025 if mode == "treewy" else 0.01)


def test_running_requests_of_treewy_in_the_same_memory():
    """By hand: M = 25602068502 bytes; a request takes 5 slots of 64389120, a row of 4446720 and 4104 tokens of 20480:
    410442240 bytes. M less the padding slot holds 62.22 of them."""
    server = Server(gpu_memory=139.2, mem_fraction=0.66, tp=1, requests=256)
    p = plan(load("35B"), CHAIN3, server)
    fit = p.fits["treewy"]
    assert p.rest_bytes == 25602068502
    assert (fit.raised_from, fit.slots, fit.running, fit.max_running, fit.limit) == (184, 310, 62, 62, "both")
    assert fit.tokens == (p.rest_bytes - 311 * 64389120 - 62 * 4446720) // 20480
    fixed = plan(load("35B"), CHAIN3, dataclasses.replace(server, mamba_full_memory_ratio=0.89)).fits["treewy"]
    assert (fixed.raised_from, fixed.running, fixed.limit) == (None, 36, "state")


@pytest.mark.parametrize(
    "draft, changes, tokens",
    [(dict(nodes=4), {}, 8), (dict(steps=5, topk=8, nodes=16), {}, 80), (dict(tree=[2, 2, 2]), {}, 30),
     (dict(nodes=4), {"algorithm": "NGRAM"}, 20), (dict(nodes=32), {"algorithm": "NGRAM"}, 64)],
)  # fmt: skip
def test_tokens_allocated_ahead(draft, changes, tokens):
    """SGLang's get_alloc_reserve_per_decode: twice the larger of nodes and steps times branches."""
    assert Sizes(load("35B"), Server(**changes)).reserve(Draft.make(**draft)) == tokens


def test_stash_of_a_node_is_what_the_documentation_says():
    """docs/server.md: HV*V*4 + H*K*a + D*a + (H + HV)*4 bytes a node and layer; 36 KiB for the 35B."""
    model = load("35B")
    h, hv, k, v, d, a = 16, 32, 128, 128, 8192, 2
    node = hv * v * 4 + h * k * a + d * a + (h + hv) * 4
    assert plan(model, Draft.make(nodes=7), Server(tp=1)).fits["treewy"].total == 30 * 7 * node
    assert node / 1024 == pytest.approx(36, abs=0.2)


def test_convolution_windows_overlap_for_chains_on_cuda_only():
    def windows(draft, **changes):
        parts = plan(load("35B"), draft, Server(tp=1, **changes)).fits["snapshot"].parts
        return parts["conv windows"] / (30 * 8192 * 2)

    tree = Draft.make(nodes=4, topk=2)
    assert (windows(CHAIN3), windows(tree), windows(CHAIN3, algorithm="NGRAM"), windows(CHAIN3, device="cpu")) == (
        6,
        12,
        12,
        12,
    )


def test_slots_per_request_are_sglangs():
    ratio = lambda **changes: Server(**changes).slots_per_request  # noqa: E731
    assert ratio() == ratio(strategy="extra_buffer") == 5
    assert ratio(strategy="extra_buffer", disable_overlap_schedule=True) == ratio(strategy="extra_buffer_lazy") == 4
    assert ratio(strategy="no_buffer") == ratio(device="cpu") == ratio(disable_overlap_schedule=True) == 3
    assert ratio(disable_radix_cache=True, strategy="extra_buffer") == 1


def test_weights_that_do_not_fit_are_a_plan_and_not_an_error():
    p = plan(load("397B"), CHAIN3, Server(tp=1))
    assert p.rest_bytes < 0
    assert {f.limit for f in p.fits.values()} == {"weights"} and not any(f.running for f in p.fits.values())
    assert plan(load("397B"), CHAIN3).tp == 16  # and without --tp, as many GPUs as it takes


def test_weights_measured_stand_in_for_the_estimate():
    p = plan(load("397B"), CHAIN3, Server(weights_gib=50.0))
    assert p.tp == 1 and p.weights_bytes == 50 * GIB and p.fits["treewy"].running > 0


def test_replayssm_takes_chains_only():
    for draft, server in ((Draft.make(nodes=4, topk=2), Server()), (CHAIN3, Server(algorithm="NGRAM"))):
        fit = plan(load("35B"), draft, server).fits["replayssm"]
        assert fit.reason == "chains only" and fit.running == 0 and fit.widest is None


def test_draft_shapes():
    assert [Draft.make(**a).nodes for a in (dict(nodes=9), dict(steps=3), dict(steps=3, topk=2), dict(tree=[3, 3, 3]), dict(tree=[1, 1]))] == [
        9, 4, 11, 40, 3]  # fmt: skip
    assert Draft.make(steps=3).topk == Draft.make(tree=[1, 1, 1]).topk == 1
    assert Draft.make(steps=2, topk=2, nodes=5).nodes == 5
    assert proposed_tokens(1, 4) == 4 and proposed_tokens(4, 4) == 52


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(), "--nodes is not given; allowed: --nodes, --tree, or --steps"),
        (dict(nodes=0), "--nodes is 0; allowed: an integer from 1 to 128"),
        (dict(nodes=129), "--nodes is 129; allowed: an integer from 1 to 128"),
        (dict(nodes=4, topk=0), "--topk is 0; allowed: an integer from 1"),
        (dict(steps=0), "--steps is 0; allowed: an integer from 1"),
        (dict(steps=200), "is 201; allowed: an integer from 2 to 128"),
        (dict(steps=3, nodes=9), "--nodes is 9; allowed: 4, which a chain of --steps 3 has"),
        (dict(steps=2, topk=2, nodes=9), "--nodes is 9; allowed: up to 7"),
        (dict(tree=[2, 0]), "--tree is 0; allowed: an integer from 1"),
        (dict(tree=[]), "--tree is []; allowed"),
        (dict(tree=[5, 5, 5]), "the nodes of --tree 5,5,5 is 156; allowed: an integer from 1 to 128"),
        (dict(tree=[2], nodes=3), "--nodes is 3 beside --tree"),
    ],
)
def test_a_bad_draft_is_named(arguments, words):
    with pytest.raises(PlanError) as refused:
        Draft.make(**arguments)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(gpu_memory=0.0), "--gpu-memory is 0.0; allowed: a number above 0"),
        (dict(gpu_memory=float("nan")), "--gpu-memory is nan; allowed"),
        (dict(mem_fraction=1.0), "--mem-fraction is 1.0; allowed: a number above 0 and below 1"),
        (dict(tp=3), "--tp is 3; allowed: 1, 2, 4, 8, 16, which divide 16 key heads"),
        (dict(tp=0), "--tp is 0; allowed: an integer from 1"),
        (dict(requests=0), "--requests is 0; allowed"),
        (dict(context_length=0), "--context-length is 0; allowed"),
        (dict(mamba_full_memory_ratio=-1.0), "--mamba-full-memory-ratio is -1.0; allowed"),
        (dict(max_mamba_cache_size=0), "--max-mamba-cache-size is 0; allowed"),
        (dict(weights_gib=-1.0), "--weights-gib is -1.0; allowed"),
        (dict(dtype="fp8"), "--dtype is 'fp8'; allowed: auto, float32"),
        (dict(state_dtype="int8"), "--state-dtype is 'int8'; allowed: auto, float32"),
        (dict(kv_dtype="fp4"), "--kv-dtype is 'fp4'; allowed: auto, bfloat16"),
        (dict(weights_dtype="int3"), "--weights-dtype is 'int3'; allowed: auto, float32"),
        (dict(strategy="lazy"), "--mamba-radix-cache-strategy is 'lazy'; allowed: auto, no_buffer"),
        (dict(strategy="extra_buffer_lazy", disable_overlap_schedule=True), "--mamba-radix-cache-strategy is"),
        (dict(algorithm="EAGLE3"), "--algorithm is 'EAGLE3'; allowed: NEXTN, NGRAM"),
        (dict(device="tpu"), "--device is 'tpu'; allowed: cuda, cpu"),
    ],
)
def test_a_bad_server_is_named(changes, words):
    with pytest.raises(PlanError) as refused:
        plan(load("35B"), CHAIN3, Server(**changes))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(key_dim=96, value_dim=96), "K=96, V=96; allowed: equal, one of 64, 128, 256"),
        (dict(key_dim=64), "K=64, V=128; allowed"),
        (dict(value_heads=24), "linear_num_value_heads is 24; allowed: a multiple of 16"),
        (dict(conv_width=5), "linear_conv_kernel_dim is 5; allowed: 2, 3, 4"),
        (dict(linear_layers=0), "Gated DeltaNet layers are 0; allowed"),
        (dict(mtp_layers=0), "no MTP layers; allowed: NGRAM"),
        (dict(weights_dtype="unknown"), "--weights-dtype is auto"),
    ],
)
def test_a_model_that_the_server_refuses_is_refused(changes, words):
    with pytest.raises(PlanError) as refused:
        plan(dataclasses.replace(load("35B"), **changes), CHAIN3, Server())
    assert words in str(refused.value)


servers = st.builds(
    Server,
    gpu_memory=st.floats(30, 200),
    mem_fraction=st.floats(0.5, 0.95),
    tp=st.sampled_from([1, 2, 4, 8]),
    state_dtype=st.sampled_from(["float32", "bfloat16"]),
    context_length=st.sampled_from([512, 4096, 32768]),
    requests=st.sampled_from([8, 48, 256, 2048]),
    strategy=st.sampled_from(["no_buffer", "extra_buffer"]),
    mamba_full_memory_ratio=st.just(Server.mamba_full_memory_ratio) | st.floats(0.2, 4),
    disable_radix_cache=st.booleans(),
    max_mamba_cache_size=st.sampled_from([None, None, 64, 700]),
)
models = st.sampled_from(list(BUILT_IN.values()))


@settings(max_examples=60, deadline=None)
@given(models, servers, st.integers(1, MAX_NODES - 1), st.sampled_from([1, 4]))
def test_a_wider_draft_never_costs_less(model, server, nodes, topk):
    sizes = Sizes(model, server)
    narrow, wide = (Draft.make(nodes=n, topk=topk) for n in (nodes, nodes + 1))
    for method in METHODS:
        a, b = sizes.fit(method, narrow), sizes.fit(method, wide)
        if a.reason is None:
            assert a.total < b.total and a.charged < b.charged
            assert a.slots >= b.slots
            assert all(a.parts[part] < b.parts[part] for part in a.parts)
    if nodes > 1:
        treewy, snapshot = sizes.fit("treewy", narrow), sizes.fit("snapshot", narrow)
        assert treewy.total < snapshot.total and treewy.slots >= snapshot.slots


@settings(max_examples=60, deadline=None)
@given(models, servers, st.integers(1, MAX_NODES), st.floats(1, 100))
def test_more_memory_never_buys_fewer_slots(model, server, nodes, more):
    draft = Draft.make(nodes=nodes)
    larger = dataclasses.replace(server, gpu_memory=server.gpu_memory + more)
    for method in METHODS:
        assert Sizes(model, larger).fit(method, draft).slots >= Sizes(model, server).fit(method, draft).slots


@settings(max_examples=60, deadline=None)
@given(models, servers, st.integers(1, MAX_NODES))
def test_what_is_planned_fits(model, server, nodes):
    """Slots, rows of the running requests and the tokens that they hold stay inside the memory that is left."""
    sizes = Sizes(model, server)
    for method in METHODS:
        fit = sizes.fit(method, Draft.make(nodes=nodes))
        assert 0 <= fit.running <= fit.max_running <= server.requests
        if fit.running:
            assert fit.running <= fit.slots // server.slots_per_request
            assert fit.running * server.context_length <= fit.tokens
            used = (
                (fit.slots + 1) * sizes.slot_bytes + fit.running * fit.charged + fit.tokens * sizes.kv_bytes_per_token
            )
            assert used <= sizes.rest_bytes


@settings(max_examples=60, deadline=None)
@given(models, servers, st.integers(1, MAX_NODES))
def test_slots_are_raised_only_for_requests_that_run_at_full_length(model, server, nodes):
    # Where the rule may apply at all, beside weights that fit.
    server = dataclasses.replace(
        server, mamba_full_memory_ratio=0.9, weights_gib=10.0, disable_radix_cache=False, max_mamba_cache_size=None
    )
    draft = Draft.make(nodes=nodes)
    fit = Sizes(model, server).fit("treewy", draft)
    fixed = Sizes(model, dataclasses.replace(server, mamba_full_memory_ratio=0.9 + 1e-12)).fit("treewy", draft)
    assert fixed.raised_from is None and abs(fixed.slots - (fit.slots if fit.raised_from is None else fit.raised_from)) <= 1
    assert fit.running >= fixed.running
    if fit.raised_from is not None:
        assert fit.slots > fit.raised_from and fit.limit in ("both", "requests")
        assert fit.running == fit.slots // server.slots_per_request > fit.raised_from // server.slots_per_request


@settings(max_examples=25, deadline=None)
@given(models, servers, st.sampled_from([1, 4]))
def test_the_widest_draft_is_the_widest(model, server, topk):
    sizes, draft = Sizes(model, server), Draft.make(nodes=4, topk=topk)
    for method in METHODS:
        widest, free = sizes.widest(method, draft), sizes.fit(method, draft, free=True).running
        if widest is None:
            assert free == 0 or sizes.unserved(method, draft)
            continue
        running = {n: sizes.fit(method, draft.with_nodes(n)).running for n in range(1, MAX_NODES + 1)}
        assert all(running[n] >= free for n in range(1, widest + 1))
        assert widest == MAX_NODES or running[widest + 1] < free, (method, widest, free)
