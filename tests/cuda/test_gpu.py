"""What only a GPU can show: graph capture, streams, no hidden synchronisation, 64-bit addressing, every node count.

The operators' results in general are tested by tests/ops, which runs on both devices (--device cuda).
"""

import dataclasses

import pytest
import torch

from treewy_sglang import Stash, check_errors, errors, ops, reference, tree
from treewy_sglang.testing import assert_same_bits, assert_within_yardstick, make_inputs

F32, BF16 = torch.float32, torch.bfloat16


def buffers(x, conv, layers=1):
    stash = x.stash(layers=layers, conv=conv)
    return stash, x.out()


def step(x, stash, out, conv, track=None):
    """Verify of every layer, then one commit, into copies of the pools that the caller owns."""
    for i in range(x.pool.shape[0]):
        if conv:
            ops.tree_conv_verify(*x.conv_args(i), out, stash.layer(i))
        else:
            ops.tree_verify(*dataclasses.replace(x, pool=x.pool[i:]).args(), out, stash.layer(i))
    ops.commit(stash, x.parents, x.accepted, x.state_indices, x.pool, x.conv_pool if conv else None, *(track or ()))


def fresh(x):
    """The same inputs with pools of their own: a step writes them."""
    copy = lambda t: None if t is None else torch.as_strided(t, t.shape, t.stride(), t.storage_offset()).clone()
    return dataclasses.replace(x, pool=copy(x.pool), conv_pool=copy(x.conv_pool))


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
@pytest.mark.parametrize("T", [4, 17, 64])
def test_a_captured_step_replays_with_new_inputs(gpu, T, conv):
    x = fresh(make_inputs(N=5, T=T, conv=conv, padding=(2,), device=gpu))
    y = fresh(make_inputs(N=5, T=T, conv=conv, padding=(0, 4), seed=1, device=gpu))
    stash, out = buffers(x, conv)
    errors.counter(gpu)  # exists before the capture
    start = fresh(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, stash, out, conv)
    assert_same_bits(x.pool, start.pool, name="pool after a capture, which runs nothing")
    for inputs in (start, y, start):
        eager = fresh(inputs)
        eager_stash, eager_out = buffers(eager, conv)
        step(eager, eager_stash, eager_out, conv)
        for f in dataclasses.fields(x):
            mine, theirs = getattr(x, f.name), getattr(inputs, f.name)
            if isinstance(mine, torch.Tensor):
                mine.copy_(theirs)
        graph.replay()
        assert_same_bits(out.contiguous(), eager_out.contiguous(), name="out of a replay")
        assert_same_bits(x.pool.contiguous(), eager.pool.contiguous(), name="state pool after a replay")
        if conv:
            assert_same_bits(x.conv_pool.contiguous(), eager.conv_pool.contiguous(), name="conv pool after a replay")


def test_a_replay_counts_its_errors(gpu):
    x = fresh(make_inputs(N=4, T=6, device=gpu))
    stash, out = buffers(x, False)
    x.state_indices[1] = 10_000
    check_errors(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, stash, out, False)
    assert not any(check_errors(gpu).values())
    for _ in range(3):
        graph.replay()
    counted = check_errors(gpu)
    assert counted["state_index"] == 6 and sum(counted.values()) == 6  # verify and commit, three times


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_nothing_waits_for_the_gpu(gpu, conv):
    x = fresh(make_inputs(N=3, T=9, conv=conv, device=gpu))
    stash, out = buffers(x, conv)
    child, sibling = (t.to(gpu) for t in map(torch.as_tensor, _links(x)))
    parents = torch.empty_like(x.parents)
    step(x, stash, out, conv)
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # a tenth of a second of work queued before the operators
        step(x, stash, out, conv)
        ops.parents_from_links(child, sibling, parents)
        end.record()
        assert not end.query(), "an operator waited for the work queued before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def _links(x):
    rows = [tree.links_from_parents(t) for t in x.trees]
    return [r[0] for r in rows], [r[1] for r in rows]


