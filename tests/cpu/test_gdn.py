"""Gated DeltaNet on CPU against the recurrence written out in float64."""

import pytest
import torch

from treewy_sglang.sglang.cpu import gdn
from treewy_sglang.testing import assert_same_bits, assert_within_yardstick

DOUBLE, SINGLE = torch.float64, torch.float32
# (A_log, dt_bias) of heads: extremes of real checkpoints, then decays that underflow within a few tokens
CORNERS = ((2.8, -10.0), (2.8, 0.0), (-4.0, -2.0), (2.8, 6.0))


def recurrence(q, k, v, a, b, A_log, dt_bias, state, dtype):
    """One request, token by token. Returns outputs [n, HV, V] and the states after every token [n, HV, V, K]."""
    q, k, v, a, b, A_log, dt_bias, S = (x.to(dtype) for x in (q, k, v, a, b, A_log, dt_bias, state))
    repeat = v.shape[1] // k.shape[1]
    outs, states = [], []
    for t in range(q.shape[0]):
        unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        key = unit(k[t]).repeat_interleave(repeat, 0)
        query = (unit(q[t]) * k.shape[-1] ** -0.5).repeat_interleave(repeat, 0)
        x = a[t] + dt_bias
        g = -A_log.exp() * torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))
        S = S * g.exp()[:, None, None]
        u = torch.sigmoid(b[t])[:, None] * (v[t] - torch.einsum("hvk,hk->hv", S, key))
        S = S + u[:, :, None] * key[:, None, :]
        outs.append(torch.einsum("hvk,hk->hv", S, query))
        states.append(S)
    return torch.stack(outs), torch.stack(states)


def strided(shape, dtype, generator):
    """A view with foreign NaN columns around it."""
    inner = torch.Size(shape[1:]).numel()
    big = torch.full((shape[0], inner + 13), float("nan"), dtype=dtype)
    view = big[:, 5 : 5 + inner]
    view.copy_(torch.randn(shape[0], inner, generator=generator) + torch.randn(inner, generator=generator))
    return view.unflatten(1, shape[1:])


class Case:
    def __init__(self, lengths, H=2, HV=4, K=64, V=64, dtype=SINGLE, state_dtype=SINGLE, seed=0):
        self.generator = generator = torch.Generator().manual_seed(seed)
        n = sum(lengths)
        self.lengths, self.H, self.HV, self.K, self.V, self.dtype = lengths, H, HV, K, V, dtype
        self.q, self.k = strided((n, H, K), dtype, generator), strided((n, H, K), dtype, generator)
        self.v = strided((n, HV, V), dtype, generator)
        self.a, self.b = strided((n, HV), dtype, generator), strided((n, HV), dtype, generator)
        corner = [CORNERS[h % len(CORNERS)] for h in range(HV)]
        self.A_log = torch.tensor([c[0] for c in corner])
        self.dt_bias = torch.tensor([c[1] for c in corner])
        slots = len(lengths) + 3
        # a pool whose slots are further apart than they are large, and are used in random order
        wide = torch.randn(slots, HV * V * K + 32, generator=generator).to(state_dtype)
        wide[:, HV * V * K :] = float("nan")
        self.wide = wide
        self.pool = wide[:, : HV * V * K].unflatten(1, (HV, V, K))
        self.index = torch.randperm(slots, generator=generator)[: len(lengths)].to(torch.int32)
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.g, self.beta = gdn.gates(self.A_log, self.a, self.b, self.dt_bias)

    def tokens(self, row):
        s = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return [x[s] for x in (self.q, self.k, self.v, self.a, self.b)]

    def truth(self, row, initial, dtype=DOUBLE):
        return recurrence(*self.tokens(row), self.A_log, self.dt_bias, initial, dtype)


def check(actual, truth, single, name, dtype=SINGLE, groups=(1,)):
    # The chunked form sums in another order than the recurrence, over more terms: twice the usual factor.
    assert_within_yardstick(actual, truth, single, name=name, group_dims=groups, dtype=dtype, factor=4.0, floor_ulps=8.0)


