"""commit, fed by the verify operator, against states of the float64 recurrence; convolution windows to the bit."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_common import BF16, F16, F32, Untouched, layer_of, live_rows, truths, verify_layers

from treewy_sglang import check_errors, ops, reference, tree
from treewy_sglang.testing import assert_same_bits, assert_within_yardstick, make_inputs

ALL = [F32, BF16, F16]


def window(x, pool, columns, row, node):
    """The convolution window after a node, from the pool before the commit: [D, W-1], as bits of the pool's dtype."""
    path = tree.ancestor_path(x.trees[row], node)
    raw = columns.reshape(x.N, x.T, -1)[row][path].T.to(pool.dtype)
    return torch.cat([pool[int(x.state_indices[row])], raw], 1)[:, -pool.shape[2] :]


def check_commit(x, layers, conv=False, track_slots=None, track_nodes=None, conv_dtype=None):
    """Verify and commit all layers, then judge every slot of both pools and the memory around them."""
    stash = verify_layers(x, layers, conv)
    pool, conv_pool = x.pool, x.conv_pool
    if conv and conv_dtype is not None:
        conv_pool = conv_pool.to(conv_dtype)
    old_conv = None if conv_pool is None else conv_pool.clone()
    targets = {}  # slot -> (row, node)
    for n in live_rows(x):
        if int(x.accepted[n]) < 0:
            continue
        if track_slots is not None and int(track_slots[n]) >= 0 and int(track_nodes[n]) >= 0:
            targets[int(track_slots[n])] = (n, int(track_nodes[n]))
        targets[int(x.state_indices[n])] = (n, int(x.accepted[n]))
    exact, rough = [], []
    for i in range(layers):
        y = layer_of(x, i)
        per_node = {}
        for slot, (row, node) in targets.items():
            nodes = torch.full((x.N,), node, device=pool.device)
            if node not in per_node:
                per_node[node] = truths(y, conv, nodes)
        exact.append({s: per_node[node][0].states[row] for s, (row, node) in targets.items()})
        rough.append({s: per_node[node][1].states[row] for s, (row, node) in targets.items()})

    memory = Untouched(pool=pool, conv_pool=conv_pool if conv else None)
    reads = Untouched(u=stash.u, k=stash.k, k_rnorm=stash.k_rnorm, g=stash.g, conv=stash.conv)
    ops.commit(
        stash, x.parents, x.accepted, x.state_indices, pool, conv_pool if conv else None, track_slots, track_nodes
    )
    reads.check()
    slots = list(targets)
    fill = lambda view: view.index_fill_(1, torch.tensor(slots, dtype=torch.long, device=pool.device), 0)
    memory.check(**({"pool": fill, "conv_pool": fill} if conv else {"pool": fill}))
    for i in range(layers):
        if slots:
            assert_within_yardstick(
                pool[i, slots], torch.stack([exact[i][s] for s in slots]), torch.stack([rough[i][s] for s in slots]),
                name=f"state of layer {i} [{slots}, head, v, k]", group_dims=(0, 1), dtype=pool.dtype,
            )  # fmt: skip
        if conv:
            for slot, (row, node) in targets.items():
                want = window(x, old_conv[i], layer_of(x, i).mixed_qkv, row, node)
                assert_same_bits(conv_pool[i, slot].contiguous(), want.contiguous(), name=f"conv window of layer {i}, slot {slot}")


@pytest.mark.parametrize("state", ALL, ids=str)
@pytest.mark.parametrize("act", ALL, ids=str)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_dtypes_and_head_dims(device, K, act, state):
    check_commit(make_inputs(N=3, T=6, H=1, HV=2, K=K, act=act, state=state, layers=2, device=device), 2)


@pytest.mark.parametrize("shape", ["chain", "path", "star", "caterpillar", "random", "forest", "topk4"])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 8, 9, 16, 17, 33, 64, 128])
def test_every_shape_and_size(device, T, shape):
    """Accepted nodes of every depth, a padding row and a row that commits nothing."""
    x = make_inputs(N=5, T=T, H=1, HV=2, K=64, act=F32, shape=shape, seed=T, padding=(3,), device=device)
    x.accepted[1] = T - 1
    x.accepted[2] = -1
    x.accepted[4] = 0
    if shape == "chain":  # the stash's capacity is the length of an implicit chain
        x.parents = tree.tensor(x.trees, device)
    check_commit(x, 1)


