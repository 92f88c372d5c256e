"""The plan beside the real thing on CPU: SGLang's pools and this package's, SGLang's split of the budget, a log."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
from sglang.srt.model_executor import pool_configurator
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from treewy_sglang.demo.checkpoint import model_config
from treewy_sglang.planner import BUILT_IN, Draft, Server, from_config, load, plan
from treewy_sglang.planner.capacity import Sizes
from treewy_sglang.sglang import pool as pool_module
from treewy_sglang.sglang import sizing, startup

GIB = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEMO = from_config(model_config(), "demo")


def cache_params(model, tp=1, dtype="float32", state_dtype="float32", layers=None):
    shape = Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=model.value_heads * model.value_dim, n_groups=model.key_heads,
        num_heads=model.value_heads, head_dim=model.value_dim, state_size=model.key_dim, conv_kernel=model.conv_width,
    )  # fmt: skip
    return Mamba2CacheParams(
        shape=shape,
        layers=list(range(model.linear_layers if layers is None else layers)),
        dtype=Mamba2StateDType(conv=DTYPES[dtype], temporal=DTYPES[state_dtype]),
    )


def pool(cls, model, nodes, topk, rows, slots, **more):
    params = cache_params(model)
    return cls(
        size=slots, spec_state_size=rows, cache_params=params, mamba_layer_ids=params.layers, device="cpu",
        speculative_num_draft_tokens=nodes, speculative_eagle_topk=topk, **more,
    )  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    """SGLang writes device "cuda" out where it allocates what drafts need."""
    real = torch.zeros
    monkeypatch.setattr(
        memory_pool.torch,
        "zeros",
        lambda *a, **k: real(*a, **{**k, "device": "cpu" if k.get("device") == "cuda" else k.get("device")}),
    )
    monkeypatch.setattr(pool_module, "stash_rows", lambda n: n)


@pytest.mark.parametrize("nodes, topk", [(1, 1), (4, 1), (16, 4), (64, 8)])
def test_treewy_pool(on_cpu, nodes, topk):
    real = pool(pool_module.TreeWYMambaPool, DEMO, nodes, topk, rows=3, slots=5)
    p = plan(DEMO, Draft.make(nodes=nodes, topk=topk), Server(device="cpu", gpu_memory=2.0))
    assert p.fits["treewy"].total * 3 == real.stash.nbytes
    assert sum(p.slot.values()) * 6 == real.mamba_cache.mem_usage_bytes()
    for name, part in p.fits["treewy"].parts.items():
        assert part * 3 == getattr(real.stash, name).nbytes
    # What the server logs and reports as snapshot_bytes_per_request.
    assert p.fits["snapshot"].total == startup.snapshot_bytes_per_request(real, topk)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("nodes, topk", [(4, 1), (16, 4)])
def test_snapshot_pool(on_cpu, monkeypatch, device, nodes, topk):
    monkeypatch.setattr(memory_pool, "_is_cpu", device == "cpu")
    monkeypatch.setattr(memory_pool, "_cpu_has_amx_support", False)
    real = pool(memory_pool.MambaPool, DEMO, nodes, topk, rows=3, slots=5)
    parts = plan(DEMO, Draft.make(nodes=nodes, topk=topk), Server(device=device, gpu_memory=2.0)).fits["snapshot"].parts
    assert parts["states"] * 4 == real.mamba_cache.intermediate_ssm.nbytes  # rows and one of padding
    assert parts["conv windows"] * 4 == sum(t.untyped_storage().nbytes() for t in real._intermediate_conv_window_phys)


def test_replayssm_pool(on_cpu, monkeypatch):
    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    real = pool(memory_pool.MambaPool, DEMO, 4, 1, rows=3, slots=5, enable_linear_replayssm_spec=True).mamba_cache
    server = Server(gpu_memory=2.0)
    parts = plan(DEMO, Draft.make(nodes=4), server).fits["replayssm"].parts
    assert real.intermediate_ssm is None and real.replayssm_d is None
    names = {"raw v": "rawv", "raw k": "rawk", "beta": "beta", "gates": "g"}
    for part, name in names.items():
        assert parts[part] // server.slots_per_request * 6 == getattr(real, "replayssm_" + name).nbytes
    assert set(parts) == {*names, "conv windows"}


def sglangs_split(monkeypatch, model, params, server, draft, rest_gib, method, page_size=1, max_total_tokens=None):
    """SGLang's own _handle_max_mamba_cache: state slots, and the GiB that it leaves to the KV cache. KV cache per token is
    that of SGLang's own configurator for the model's attention layers and the draft's."""
    nodes = draft.nodes
    schedule = SimpleNamespace(
        max_running_requests=server.requests, max_mamba_cache_size=server.max_mamba_cache_size,
        mamba_full_memory_ratio=server.mamba_full_memory_ratio, disable_overlap_schedule=server.disable_overlap_schedule,
        page_size=page_size, max_total_tokens=max_total_tokens,
    )  # fmt: skip
    mamba = SimpleNamespace(
        enable_linear_replayssm_spec=method == "replayssm",
        linear_replayssm_cache_len=16,
        enable_treewy=method == "treewy",
    )
    context = SimpleNamespace(override=lambda _, **values: schedule.__dict__.update(values))
    getters = {
        "get_schedule": schedule, "get_memory": SimpleNamespace(disable_radix_cache=server.disable_radix_cache),
        "get_spec": SimpleNamespace(speculative_num_draft_tokens=nodes), "get_exec": SimpleNamespace(mamba=mamba),
        "get_context": context,
    }  # fmt: skip
    import sglang.srt.runtime_context as runtime_context

    for name, value in getters.items():
        for module in (kv_cache_configurator, runtime_context):
            monkeypatch.setattr(module, name, lambda value=value: value)
    monkeypatch.setattr(kv_cache_configurator, "kimi_linear_config", lambda _: None)
    monkeypatch.setattr(sizing, "stash_rows", lambda n: n)
    attention = list(range(model.attention_layers))
    mambaish = SimpleNamespace(mamba2_cache_params=params, full_attention_layer_ids=attention)
    monkeypatch.setattr(pool_configurator, "mambaish_config", lambda _: mambaish)
    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: SimpleNamespace(attn_tp_size=server.tp))
    algorithm = SpeculativeAlgorithm.from_string({"NEXTN": "EAGLE"}.get(server.algorithm, server.algorithm))
    configurator = SimpleNamespace(
        mambaish_config=mambaish, hybrid_gdn_config=object(),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Qwen3_5MoeForConditionalGeneration"]),
            context_len=server.context_length, head_dim=model.head_dim, v_head_dim=model.head_dim,
            get_num_kv_heads=lambda tp: max(1, model.kv_heads // tp),
        ),
        kv_cache_dtype=torch.bfloat16, kv_cache_dtype_str="auto", use_mla_backend=False, is_hybrid_swa=False,
        is_draft_worker=False, layer_info=SimpleNamespace(start_layer=0, end_layer=len(attention)),
        # SGLang counts the draft's layers only where --speculative-draft-model-path is given.
        spec_aux_config=SimpleNamespace(eagle_draft_num_layers=None),
        ps=SimpleNamespace(pp_size=1, attn_dp_size=1), spec_algorithm=algorithm,
        server_args=SimpleNamespace(
            max_speculative_num_draft_tokens=nodes, speculative_algorithm=algorithm.name, page_size=page_size,
            speculative_num_steps=draft.steps, max_total_tokens=max_total_tokens, enable_dsa_cache_layer_split=False,
            speculative_eagle_topk=10 if algorithm.is_ngram() else draft.topk,
            enable_mamba_extra_buffer=lambda: server.strategy.startswith("extra_buffer") and not server.disable_radix_cache,
            enable_mamba_extra_buffer_lazy=lambda: server.strategy == "extra_buffer_lazy",
        ),
    )  # fmt: skip
    cls = kv_cache_configurator.KVCacheConfigurator
    configurator._calculate_mamba_ratio = lambda: cls._calculate_mamba_ratio(configurator)
    assert configurator._calculate_mamba_ratio() == server.slots_per_request
    if method == "treewy":
        left = sizing.split_budget(configurator, rest_gib)
    else:
        left = cls._handle_max_mamba_cache(configurator, rest_gib)
    return schedule.max_mamba_cache_size, left