@pytest.mark.parametrize(
    "lengths, shape",
    [
        ([1], {}),
        ([63, 64, 65], {}),
        ([130, 1, 17], {}),
        ([200], dict(H=1, HV=4, K=32, V=48)),
        ([70, 5], dict(H=3, HV=3, K=128, V=128)),
    ],
)
def test_prefill_is_the_recurrence(lengths, shape):
    case = Case(lengths, **shape)
    before = case.pool.clone()
    out, checkpoints = gdn.delta_prefill(
        case.q, case.k, case.v, case.g, case.beta, case.pool, case.index, case.starts
    )
    first = 0
    for row, length in enumerate(lengths):
        slot = int(case.index[row])
        truth, states = case.truth(row, before[slot])
        single, single_states = case.truth(row, before[slot], SINGLE)
        s = slice(int(case.starts[row]), int(case.starts[row + 1]))
        check(out[s], truth, single, f"outputs of request {row}")
        check(case.pool[slot], states[-1], single_states[-1], f"state of request {row}", groups=(0,))
        # states at the start of each chunk of 64 tokens
        count = -(-length // gdn.CHUNK)
        assert_same_bits(checkpoints[first], before[slot].float(), name="first checkpoint")
        for c in range(1, count):
            at = c * gdn.CHUNK - 1
            check(checkpoints[first + c], states[at], single_states[at], f"checkpoint {c}", groups=(0,))
        first += count
    assert checkpoints.shape[0] == first
    untouched = [s for s in range(case.pool.shape[0]) if s not in case.index.tolist()]
    assert_same_bits(case.pool[untouched], before[untouched], name="other slots")
    assert bool(case.wide[:, case.HV * case.V * case.K :].isnan().all())


def test_prefill_in_pieces_is_prefill_at_once():
    """Chunked prefill cuts a prompt anywhere; the state carries over."""
    case = Case([150])
    slot = int(case.index[0])
    before = case.pool[slot].clone()
    truth, states = case.truth(0, before)
    single, single_states = case.truth(0, before, SINGLE)
    outs = []
    for s in (slice(0, 1), slice(1, 65), slice(65, 100), slice(100, 150)):
        starts = torch.tensor([0, s.stop - s.start])
        part, _ = gdn.delta_prefill(
            case.q[s], case.k[s], case.v[s], case.g[s], case.beta[s], case.pool, case.index, starts
        )
        outs.append(part)
    check(torch.cat(outs), truth, single, "outputs")
    check(case.pool[slot], states[-1], single_states[-1], "state", groups=(0,))


def test_step_is_the_recurrence_and_skips_padding():
    lengths = [1] * 6
    case = Case(lengths)
    case.index[2] = -1
    before = case.pool.clone()
    out = gdn.delta_step(case.q, case.k, case.v, case.g, case.beta, case.pool, case.index)
    for row in range(6):
        slot = int(case.index[row])
        if slot < 0:
            assert_same_bits(out[row], torch.zeros_like(out[row]), name="padding row")
            continue
        truth, states = case.truth(row, before[slot])
        single, single_states = case.truth(row, before[slot], SINGLE)
        check(out[row : row + 1], truth, single, "output")
        check(case.pool[slot], states[-1], single_states[-1], "state", groups=(0,))
    untouched = [s for s in range(case.pool.shape[0]) if s not in case.index.tolist()]
    assert_same_bits(case.pool[untouched], before[untouched], name="other slots")


def test_prefill_skips_padding():
    case = Case([5, 3])
    case.index[0] = -1
    before = case.pool.clone()
    out, checkpoints = gdn.delta_prefill(
        case.q, case.k, case.v, case.g, case.beta, case.pool, case.index, case.starts
    )
    assert_same_bits(out[:5], torch.zeros_like(out[:5]), name="padding row")
    assert checkpoints.shape[0] == 2
    untouched = [s for s in range(case.pool.shape[0]) if s != int(case.index[1])]
    assert_same_bits(case.pool[untouched], before[untouched], name="other slots")


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_round_once(state_dtype):
    """bfloat16 activations, narrow states: the same arithmetic, rounded when stored."""
    case = Case([40], dtype=torch.bfloat16, state_dtype=state_dtype)
    slot = int(case.index[0])
    before = case.pool[slot].clone()
    truth, states = case.truth(0, before.double())
    single, single_states = case.truth(0, before.float(), SINGLE)
    out, _ = gdn.delta_prefill(case.q, case.k, case.v, case.g, case.beta, case.pool, case.index, case.starts)
    check(out, truth, single, "outputs", dtype=torch.bfloat16)
    check(case.pool[slot], states[-1], single_states[-1], "state", dtype=state_dtype, groups=(0,))


def test_small_gates_after_a_strong_one_keep_their_digits():
    """A running sum of gates in float32 would lose what tokens after a strong decay contribute."""
    n, K = 20, 64
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(n, 1, K, generator=generator) for _ in range(2))
    v = torch.randn(n, 1, K, generator=generator)
    g = torch.full((n, 1), -1e-3)
    g[2] = -4000.0
    beta = torch.full((n, 1), 0.9)
    pool = torch.randn(1, 1, K, K, generator=generator)
    initial = pool[0].clone()
    out, _ = gdn.delta_prefill(q, k, v, g, beta, pool, torch.tensor([0]), torch.tensor([0, n]))

    def exact(dtype):
        S, outs = initial[0].to(dtype), []
        for t in range(n):
            unit = lambda x: x / (x.square().sum() + 1e-6).sqrt()
            key, query = unit(k[t, 0].to(dtype)), unit(q[t, 0].to(dtype)) * K**-0.5
            S = S * g[t, 0].to(dtype).exp()
            S = S + torch.outer(beta[t, 0].to(dtype) * (v[t, 0].to(dtype) - S @ key), key)
            outs.append(S @ query)
        return torch.stack(outs).unsqueeze(1)

    check(out, exact(DOUBLE), exact(SINGLE), "outputs")


