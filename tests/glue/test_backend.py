"""Pool and backend through the seams' own entry points, without a server, on CPU and where there is one on a GPU: eager
and CUDA-graph metadata, padding rows, tree and chain, track slots. Truth is the same backend fed the accepted path one
token at a time."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treewy_sglang.sglang import pool as pool_module
from treewy_sglang.sglang import status
from treewy_sglang.sglang.backend import TreeWYGDNAttnBackend, TreeWYHybridLinearAttnBackend

LAYERS, H, HV, DIM, WIDTH = (2, 5), 2, 4, 64, 4
CHANNELS = 2 * H * DIM + HV * DIM
SLOTS = 9


def cache_params(dtype=torch.float32, layers=LAYERS):
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=HV * DIM,
        n_groups=H,
        num_heads=HV,
        head_dim=DIM,
        state_size=DIM,
        conv_kernel=WIDTH,
    )
    return Mamba2CacheParams(
        shape=shape, layers=list(layers), dtype=Mamba2StateDType(conv=dtype, temporal=torch.float32)
    )


def cuda_is_built():
    from treewy_sglang import build_info

    return torch.cuda.is_available() and build_info()["cuda"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not cuda_is_built(), reason="no CUDA"))])
def device(request):
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def make_pool(monkeypatch, device):
    def make(nodes=7, rows=4, dtype=torch.float32, cls=pool_module.TreeWYMambaPool, **kwargs):
        monkeypatch.setattr(pool_module, "stash_rows", lambda n: n + 1)
        return cls(
            size=SLOTS,
            spec_state_size=rows,
            cache_params=cache_params(dtype),
            mamba_layer_ids=list(LAYERS),
            device=device,
            speculative_num_draft_tokens=nodes,
            **kwargs,
        )

    return make


def test_pool_holds_the_stash_and_no_snapshots(make_pool):
    pool = make_pool(speculative_eagle_topk=4)
    assert type(pool.mamba_cache) is pool.State  # no field for snapshots at all
    assert pool.stash.u.shape == (len(LAYERS), 5, HV, 7, DIM)
    assert pool.stash.conv.shape == (len(LAYERS), 5, 7, CHANNELS)
    assert len(pool.stash_layers) == len(LAYERS)
    state_bytes = pool.mamba_cache.mem_usage_bytes()
    assert pool.mem_usage * 2**30 == pytest.approx(state_bytes + pool.stash.nbytes)
    assert pool.get_kv_size_bytes() == state_bytes  # what is offloaded or transferred
    with pytest.raises(RuntimeError, match="--enable-treewy"):
        pool.get_speculative_mamba2_params_all_layers()


def test_every_other_reader_of_the_pool_still_works(make_pool):
    pool = make_pool()
    for tensor in (pool.mamba_cache.conv[0], pool.mamba_cache.temporal):
        tensor.normal_()
    layer = pool.mamba2_layer_cache(1)
    assert torch.equal(layer.temporal, pool.mamba_cache.temporal[1])
    copy = pool.get_cpu_copy(torch.tensor([3]))
    pool.copy_from(torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(pool.mamba_cache.temporal[:, 3], pool.mamba_cache.temporal[:, 1])
    pool.load_cpu_copy(copy, torch.tensor([3]))
    assert not torch.equal(pool.mamba_cache.temporal[:, 3], pool.mamba_cache.temporal[:, 1])
    pool.clear_slots(torch.tensor([3]))
    assert pool.mamba_cache.temporal[:, 3].abs().sum() == 0 and pool.mamba_cache.conv[0][:, 3].abs().sum() == 0
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    assert len(pointers) == len(lengths) == len(items) == 2 * len(LAYERS)
    assert len(pool.get_state_dim_per_tensor()) == len(pool.get_state_layer_ids()) == 2 * len(LAYERS)


def test_draft_heads_get_no_stash(make_pool):
    assert make_pool(nodes=None).stash is None


def test_padded_batches_get_rows(make_pool):
    assert make_pool(rows=5).stash.u.shape[1] == 6


class RequestPool:
    """The four calls that the backend makes."""

    def __init__(self, mamba_pool, slots):
        self.mamba_pool, self.slots, self.size = mamba_pool, torch.tensor(slots, dtype=torch.int32), len(slots)

    def mamba2_layer_index(self, layer_id):
        return LAYERS.index(layer_id)

    def get_mamba_indices(self, requests):
        return self.slots[requests]

    def translate_mamba_indices(self, indices):
        return indices


def make_backend(mamba_pool, slots, topk):
    backend = TreeWYGDNAttnBackend.__new__(TreeWYGDNAttnBackend)
    vars(backend).update(
        pad_slot_id=-1,
        device=mamba_pool.device,
        topk=topk,
        req_to_token_pool=RequestPool(mamba_pool, slots),
        _fused_state_indices_ok=False,
        forward_metadata=None,
        mamba_track_indices_buf=None,
        replayssm_write_pos_list=None,
        state_indices_list=[],
        query_start_loc_list=[],
        retrieve_next_token_list=[],
        retrieve_next_sibling_list=[],
        retrieve_parent_token_list=[],
        kernel_dispatcher=SimpleNamespace(extend_uses_state_checkpoints=False),
        _nodes=0,
    )
    hybrid = TreeWYHybridLinearAttnBackend.__new__(TreeWYHybridLinearAttnBackend)
    hybrid.linear_attn_backend = backend
    return backend, hybrid


def links(parents):
    """SGLang's first-child / next-sibling links of parent lists."""
    count, nodes = len(parents), len(parents[0])
    next_token, next_sibling = torch.full((2, count, nodes), -1, dtype=torch.int64)
    for row, tree in enumerate(parents):
        for parent in range(nodes):
            children = [t for t in range(nodes) if tree[t] == parent]
            if children:
                next_token[row, parent] = children[0]
            for older, younger in zip(children, children[1:]):
                next_sibling[row, older] = younger
    return next_token, next_sibling