LONGEST = {"requests": 256, "context_length": 262144}  # tokens that these models are trained for


@pytest.mark.parametrize("method", ["snapshot", "replayssm", "treewy"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "no_buffer", "requests": 12},
        {"strategy": "extra_buffer_lazy", "mamba_full_memory_ratio": 3.0},
        {"max_mamba_cache_size": 40},
        {"disable_radix_cache": True, "requests": 30},
        {"requests": 256},
        {"requests": 700, "strategy": "no_buffer", "context_length": 1000, "algorithm": "NGRAM"},
        {"requests": 256, "mamba_full_memory_ratio": 0.91},
        LONGEST,
    ],
    ids=str,
)
@pytest.mark.parametrize("name, draft", [("35B", dict(nodes=4)), ("397B", dict(nodes=12)), ("35B", dict(steps=5, topk=8, nodes=16))])
def test_slots_and_tokens_are_those_of_sglang(monkeypatch, method, changes, name, draft):
    draft = Draft.make(**draft)
    tp = 8 if name == "397B" else 1
    server = Server(**{"gpu_memory": 140.0, "tp": tp, "strategy": "extra_buffer", "requests": 48, **changes})
    model = load(name)
    sizes = Sizes(model, server)
    fit = sizes.fit(method, draft)
    if method == "replayssm" and (draft.topk > 1 or server.algorithm == "NGRAM"):
        assert fit.reason == "chains only"
        return
    params = cache_params(model, tp, "bfloat16")
    assert params.mamba_cache_per_req == sizes.slot_bytes
    slots, left = sglangs_split(monkeypatch, model, params, server, draft, sizes.rest_bytes / GIB, method)
    assert fit.slots == slots
    # Where slots are raised: the default split, too many requests for it, and contexts short enough.
    raised = method == "treewy" and server.mamba_full_memory_ratio == 0.9 and server.requests > 200 and changes is not LONGEST
    assert (fit.raised_from is not None) == raised
    tokens = max(0, int(left * GIB)) // sizes.kv_bytes_per_token
    assert fit.tokens == pytest.approx(tokens, abs=1)