def convolution(x, weight, bias, before, silu):
    """x [D, n], before [D, W-1], float64, plainly."""
    taps = weight.shape[1]
    window = torch.cat([before, x], 1).double()
    out = sum(window[:, i : i + x.shape[1]] * weight[:, i : i + 1].double() for i in range(taps))
    if bias is not None:
        out = out + bias.double()[:, None]
    return out * torch.sigmoid(out) if silu else out


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution_of_prompts_then_steps(silu, with_bias):
    generator = torch.Generator().manual_seed(1)
    D, W, lengths = 96, 4, [1, 2, 3, 9, 40]
    n = sum(lengths)
    x = torch.randn(n, D + 7, generator=generator)[:, :D].T  # strided, channels first
    weight = torch.randn(D, W, generator=generator)
    bias = torch.randn(D, generator=generator) if with_bias else None
    wide = torch.randn(9, D * (W - 1) + 5, generator=generator)
    states = wide[:, : D * (W - 1)].unflatten(1, (D, W - 1))
    before = states.clone()
    index = torch.tensor([7, 0, 3, -1, 4], dtype=torch.int32)
    has = torch.tensor([True, False, True, True, False])
    out = gdn.conv_prefill(x, weight, bias, states, has, index, lengths, silu)
    start = 0
    for row, length in enumerate(lengths):
        part = x[:, start : start + length]
        slot = int(index[row])
        if slot < 0:
            assert_same_bits(out[:, start : start + length], torch.zeros(D, length), name="padding row")
        else:
            initial = before[slot] if bool(has[row]) else torch.zeros(D, W - 1)
            truth = convolution(part, weight, bias, initial, silu)
            torch.testing.assert_close(out[:, start : start + length].double(), truth, rtol=2e-6, atol=2e-6)
            tail = torch.cat([initial, part], 1)[:, -(W - 1) :]
            assert_same_bits(states[slot], tail.contiguous(), name="state")
        start += length
    for slot in (1, 2, 5, 6, 8):
        assert_same_bits(states[slot], before[slot], name="other slots")

    after = states.clone()
    token = torch.randn(5, D, generator=generator)
    stepped = gdn.conv_step(token, states, weight, bias, silu, index)
    for row in range(5):
        slot = int(index[row])
        if slot < 0:
            assert_same_bits(stepped[row], torch.zeros(D), name="padding row")
            continue
        truth = convolution(token[row][:, None], weight, bias, after[slot], silu)[:, 0]
        torch.testing.assert_close(stepped[row].double(), truth, rtol=2e-6, atol=2e-6)
        assert_same_bits(states[slot], torch.cat([after[slot][:, 1:], token[row][:, None]], 1), name="state")


def test_gates_at_both_ends():
    a = torch.tensor([[-200.0, 0.0, 19.9, 20.1, 500.0]])
    A_log, dt_bias = torch.tensor([2.8] * 5), torch.zeros(5)
    g, beta = gdn.gates(A_log, a, torch.tensor([[-90.0, 0.0, 1.0, 20.0, 90.0]]), dt_bias)
    truth = -A_log.double().exp() * torch.nn.functional.softplus(a.double())
    torch.testing.assert_close(g.double(), truth, rtol=2e-6, atol=1e-37)
    assert bool((g <= 0).all()) and bool(g.isfinite().all()) and bool(beta.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_and_shared_expert_gate(dtype):
    generator = torch.Generator().manual_seed(2)
    x, gate = (torch.randn(7, 128, generator=generator).to(dtype) for _ in range(2))
    x[3] = 0
    weight = torch.randn(128, generator=generator).to(dtype)
    out = gdn.gated_rms_norm(x, weight, gate, 1e-6)
    wide, z = x.double(), gate.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() * z * torch.sigmoid(z)
    tolerance = dict(rtol=3e-6, atol=1e-6) if dtype is torch.float32 else dict(rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(out.double(), truth, **tolerance)

    shared, total = (torch.randn(7, 128, generator=generator).to(dtype) for _ in range(2))
    truth = total.double() + torch.sigmoid(x.double() @ weight.double())[:, None] * shared.double()
    gdn.gate_sigmoid_mul_add(x, weight, shared, total)
    torch.testing.assert_close(total.double(), truth, **(tolerance if dtype is torch.float32 else dict(rtol=5e-3, atol=2e-2)))


def test_tracked_states_are_copies():
    generator = torch.Generator().manual_seed(4)
    conv, ssm = torch.randn(2, 8, 6, 3, generator=generator), torch.randn(2, 8, 2, 4, 4, generator=generator)
    source = torch.tensor([0, 1, 2, -1, 3, 9999], dtype=torch.int32)
    mask = torch.tensor([True, False, True, True, True, True])
    target = torch.tensor([7, 6, 5, 4, -1, 9999])
    expected = [x.clone() for x in (conv, ssm)]
    for x in expected:
        x[:, 7], x[:, 5] = x[:, 0].clone(), x[:, 2].clone()
    together = [x.clone() for x in (conv, ssm)]
    gdn.track_states_all_layers(*together, source, mask, target, 5)
    for layer in range(2):
        gdn.track_states(conv[layer], ssm[layer], source, mask, target, 5)
    for actual, again, truth in zip((conv, ssm), together, expected):
        assert_same_bits(actual, truth, name="layer by layer")
        assert_same_bits(again, truth, name="all layers")