def test_operators_run_on_the_current_stream(gpu):
    x = fresh(make_inputs(N=3, T=9, device=gpu))
    y = fresh(x)
    stash, out = buffers(x, False)
    step(x, stash, out, False)
    want, pool = out.clone(), x.pool.clone()
    stash, out = buffers(y, False)
    v = y.v.clone()
    y.v.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        y.v.copy_(v)  # on any other stream the operators would still see zeros
        step(y, stash, out, False)
    side.synchronize()
    assert_same_bits(out.contiguous(), want.contiguous(), name="out on a side stream")
    assert_same_bits(y.pool.contiguous(), pool.contiguous(), name="pool on a side stream")


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_pools_beyond_two_to_the_31_elements(gpu, conv):
    """Slots, layers and conv rows whose offsets do not fit 32 bits."""
    K, H, HV, T, N, slots, layers = 64, 1, 2, 5, 3, 150_000, 2
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.fail("this test needs 12 GB of GPU memory")
    x = make_inputs(N=N, T=T, H=H, HV=HV, K=K, conv=conv, state=BF16, device=gpu)
    D = 2 * H * K + HV * K
    pool = torch.zeros((layers, slots, HV, K, K), dtype=BF16, device=gpu)
    assert pool.numel() > 2**31
    conv_pool = None
    if conv:
        conv_pool = torch.zeros((layers, slots, D, 3), dtype=x.mixed_qkv.dtype, device=gpu)
    far = torch.tensor([slots - 1, slots - 77, 3], device=gpu)
    near = x.state_indices.clone()
    small = dataclasses.replace(
        x,
        pool=x.pool.expand(layers, *x.pool.shape[1:]).clone(),
        conv_pool=x.conv_pool.expand(layers, *x.conv_pool.shape[1:]).clone() if conv else None,
    )
    pool[:, far] = small.pool[:, near]
    if conv:
        conv_pool[:, far] = small.conv_pool[:, near]
    big = dataclasses.replace(x, pool=pool, conv_pool=conv_pool, state_indices=far)
    results = []
    for inputs in (small, big):
        stash, out = buffers(inputs, conv, layers)
        step(inputs, stash, out, conv)
        results.append((out.contiguous(), inputs.pool[:, inputs.state_indices].contiguous()))
        if conv:
            results[-1] += (inputs.conv_pool[:, inputs.state_indices].contiguous(),)
    for name, want, got in zip(("out", "state", "conv state"), *results):
        assert_same_bits(got, want, name=f"{name} in far slots")
    assert int(pool.any(dim=-1).any(dim=-1).any(dim=-1).sum()) == layers * N, "a slot outside the batch was written"


def test_a_stash_beyond_two_to_the_31_elements(gpu):
    """128 nodes, many rows: u of one layer passes 2^31 elements, so row offsets need 64 bits."""
    N, T, H, HV, K = 16500, 128, 1, 8, 128
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.fail("this test needs 40 GB of GPU memory")
    generator = torch.Generator(device=gpu).manual_seed(0)
    normal = lambda *size: torch.randn(size, generator=generator, device=gpu, dtype=BF16)
    q, k, v = normal(N * T, H, K), normal(N * T, H, K), normal(N * T, HV, K)
    a, b = normal(N * T, HV), normal(N * T, HV)
    A_log, dt_bias = torch.zeros(HV, device=gpu), torch.full((HV,), -3.0, device=gpu)
    state = torch.randn((4, HV, K, K), generator=generator, device=gpu)
    parents = tree.tensor([tree.chain(T)], gpu)
    stash = Stash.allocate(layers=1, rows=N, nodes=T, key_heads=H, value_heads=HV, key_dim=K, value_dim=K, device=gpu)
    assert stash.u.numel() > 2**31
    out = torch.empty_like(v)
    indices = (torch.arange(N, device=gpu) % 4).to(torch.int32)
    ops.tree_verify(q, k, v, a, b, A_log, dt_bias, state, indices, parents.expand(N, T), out, stash.layer(0))
    n = N - 1
    rows = slice(n * T, N * T)
    few = Stash.allocate(layers=1, rows=1, nodes=T, key_heads=H, value_heads=HV, key_dim=K, value_dim=K, device=gpu)
    one = torch.empty_like(v[rows])
    ops.tree_verify(
        q[rows], k[rows], v[rows], a[rows], b[rows], A_log, dt_bias, state, indices[n:], parents, one, few.layer(0)
    )
    assert_same_bits(out[rows].contiguous(), one, name="out of the last row")
    assert_same_bits(stash.u[:, n:].contiguous(), few.u, name="stash u of the last row")