def test_the_default_split_is_sglangs():
    assert Server.mamba_full_memory_ratio == ServerArgs.mamba_full_memory_ratio


TIGHT = Server(gpu_memory=139.2, mem_fraction=0.66, tp=1, requests=256, strategy="extra_buffer")  # the H200 that was read


def tight_split(monkeypatch, server=TIGHT, **more):
    model, draft = load("35B"), Draft.make(nodes=4)
    rest = Sizes(model, server).rest_bytes / GIB
    slots, left = sglangs_split(monkeypatch, model, cache_params(model, 1, "bfloat16"), server, draft, rest, "treewy", **more)
    assert sizing.last_plan().slots == slots
    return sizing.last_plan(), left * GIB


def test_slots_are_raised_where_the_cache_could_not_be_filled(monkeypatch):
    plan, left = tight_split(monkeypatch)
    assert (plan.default_slots, plan.slots, plan.running, plan.snapshot_running) == (184, 310, 62, 20)
    token, context = 20480, 4096 + 2 * 4
    assert plan.context_tokens == context and left >= 62 * context * token
    assert plan.rest_bytes - plan.state_bytes == pytest.approx(left, abs=2)
    one_more = 5 * plan.slot_bytes + plan.row_bytes
    assert left - one_more < 63 * context * token
    assert "from 184 to 310, for 62 running requests instead of 36, because the KV cache keeps the 254448 tokens" in (
        sizing.raised_line(plan)
    )


def test_a_ratio_above_that_of_the_warning_raises_the_requests_and_one_below_does_not(monkeypatch):
    plan, _ = tight_split(monkeypatch)
    words = sizing.cap_warning(plan, plan.running)
    ratio = float(re.search("--mamba-full-memory-ratio above ([0-9.]+[0-9])", words)[1])
    above, _ = tight_split(monkeypatch, dataclasses.replace(TIGHT, mamba_full_memory_ratio=ratio * 1.2))
    below, _ = tight_split(monkeypatch, dataclasses.replace(TIGHT, mamba_full_memory_ratio=ratio / 1.2))
    assert below.running < plan.running < above.running


