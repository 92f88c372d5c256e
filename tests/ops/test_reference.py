"""The reference agrees with itself: recurrence and WY form, convolution and torch, commit and recurrence."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_common import F32

from treewy_sglang import reference, tree
from treewy_sglang.testing import GATE_CORNERS, make_inputs

TOLERANCE = 1e-12


def assert_forms_agree(x, nodes):
    a = reference.recurrence(*x.args(), nodes=nodes)
    b = reference.wy(*x.args(), nodes=nodes)
    live = x.live
    rows = lambda t: t.reshape(x.N, x.T, *t.shape[1:])[live]
    for name, p, q in [("out", rows(a.out), rows(b.out)), ("u", a.u[live], b.u[live]), ("states", a.states[live], b.states[live])]:
        assert bool(p.isfinite().all())
        error = float((p - q).abs().max()) if p.numel() else 0.0
        assert error <= TOLERANCE, f"{name}: {error}"


@pytest.mark.parametrize("shape", ["chain", *tree.SHAPES])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 8, 9, 16, 17, 33, 64, 128])
def test_forms_agree(T, shape):
    x = make_inputs(N=2, T=T, H=1, HV=len(GATE_CORNERS), K=64, act=F32, shape=shape, seed=T)
    assert_forms_agree(x, x.accepted)


def test_gates_are_as_strong_as_those_of_checkpoints():
    """The inputs hold what they promise: decays that underflow float32, beside decays near 1 in the same call."""
    x = make_inputs(N=2, T=16, H=1, HV=6, K=64, act=F32)
    g, _ = reference.gates(x.a, x.b, x.A_log, x.dt_bias)
    assert float(g.min()) < -104 and float(g.max()) > -1e-3
    assert float(x.A_log.max()) >= 2.75 and float(x.dt_bias.min()) <= -10


@settings(max_examples=60, deadline=None)
@given(T=st.integers(1, 48), seed=st.integers(0, 10**6), forest=st.booleans())
def test_forms_agree_on_random_trees(T, seed, forest):
    rng = random.Random(seed)
    x = make_inputs(N=2, T=T, H=1, HV=3, K=64, act=F32, seed=seed % 1000, padding=(1,) if seed % 3 == 0 else ())
    x.parents = tree.tensor([tree.random_tree(T, rng, forest) for _ in range(2)])
    assert_forms_agree(x, torch.tensor([rng.randrange(-1, T) for _ in range(2)]))


def test_gates_against_torch():
    a, b = torch.linspace(-40, 40, 161, dtype=torch.float64)[:, None], torch.linspace(-9, 9, 161, dtype=torch.float64)[:, None]
    A_log, dt_bias = torch.tensor([2.8]), torch.tensor([-10.0])
    g, beta = reference.gates(a, b, A_log, dt_bias)
    x = a + dt_bias.double()
    assert torch.allclose(g, -A_log.double().exp() * torch.where(x > 20, x, x.clamp(max=20).exp().log1p()), rtol=1e-14, atol=0)
    assert torch.allclose(beta, 1 / (1 + (-b).exp()), rtol=1e-14)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolution_of_a_chain_is_conv1d(width):
    x = make_inputs(N=3, T=9, H=1, HV=2, K=64, act=F32, shape="chain", width=width, conv=True)
    got = reference.conv(*x.conv_args()[:4], x.state_indices, x.parents).reshape(3, 9, -1)
    for n in range(3):
        columns = torch.cat([x.conv_pool[0, x.state_indices[n]].double(), x.mixed_qkv.double().reshape(3, 9, -1)[n].T], 1)
        y = F.conv1d(columns[None], x.conv_weight.double()[:, None], x.conv_bias.double(), groups=columns.shape[0])
        torch.testing.assert_close(got[n], F.silu(y[0]).T, rtol=1e-12, atol=1e-12)


def test_convolution_of_a_tree_is_that_of_its_paths():
    x = make_inputs(N=1, T=12, H=1, HV=2, K=64, act=F32, conv=True, seed=3)
    got = reference.conv(*x.conv_args()[:4], x.state_indices, x.parents)
    for node in range(12):
        path = tree.ancestor_path(x.trees[0], node)
        alone = reference.conv(x.mixed_qkv[path], *x.conv_args()[1:4], x.state_indices, None)
        assert torch.equal(alone[-1], got[node])


def test_commit_rebuilds_the_state_of_the_recurrence():
    """A stash of exact numbers: the commit formula gives the recurrence's state."""
    x = make_inputs(N=3, T=10, H=1, HV=3, K=64, act=F32, seed=2)
    r = reference.recurrence(*x.args(), nodes=x.accepted)
    stash = x.stash(extra_rows=0, extra_nodes=0)
    exact = type(stash)(
        u=r.u[None], k=x.k.reshape(3, 10, 1, 64).transpose(1, 2)[None].double(), k_rnorm=r.k_rnorm[None], g=r.g[None]
    )
    new, _ = reference.commit(exact, x.parents, x.accepted, x.state_indices, x.pool)
    assert float((new[0, x.state_indices] - r.states).abs().max()) <= TOLERANCE
    others = [s for s in range(x.pool.shape[1]) if s not in x.state_indices.tolist()]
    assert torch.equal(new[0, others], x.pool[0, others].double())