def test_implicit_chain(device):
    x = make_inputs(N=3, T=6, H=1, HV=2, K=64, act=F32, shape="chain", device=device)
    stash = verify_layers(x, 1)
    with_parents, without = x.pool.clone(), x.pool.clone()
    ops.commit(stash, tree.tensor(x.trees, device), x.accepted, x.state_indices, with_parents)
    ops.commit(stash, None, x.accepted, x.state_indices, without)
    assert_same_bits(without, with_parents, name="pool")


def test_chain_shorter_than_the_stash(device):
    """`nodes` says how long an implicit chain is: what is right stays the same, what lies beyond it is counted."""
    x = make_inputs(N=3, T=4, H=1, HV=2, K=64, act=F32, shape="chain", device=device)
    tight = verify_layers(x, 1)
    s = type(tight).allocate(layers=1, rows=3, nodes=9, key_heads=1, value_heads=2, key_dim=64, value_dim=64,
                             activation_dtype=F32, device=device)  # fmt: skip
    for t in (s.u, s.k, s.k_rnorm, s.g):
        t.fill_(float("nan"))
    for wide, narrow in ((s.u, tight.u), (s.k, tight.k), (s.k_rnorm, tight.k_rnorm), (s.g, tight.g)):
        wide[:, :, :, :4] = narrow[:, :3, :, :4]
    want, got = x.pool.clone(), x.pool.clone()
    ops.commit(tight, None, x.accepted, x.state_indices, want)
    ops.commit(s, None, x.accepted, x.state_indices, got, nodes=4)
    assert_same_bits(got, want, name="pool")
    beyond = torch.full_like(x.accepted, 4)
    before = x.pool.clone()
    ops.commit(s, None, beyond, x.state_indices, x.pool, nodes=4)
    assert_same_bits(x.pool, before, name="pool")
    assert sum(check_errors(x.pool.device).values()) == 3
    for nodes in (0, 10):
        with pytest.raises(RuntimeError, match=f"'nodes': is {nodes}; allowed: 1 to 9"):
            ops.commit(s, None, x.accepted, x.state_indices, x.pool, nodes=nodes)


@pytest.mark.parametrize("act,conv_dtype", [(BF16, None), (F32, None), (F16, None), (F32, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolution_windows(device, width, act, conv_dtype):
    """Short paths keep old columns, long ones replace all; slots of both kinds in one call."""
    for shape in ("random", "path", "forest"):
        x = make_inputs(N=6, T=6, H=1, HV=2, K=64, act=act, shape=shape, width=width, conv=True, device=device)
        x.accepted.copy_(torch.tensor([0, 1, 2, 3, 5, -1]))
        check_commit(x, 1, conv=True, conv_dtype=conv_dtype)


def test_convolution_over_layers_and_strides(device):
    x = make_inputs(N=3, T=5, H=1, HV=2, K=64, act=F32, layers=3, conv=True, device=device)
    x.conv_pool = x.conv_pool.transpose(2, 3).contiguous().transpose(2, 3)
    check_commit(x, 3, conv=True)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_track(device, conv, index_dtype):
    """A second slot receives the state of a node on the accepted path, built from the state before the call."""
    layers = 2
    x = make_inputs(N=5, T=9, H=1, HV=2, K=64, act=F32, layers=layers, conv=conv, index_dtype=index_dtype, seed=5, device=device)
    free = [s for s in range(x.pool.shape[1]) if s not in x.state_indices.tolist()]
    x.accepted.copy_(torch.tensor([8, 7, 0, -1, 6]))
    paths = [tree.ancestor_path(x.trees[n], int(x.accepted[n])) for n in range(5)]
    slots = torch.tensor([free[0], free[1], free[2], free[3], -1], dtype=index_dtype, device=device)
    nodes = torch.tensor([paths[0][0], paths[1][-1], 0, 0, 3], dtype=index_dtype, device=device)
    check_commit(x, layers, conv, slots, nodes)


def test_track_without_node_and_into_own_slot(device):
    x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=F32, shape="path", device=device)
    x.accepted.fill_(3)
    free = next(s for s in range(x.pool.shape[1]) if s not in x.state_indices.tolist())
    slots = torch.tensor([free, int(x.state_indices[1])], device=device)
    nodes = torch.tensor([-1, 1], device=device)
    stash = verify_layers(x, 1)
    plain, tracked = x.pool.clone(), x.pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, plain)
    ops.commit(stash, x.parents, x.accepted, x.state_indices, tracked, None, slots, nodes)
    assert_same_bits(tracked, plain, name="pool")


def test_same_bits_again_and_root_only(device):
    x = make_inputs(N=2, T=4, H=1, HV=2, K=64, act=BF16, state=BF16, device=device)
    x.accepted.fill_(0)
    stash = verify_layers(x, 1)
    first, second = x.pool.clone(), x.pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, first)
    ops.commit(stash, x.parents, x.accepted, x.state_indices, second)
    assert_same_bits(second, first, name="pool")
    for n in range(2):
        assert not torch.equal(first[0, int(x.state_indices[n])], x.pool[0, int(x.state_indices[n])]), "the root is committed"