def test_a_shorter_context_is_a_way_out(monkeypatch):
    plan, _ = tight_split(monkeypatch)
    shorter, _ = tight_split(monkeypatch, dataclasses.replace(TIGHT, context_length=2048))
    assert "lower --context-length" in sizing.cap_warning(plan, plan.running) and shorter.running > plan.running


def test_contexts_take_whole_pages(monkeypatch):
    plan, left = tight_split(monkeypatch, page_size=512)
    assert plan.context_tokens == 4608  # 4104 in pages of 512
    assert plan.running == 60 and left >= 60 * 4608 * 20480


def test_a_limit_on_the_tokens_leaves_the_rest_to_states(monkeypatch):
    plan, left = tight_split(monkeypatch, max_total_tokens=100_000)
    assert plan.running > 62 and 100_000 * 20480 <= left < 100_000 * 20480 + 5 * plan.slot_bytes + plan.row_bytes
    words = sizing.cap_warning(plan, plan.running)
    assert "a KV cache of 100000 tokens" in words and "--max-total-tokens" in words and "--context-length" not in words
    assert "100000 tokens" in sizing.raised_line(plan)


@pytest.mark.parametrize("changes", [{"mamba_full_memory_ratio": 0.91}, {"max_mamba_cache_size": 150}, {"context_length": 262144}, {"requests": 30}], ids=str)
def test_slots_are_not_raised(monkeypatch, changes):
    """The split was fixed, contexts are long, or all that were asked for run anyway."""
    plan, _ = tight_split(monkeypatch, dataclasses.replace(TIGHT, **changes))
    assert plan.slots == plan.default_slots and sizing.raised_line(plan) is None
    assert plan.running < 40


def test_a_rank_without_a_kv_cache(monkeypatch):
    """SGLang then gives tokens for no memory at all."""
    pools = SimpleNamespace(calculate_pool_sizes=lambda memory, page: SimpleNamespace(max_total_num_tokens=2**63 - 1))
    monkeypatch.setattr(pool_configurator, "create_memory_pool_configurator", lambda _: pools)
    assert sizing.kv_bytes_per_token(None, 1) == 0


@pytest.mark.parametrize("cell, page", [(1, 1), (22528, 64), (262144, 1024), (3379, 16)])
def test_bytes_of_a_token_are_exact(monkeypatch, cell, page):
    pools = SimpleNamespace(
        calculate_pool_sizes=lambda memory, page: SimpleNamespace(max_total_num_tokens=memory // cell // page * page)
    )
    monkeypatch.setattr(pool_configurator, "create_memory_pool_configurator", lambda _: pools)
    assert sizing.kv_bytes_per_token(None, page) == cell


@pytest.mark.parametrize("name", BUILT_IN)
def test_state_slots_of_every_built_in_set(name):
    model = load(name)
    for tp in (1, 4):
        sizes = Sizes(model, Server(tp=tp, state_dtype="bfloat16"))
        assert cache_params(model, tp, "bfloat16", "bfloat16").mamba_cache_per_req == sizes.slot_bytes


def test_the_replayssm_ring_is_what_sglang_charges():
    model = load("35B")
    fit = Sizes(model, Server(tp=1)).fit("replayssm", Draft.make(nodes=4))
    assert fit.charged == 5 * cache_params(model, 1, "bfloat16").replayssm_ring_bytes_per_req(record_len=4)


# A start of the demo's server on CPU, commit f44fa1f: NEXTN tree, topk 4, 16 nodes.
LOG = (
    "TreeWY: draft state per request: snapshot=13172736 stash=345216 bytes (T=16, layers=3, rows=8)\n"
    "max_total_num_tokens=16384, max_running_requests=8"
)


def test_against_a_servers_log():
    snapshot, stash, nodes = map(int, re.search(r"snapshot=(\d+) stash=(\d+) bytes \(T=(\d+)", LOG).groups())
    fits = plan(DEMO, Draft.make(nodes=nodes, topk=4), Server(device="cpu", gpu_memory=2.0)).fits
    assert fits["snapshot"].total == pytest.approx(snapshot, rel=0.01)
    assert fits["treewy"].total == pytest.approx(stash, rel=0.01)