def batch(rows, nodes, trees=None, real=None):
    next_token, next_sibling = (None, None) if trees is None else links(trees)
    spec_info = SimpleNamespace(
        draft_token_num=nodes,
        ragged_verify_layout=None,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
    )
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=rows,
        req_pool_indices=torch.arange(rows),
        spec_info=spec_info,
        input_ids=torch.zeros(rows * nodes, dtype=torch.int64),
        seq_lens_cpu=torch.full((rows,), 20, device="cpu"),
        num_padding=rows - (rows if real is None else real),
        mamba_track_mask=None,
        mamba_track_indices=None,
        _original_batch_size=real,
    )


def drawing(seed):
    """The same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def make_layers(dtype=torch.float32):
    draw = drawing(3)
    return [
        SimpleNamespace(
            layer_id=layer_id,
            num_v_heads=HV,
            head_v_dim=DIM,
            conv_weights=(draw(CHANNELS, WIDTH) * 0.5).to(dtype),
            bias=None,
            activation="silu",
            A_log=draw(HV),
            dt_bias=draw(HV),
        )
        for layer_id in LAYERS
    ]


def draw_inputs(rows, nodes, seed=5):
    draw = drawing(seed)
    return [tuple(draw(rows * nodes, width) for width in (CHANNELS, HV, HV)) for _ in LAYERS]


def run_layers(backend, layers, forward_batch, inputs):
    return [
        backend.forward_extend(
            layer=layer, forward_batch=forward_batch, mixed_qkv=x, a=a, b=b, q=None, k=None, v=None, save_kv_cache=True
        )
        for layer, (x, a, b) in zip(layers, inputs)
    ]


def seed_states(pool, seed=11):
    draw = drawing(seed)
    for tensor in (pool.mamba_cache.conv[0], pool.mamba_cache.temporal):
        tensor.copy_(draw(*tensor.shape) * 0.3)


def states(pool):
    return pool.mamba_cache.temporal.clone(), pool.mamba_cache.conv[0].clone()


def path(tree, node):
    nodes = []
    while node != -1:
        nodes.append(node)
        node = tree[node]
    return nodes[::-1]


def one_by_one(make_pool, slots, row, tokens, nodes, inputs, layers):
    """Outputs and states of request `row` after its tokens ran as drafts of one node each."""
    pool = make_pool(nodes=1, rows=1)
    seed_states(pool)
    backend, hybrid = make_backend(pool, [slots[row]], topk=1)
    outputs = []
    for token in tokens:
        forward_batch = batch(1, 1)
        backend.init_forward_metadata(forward_batch)
        at = slice(row * nodes + token, row * nodes + token + 1)
        outputs.append(
            run_layers(backend, layers, forward_batch, [tuple(x[at] for x in layer) for layer in inputs])
        )
        hybrid.update_mamba_state_after_mtp_verify(torch.tensor([0]), None, None, None)
    return outputs, states(pool)


TREES = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0, 0]]
ACCEPTED = [6, 2, 4]
SLOT_OF = [4, 7, 1]


def close(value, truth):
    assert value.shape == truth.shape
    assert torch.allclose(value, truth, rtol=2e-5, atol=2e-5), (value - truth).abs().max()


def check_against_one_by_one(make_pool, pool, slots, trees, accepted, inputs, layers, outputs, nodes):
    temporal, conv = states(pool)
    for row, tree in enumerate(trees):
        tokens = path(tree, accepted[row])
        truth, (true_temporal, true_conv) = one_by_one(make_pool, slots, row, tokens, nodes, inputs, layers)
        for token, expected in zip(tokens, truth):
            for layer in range(len(LAYERS)):
                close(outputs[layer][0, row * nodes + token], expected[layer][0, 0])
        close(temporal[:, slots[row]], true_temporal[:, slots[row]])
        assert torch.equal(conv[:, slots[row]], true_conv[:, slots[row]])


def untouched(pool, before, slots):
    others = [s for s in range(SLOTS + 1) if s not in slots]
    for now, then in zip(states(pool), before):
        assert torch.equal(now[:, others], then[:, others])


@pytest.mark.parametrize("padding", [0, 1])
def test_eager_tree(make_pool, padding):
    nodes, rows = 7, len(TREES) + padding
    pool, layers, inputs = make_pool(nodes), make_layers(), draw_inputs(rows, nodes)
    seed_states(pool)
    before = states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF + [0] * padding, topk=4)
    forward_batch = batch(rows, nodes, TREES, real=len(TREES) if padding else None)
    backend.init_forward_metadata(forward_batch)
    assert backend.forward_metadata.retrieve_parent_token[: len(TREES)].tolist() == TREES
    outputs = run_layers(backend, layers, forward_batch, inputs)
    assert outputs[0].shape == (1, rows * nodes, HV, DIM)
    if padding:
        assert outputs[0][:, len(TREES) * nodes :].abs().sum() == 0
    for now, then in zip(states(pool), before):
        assert torch.equal(now, then), "verify must not write states"
    hybrid.update_mamba_state_after_mtp_verify(torch.tensor(ACCEPTED), None, None, None)
    check_against_one_by_one(make_pool, pool, SLOT_OF, TREES, ACCEPTED, inputs, layers, outputs, nodes)
    untouched(pool, before, SLOT_OF)


def test_eager_chain_without_links(make_pool):
    nodes, trees = 4, [[-1, 0, 1, 2]] * 3
    pool, layers, inputs = make_pool(nodes), make_layers(), draw_inputs(3, nodes)
    seed_states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF, topk=1)
    forward_batch = batch(3, nodes)
    backend.init_forward_metadata(forward_batch)
    assert backend.forward_metadata.retrieve_parent_token is None
    outputs = run_layers(backend, layers, forward_batch, inputs)
    hybrid.update_mamba_state_after_mtp_verify(torch.tensor([0, 3, 1]), None, None, None)
    check_against_one_by_one(make_pool, pool, SLOT_OF, trees, [0, 3, 1], inputs, layers, outputs, nodes)


def test_chain_shorter_than_the_stash(make_pool):
    """Adaptive speculation: the stash has room for the longest draft."""
    nodes, trees = 3, [[-1, 0, 1]] * 2
    pool, layers, inputs = make_pool(nodes=7), make_layers(), draw_inputs(2, nodes)
    seed_states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF[:2], topk=1)
    forward_batch = batch(2, nodes)
    backend.init_forward_metadata(forward_batch)
    outputs = run_layers(backend, layers, forward_batch, inputs)
    verified = status.report()["nodes_verified"]
    hybrid.update_mamba_state_after_mtp_verify(torch.tensor([2, 1]), None, None, None)
    assert status.report()["nodes_verified"] == verified + 2 * nodes
    check_against_one_by_one(make_pool, pool, SLOT_OF[:2], trees, [2, 1], inputs, layers, outputs, nodes)


def test_track_slots_get_the_state_of_their_node(make_pool):
    nodes = 7
    pool, layers, inputs = make_pool(nodes), make_layers(), draw_inputs(3, nodes)
    seed_states(pool)
    before = states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF, topk=4)
    forward_batch = batch(3, nodes, TREES)
    backend.init_forward_metadata(forward_batch)
    run_layers(backend, layers, forward_batch, inputs)
    track_slots, track_nodes = torch.tensor([8, 9, 2]), torch.tensor([1, -1, 4])
    hybrid.update_mamba_state_after_mtp_verify(torch.tensor(ACCEPTED), track_slots, track_nodes, None)
    temporal, conv = states(pool)
    for row, slot, node in ((0, 8, 1), (2, 2, 4)):
        _, (true_temporal, true_conv) = one_by_one(
            make_pool, SLOT_OF, row, path(TREES[row], node), nodes, inputs, layers
        )
        close(temporal[:, slot], true_temporal[:, SLOT_OF[row]])
        assert torch.equal(conv[:, slot], true_conv[:, SLOT_OF[row]])
    untouched(pool, before, SLOT_OF + [8, 2])


@pytest.mark.parametrize("trees_drafted", [True, False])
def test_graph_replayed_with_other_batches(make_pool, device, trees_drafted):
    """Capture with dummy links, then two replays of the same bucket, the second smaller: parents are read from buffers,
    rows beyond the batch write nothing, and nothing is counted as an error. On CPU the captured region runs again."""
    from treewy_sglang import check_errors

    nodes, bucket = 7, 3
    drafts = TREES if trees_drafted else [[-1, 0, 1, 2, 3, 4, 5]] * 3
    pool, layers = make_pool(nodes), make_layers()
    seed_states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF, topk=4 if trees_drafted else 1)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * nodes)
    inputs = draw_inputs(bucket, nodes)  # static, as the server's are
    captured = batch(bucket, nodes)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)

    def region():
        backend.init_forward_metadata_in_graph(captured)
        return run_layers(backend, layers, captured, inputs)

    outputs = region()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = region()
    parents = backend.forward_metadata.retrieve_parent_token
    assert (parents is not None) == trees_drafted

    for trees, seed in ((drafts, 21), (drafts[1:], 22)):
        seed_states(pool)
        before = states(pool)
        slots = SLOT_OF[: len(trees)]
        view = batch(bucket, nodes, trees if trees_drafted else None, real=len(trees))
        backend.init_forward_metadata_out_graph(view)
        # What the plan stream's late copy does, after which only the captured region runs.
        if trees_drafted:
            for buffers in (backend.retrieve_next_token_list, backend.retrieve_next_sibling_list):
                buffers[bucket - 1][: len(trees)].fill_(-1)
            late = SimpleNamespace(**vars(view.spec_info))
            monkey = pytest.MonkeyPatch()
            monkey.setattr(
                "sglang.srt.layers.attention.hybrid_linear_attn_backend.EagleVerifyInput", SimpleNamespace
            )
            backend.update_verify_buffers_to_fill_after_draft(late, bucket)
            monkey.undo()
        for layer, fresh in zip(inputs, draw_inputs(bucket, nodes, seed)):
            for static, value in zip(layer, fresh):
                static.copy_(value)
        if device == "cuda":
            graph.replay()
        else:
            outputs = region()
        assert backend.forward_metadata.retrieve_parent_token is parents, "captured by address"
        if trees_drafted:
            assert parents[: len(trees)].tolist() == trees
        assert all(out[:, len(trees) * nodes :].abs().sum() == 0 for out in outputs)
        accepted = ACCEPTED[: len(trees)]
        hybrid.update_mamba_state_after_mtp_verify(torch.tensor(accepted), None, None, None)
        check_against_one_by_one(make_pool, pool, slots, trees, accepted, inputs, layers, outputs, nodes)
        untouched(pool, before, slots)
    assert not any(check_errors().values())


def test_unreachable_nodes_are_harmless(make_pool):
    """NGRAM pads short drafts with nodes that no link reaches."""
    nodes, tree = 7, [[-1, 0, 1, -1, -1, -1, -1]]
    pool, layers, inputs = make_pool(nodes), make_layers(), draw_inputs(1, nodes)
    seed_states(pool)
    backend, hybrid = make_backend(pool, SLOT_OF[:1], topk=2)
    forward_batch = batch(1, nodes, tree)
    backend.init_forward_metadata(forward_batch)
    outputs = run_layers(backend, layers, forward_batch, inputs)
    assert torch.isfinite(outputs[0]).all()
    hybrid.update_mamba_state_after_mtp_verify(torch.tensor([2]), None, None, None)
    check_against_one_by_one(make_pool, pool, SLOT_OF, tree, [2], inputs, layers, outputs, nodes)


def test_forward_batches_without_links_are_chains(make_pool):
    """A warm-up forward of a tree server has no links."""
    pool, layers = make_pool(7), make_layers()
    backend, _ = make_backend(pool, SLOT_OF, topk=4)
    forward_batch = batch(2, 7)
    backend.init_forward_metadata(forward_batch)
    outputs = run_layers(backend, layers, forward_batch, draw_inputs(2, 7))
    assert torch.isfinite(outputs[0]).all()
