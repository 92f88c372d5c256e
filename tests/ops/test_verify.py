"""tree_verify and tree_conv_verify against the float64 recurrence."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_common import BF16, F16, F32, by_node, check_verify, run_verify, truths

from treewy_sglang import tree
from treewy_sglang.testing import assert_same_bits, assert_within_yardstick, make_inputs

NODES = (1, 2, 3, 4, 8, 9, 16, 17, 33, 64, 128)
SHAPES = ("chain", "path", "star", "caterpillar", "random", "forest", "topk4")


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
@pytest.mark.parametrize("state", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("act", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_dtypes_and_head_dims(device, K, act, state, conv):
    for i, T in enumerate((1, 5, 17)):
        x = make_inputs(N=3, T=T, H=1, HV=2, K=K, act=act, state=state, seed=i, conv=conv, padding=(1,) if T == 5 else (), device=device)
        check_verify(x, conv)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", NODES)
def test_every_shape_and_size(device, T, shape):
    x = make_inputs(N=3, T=T, H=2, HV=4, K=128, act=F32, shape=shape, seed=T, device=device)
    check_verify(x)
    x = make_inputs(N=2, T=T, H=1, HV=3, K=64, act=BF16, state=BF16, shape=shape, seed=T, conv=True, device=device)
    check_verify(x, conv=True)


@pytest.mark.parametrize("shape", ("path", "topk4"))
def test_largest_heads_and_trees(device, shape):
    check_verify(make_inputs(N=1, T=128, H=1, HV=2, K=256, shape=shape, seed=3, device=device))
    check_verify(make_inputs(N=1, T=128, H=1, HV=2, K=256, shape=shape, seed=3, conv=True, device=device), conv=True)


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_float32_output_of_narrow_activations(device, conv):
    for act in (BF16, F16):
        check_verify(make_inputs(N=2, T=9, act=act, conv=conv, device=device), conv, out_dtype=F32)


@pytest.mark.parametrize("H,HV", [(1, 1), (4, 4), (2, 8), (4, 8), (1, 5), (16, 32)])
def test_head_groups(device, H, HV):
    check_verify(make_inputs(N=2, T=6, H=H, HV=HV, K=64, device=device))


@pytest.mark.parametrize("N", [1, 2, 7, 33])
def test_batch_sizes_and_padding(device, N):
    padding = tuple(n for n in range(N) if n % 3 == 2)
    check_verify(make_inputs(N=N, T=4, H=1, HV=2, K=64, padding=padding, index_dtype=torch.int32, device=device))
    check_verify(make_inputs(N=N, T=4, H=1, HV=2, K=64, padding=range(N), device=device))


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_unaligned_views(device, conv):
    """Views that start at any element: nothing may assume 16-byte rows."""
    for act in (F32, BF16):
        check_verify(make_inputs(N=2, T=5, K=64, act=act, align=1, conv=conv, device=device), conv)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_widths(device, width, bias):
    for shape in ("path", "random", "forest"):
        check_verify(make_inputs(N=2, T=7, K=64, width=width, bias=bias, shape=shape, conv=True, device=device), conv=True)


def test_convolution_state_of_any_stride(device):
    x = make_inputs(N=2, T=7, K=64, conv=True, device=device)
    x.conv_pool = x.conv_pool.transpose(2, 3).contiguous().transpose(2, 3)  # channels contiguous, columns apart
    assert x.conv_pool.stride(3) != 1
    check_verify(x, conv=True)


@pytest.mark.parametrize("gate_dtype", [F32, BF16, F16], ids=str)
def test_gate_parameter_dtypes(device, gate_dtype):
    check_verify(make_inputs(N=2, T=5, K=64, gate_dtype=gate_dtype, device=device))


def test_chain_is_the_path(device):
    """parents=None is the explicit chain, to the bit."""
    x = make_inputs(N=3, T=9, shape="path", act=F32, device=device)
    out, stash = x.out(), x.stash()
    run_verify(x, out, stash.layer(0))
    x.parents = None
    out2, stash2 = x.out(), x.stash()
    run_verify(x, out2, stash2.layer(0))
    assert_same_bits(out2.contiguous(), out.contiguous(), name="out")
    assert_same_bits(stash2.u, stash.u, name="u")


def test_scale_argument(device):
    x = make_inputs(N=2, T=4, K=64, act=F32, device=device)
    from treewy_sglang import ops

    out, twice = x.out(), x.out()
    ops.tree_verify(*x.args(), out, x.stash().layer(0))
    ops.tree_verify(*x.args(), twice, x.stash().layer(0), scale=2 * 64**-0.5)
    assert_same_bits(twice.contiguous(), (out * 2).contiguous(), name="out at twice the scale")


def test_parents_with_a_row_stride(device):
    x = make_inputs(N=3, T=6, K=64, device=device)
    wide = torch.full((3, 11), 99, dtype=torch.int32, device=device)
    wide[:, 2:8] = x.parents
    x.parents = wide[:, 2:8]
    check_verify(x)


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
def test_a_branch_never_sees_its_siblings(device, conv):
    """Other inputs in one branch change no bit of the outputs of the others."""
    parents = [-1, 0, 0, 1, 2, 3, 4]
    x = make_inputs(N=2, T=7, K=64, act=F32, conv=conv, device=device)
    x.parents = tree.tensor([parents] * 2, device)
    out, out2 = x.out(), x.out()
    run_verify(x, out, x.stash(conv=conv).layer(0), conv)
    left = [1, 3, 5]
    for t in (x.q, x.k, x.v, x.a, x.b, x.mixed_qkv):
        if t is not None:
            by_node(t, x)[:, left] = 7.0 if t.dim() > 2 else -3.0
            for n in range(x.N):
                for i in left:
                    t[n * x.T + i] = 7.0
    run_verify(x, out2, x.stash(conv=conv).layer(0), conv)
    others = [0, 2, 4, 6]
    assert_same_bits(by_node(out2, x)[:, others], by_node(out, x)[:, others], name="out of the other branch")
    assert not torch.equal(by_node(out2, x)[:, left], by_node(out, x)[:, left])


def test_nan_stays_in_its_branch(device):
    if device != "cpu":
        return  # the CPU kernel walks ancestor lists; a kernel that multiplies by masks need not have this property
    x = make_inputs(N=1, T=7, K=64, act=F32, device=device)
    x.parents = tree.tensor([[-1, 0, 0, 1, 2, 3, 4]], device)
    x.v[3] = float("nan")
    out = x.out()
    run_verify(x, out, x.stash().layer(0))
    finite = out.isfinite().all(-1).all(-1).tolist()
    assert finite == [True, True, True, False, True, False, True]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tree(device, data):
    """Random trees of any size: outputs follow the reference."""
    T = data.draw(st.integers(1, 40), label="T")
    parents = [-1] + [data.draw(st.integers(-1, t - 1), label=f"parents[{t}]") for t in range(1, T)]
    conv = data.draw(st.booleans(), label="conv")
    act = data.draw(st.sampled_from([F32, BF16]), label="act")
    x = make_inputs(N=1, T=T, H=1, HV=2, K=64, act=act, seed=data.draw(st.integers(0, 1000), label="seed"), device=device)
    x.parents = tree.tensor([parents], device)
    if conv:
        y = make_inputs(N=1, T=T, H=1, HV=2, K=64, act=F32, seed=1, conv=True, device=device)
        y.parents = x.parents
        x = y
    check_verify(x, conv)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_node_depends_on_its_path_only(device, data):
    """A node's output in a tree is its output when its path is verified as a chain."""
    T = data.draw(st.integers(2, 24), label="T")
    parents = [-1] + [data.draw(st.integers(0, t - 1), label=f"parents[{t}]") for t in range(1, T)]
    node = data.draw(st.integers(0, T - 1), label="node")
    x = make_inputs(N=1, T=T, H=1, HV=2, K=64, act=F32, seed=data.draw(st.integers(0, 1000), label="seed"), device=device)
    x.parents = tree.tensor([parents], device)
    out = x.out()
    run_verify(x, out, x.stash().layer(0))
    path = tree.ancestor_path(parents, node)
    y = make_inputs(N=1, T=len(path), H=1, HV=2, K=64, act=F32, shape="chain", device=device)
    for name in ("q", "k", "v", "a", "b"):
        getattr(y, name).copy_(getattr(x, name)[path])
    y.A_log, y.dt_bias, y.pool, y.state_indices = x.A_log, x.dt_bias, x.pool, x.state_indices
    alone = y.out()
    run_verify(y, alone, y.stash().layer(0))
    exact, rough = truths(y)
    for got in (alone, out[path]):
        assert_within_yardstick(by_node(got, y), by_node(exact.out, y), by_node(rough.out, y), name="out", group_dims=(0, 2), dtype=F32)