def test_against_the_formula_on_the_same_stash(device):
    """reference.commit reads the same stash: what is left is the error of this one operator."""
    x = make_inputs(N=4, T=12, H=2, HV=4, K=64, act=BF16, layers=2, conv=False, device=device)
    stash = verify_layers(x, 2)
    want, _ = reference.commit(stash, x.parents, x.accepted, x.state_indices, x.pool)
    pool = x.pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, pool)
    torch.testing.assert_close(pool.double(), want, rtol=0, atol=4e-6)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree_and_node(device, data):
    T = data.draw(st.integers(1, 32), label="T")
    parents = [-1] + [data.draw(st.integers(-1, t - 1), label=f"parents[{t}]") for t in range(1, T)]
    x = make_inputs(N=1, T=T, H=1, HV=2, K=64, act=F32, seed=data.draw(st.integers(0, 99)), conv=True, device=device)
    x.trees = [parents]
    x.parents = tree.tensor([parents], device)
    x.accepted.fill_(data.draw(st.integers(-1, T - 1), label="accepted"))
    check_commit(x, 1, conv=True)


@pytest.mark.parametrize("state", [F32, BF16], ids=str)
def test_long_generation_drifts_no_faster(device, state):
    """240 rounds of verify and commit. The distance from float64 grows no faster than that of the float32 recurrence whose
    state is stored in the same dtype."""
    rounds, N, T, H, HV, K = 240, 2, 6, 1, 3, 64
    rng = random.Random(0)
    pool = None
    for step in range(rounds):
        x = make_inputs(N=N, T=T, H=H, HV=HV, K=K, act=F32, state=state, seed=step, device=device)
        if pool is None:
            pool, indices = x.pool, x.state_indices
            exact, rough = x.pool[0].double(), x.pool[0].float()
        # The heads keep their gates: mild ones, under which an error lives for hundreds of tokens.
        x.A_log, x.dt_bias = torch.tensor([0.0, -2.0, 2.8], device=device), torch.tensor([-3.0, -4.0, -9.0], device=device)
        x.state_indices, x.pool = indices, pool
        x.accepted.copy_(torch.tensor([rng.randrange(T) for _ in range(N)]))
        e = reference.recurrence(*x.args()[:7], exact, indices, x.parents, nodes=x.accepted)
        r = reference.recurrence(*x.args()[:7], rough, indices, x.parents, nodes=x.accepted, dtype=F32)
        exact[indices] = e.states
        rough[indices] = r.states.to(state).float()
        stash, out = x.stash(), x.out()
        ops.tree_verify(*x.args(), out, stash.layer(0))
        ops.commit(stash, x.parents, x.accepted, indices, pool)
        if (step + 1) % 60 == 0:
            ours, theirs = pool[0, indices].double() - exact[indices], rough[indices].double() - exact[indices]
            # Root mean square per (request, head): a random walk's maximum is too noisy to compare.
            rms = lambda d: d.square().mean((-1, -2)).sqrt()
            bad = ~(rms(ours) <= 1.2 * rms(theirs))
            assert not bool(bad.any()), f"after {step + 1} rounds: {rms(ours).tolist()} against {rms(theirs).tolist()}"