@pytest.mark.parametrize("shape", ["chain", "random"])
@pytest.mark.parametrize("act", [F32, BF16], ids=str)
@pytest.mark.parametrize("first", range(1, 129, 16))
def test_every_node_count(gpu, first, shape, act):
    """No tile size hides an edge: all T from 1 to 128, against float64; float32 activations and 16-bit ones have kernels of
    their own, which write the same float32 outputs here."""
    for T in range(first, first + 16):
        x = make_inputs(N=1, T=T, H=1, HV=2, K=128, act=act, shape=shape, seed=T, device=gpu)
        stash, out = x.stash(), torch.empty(T, 2, 128, dtype=F32, device=gpu)
        ops.tree_verify(*x.args(), out, stash.layer(0))
        exact, rough = reference.recurrence(*x.args()), reference.recurrence(*x.args(), dtype=F32)
        assert_within_yardstick(
            out.reshape(1, T, 2, 128), exact.out.reshape(1, T, 2, 128), rough.out.reshape(1, T, 2, 128),
            name=f"out [request, node, head, v], T = {T}", group_dims=(0, 2), dtype=F32,
        )  # fmt: skip


@pytest.mark.parametrize("H,HV,N,T", [(16, 32, 9, 16), (2, 8, 40, 4), (16, 64, 3, 64), (16, 32, 2, 128)])
def test_ten_repeats_at_real_shapes_are_bit_equal(gpu, H, HV, N, T):
    """Enough blocks to fill the GPU, so that their order differs between runs."""
    x = make_inputs(N=N, T=T, H=H, HV=HV, K=128, conv=True, device=gpu)
    first = None
    for _ in range(10):
        y = fresh(x)
        stash, out = buffers(y, True)
        step(y, stash, out, True)
        now = (out.contiguous(), stash.u[:, :N, :, :T].contiguous(), y.pool.contiguous(), y.conv_pool.contiguous())
        first = first or now
        for name, a, b in zip(("out", "stash u", "pool", "conv pool"), first, now):
            assert_same_bits(b, a, name=f"{name} of a repeat")


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
@pytest.mark.parametrize("H,HV", [(1, 2), (2, 8), (1, 3)])
@pytest.mark.parametrize("T", [4, 8, 16, 17, 32, 33, 64])
def test_a_large_batch_gives_what_its_requests_give_alone(gpu, T, H, HV, conv):
    """From one request a multiprocessor on, heads are prepared in pairs and rows shared; alone a request takes neither way."""
    N = torch.cuda.get_device_properties(gpu).multi_processor_count + 3
    x = fresh(make_inputs(N=N, T=T, H=H, HV=HV, conv=conv, padding=(1,), act=BF16, device=gpu))
    before = fresh(x)
    stash, out = buffers(x, conv)
    step(x, stash, out, conv)
    out = out.reshape(N, T, HV, 128)
    assert not out[1].any(), "outputs of a padded row"
    for n in (0, 2, N // 2, N - 1):
        few = [n, 1]
        tokens = torch.cat([torch.arange(i * T, (i + 1) * T, device=gpu) for i in few])
        pick = lambda t: None if t is None else t[tokens]
        one = dataclasses.replace(
            fresh(before), N=2, trees=[x.trees[i] for i in few], q=pick(before.q), k=pick(before.k), v=pick(before.v), a=pick(before.a),
            b=pick(before.b), state_indices=before.state_indices[few], accepted=before.accepted[few],
            parents=None if before.parents is None else before.parents[few],
            **({"mixed_qkv": pick(before.mixed_qkv)} if conv else {}),
        )  # fmt: skip
        one_stash, one_out = buffers(one, conv)
        step(one, one_stash, one_out, conv)
        slot = int(before.state_indices[n])
        for name, mine, alone, limit in (
            ("u", stash.u[0, n, :, :T], one_stash.u[0, 0, :, :T], 1e-5),
            ("out", out[n], one_out.reshape(2, T, HV, 128)[0], 1e-2),
            ("state", x.pool[0, slot], one.pool[0, slot], 1e-5),
        ):
            mine, alone = mine.double(), alone.double()
            error = float((mine - alone).norm() / alone.norm())
            assert error < limit, f"{name} of request {n}: differs by {error:.1e}"


def test_a_tensor_on_another_device_is_refused(gpu):
    x = make_inputs(N=2, T=3, device=gpu)
    stash, out = buffers(x, False)
    x.parents = x.parents.cpu()
    with pytest.raises(RuntimeError, match="parents"):
        ops.tree_verify(*x.args(), out, stash.layer(0))
