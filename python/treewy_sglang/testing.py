"""Comparators, the tolerance policy, and inputs that are awkward by default.

Policy. A kernel's error is judged against a yardstick, not a constant: the error that the sequential recurrence makes in
float32 (reference.recurrence with dtype=float32) on the same inputs, both measured against float64. Every (request, head)
is judged on its own, by its own yardstick, so one wrong head among thousands fails. For an element x of group (n, h):

    |actual - truth| <= FACTOR * max |yardstick - truth| over the group  +  floor  +  storage

floor    FLOOR_ULPS float32 ulps of the largest |truth| of the group: a group of few values can have a yardstick that is
         exact by luck, and a sum in another order may then still differ by its last bits
storage  half an ulp of x in the dtype that the result is stored in (float32: included in the floor), because rounding to
         the pool's or the activations' dtype is no error of the kernel

Comparisons are written `~(error <= tolerance)`, so NaN fails. Data that must be copied or left alone is compared bit for bit.
"""

import random
from dataclasses import dataclass, field

import torch

from . import reference, tree
from .stash import Stash

FACTOR = 2.0
FLOOR_ULPS = 2.0

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _coordinate(mask):
    return tuple(int(i) for i in mask.nonzero()[0])


def _storage_error(truth, dtype):
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(truth)
    info = torch.finfo(dtype)
    return 0.5 * info.eps * truth.abs().clamp(min=info.smallest_normal)


def assert_within_yardstick(actual, truth, yardstick, *, name, group_dims, dtype, factor=FACTOR, floor_ulps=FLOOR_ULPS):
    """Judge `actual` by the policy above; AssertionError names the worst element's coordinate and both values.

    actual: [..] of `dtype`; truth: float64, same shape; yardstick: the same quantity by the float32 recurrence, before any
    rounding to `dtype`. group_dims: dimensions that tell groups apart, such as (0, 2) for [request, node, head, v]."""
    if actual.dtype != dtype:
        raise AssertionError(f"{name}: dtype is {actual.dtype}, expected {dtype}")
    if truth.dtype != torch.float64:
        raise AssertionError(f"{name}: truth must be float64, got {truth.dtype}")
    if actual.shape != truth.shape or yardstick.shape != truth.shape:
        raise AssertionError(f"{name}: shapes differ: actual {tuple(actual.shape)}, truth {tuple(truth.shape)}, yardstick {tuple(yardstick.shape)}")
    if truth.numel() == 0:
        return
    if not bool(truth.isfinite().all()) or not bool(yardstick.isfinite().all()):
        raise AssertionError(f"{name}: truth or yardstick is not finite; the inputs of this test are no test")
    others = [d for d in range(truth.dim()) if d not in {g % truth.dim() for g in group_dims}]
    worst = lambda x: x.amax(others, keepdim=True) if others else x
    tolerance = (
        factor * worst((yardstick.double() - truth).abs())
        + floor_ulps * torch.finfo(torch.float32).eps * worst(truth.abs())
        + _storage_error(truth, dtype)
    )
    error = (actual.double() - truth).abs()
    bad = ~(error <= tolerance)
    if bool(bad.any()):
        # The most telling element: not-a-number first, then the largest error in units of its tolerance.
        rank = torch.where(bad, torch.nan_to_num(error / tolerance, nan=torch.inf, posinf=torch.inf), torch.zeros_like(error))
        at = _coordinate(rank == rank.max())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} elements are off; worst at {list(at)}: actual {actual[at].item():.9g}, "
            f"expected {truth[at].item():.9g}, error {error[at].item():.3g}, tolerance {tolerance[at].item():.3g} "
            f"({dtype}, group of dimensions {tuple(group_dims)})"
        )


def error_ratio(actual, truth, yardstick, *, group_dims):
    """Worst error of any group in units of that group's yardstick plus one float32 ulp; for reports, not for judging."""
    others = [d for d in range(truth.dim()) if d not in group_dims]
    worst = lambda x: x.amax(others) if others else x
    unit = worst((yardstick.double() - truth).abs()) + torch.finfo(torch.float32).eps * worst(truth.abs())
    return float((worst((actual.double() - truth).abs()) / unit.clamp(min=1e-300)).max())


def bits(x):
    """The tensor's bytes as integers, so that NaN equals itself and -0 differs from 0."""
    x = x.contiguous()
    return x.view(_INTS[x.element_size()]) if x.dtype.is_floating_point else x


def assert_same_bits(actual, expected, *, name):
    """Bit for bit equality; AssertionError names the first differing coordinate and both values."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(f"{name}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    differ = bits(actual) != bits(expected)
    if bool(differ.any()):
        at = _coordinate(differ)
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} elements differ; first at {list(at)}: {actual[at].item()!r}, expected {expected[at].item()!r}"
        )


def poison(x):
    """Fill a tensor in place with NaN (integers: the smallest value), so that what is not written shows."""
    return x.fill_(float("nan") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)


# ---- inputs ------------------------------------------------------------------------------------------------------------


def _cut(shape, dtype, generator, device, scale=1.0, before=3, after=5, align=8):
    """A [tokens, ..] view inside a larger poisoned tensor: foreign columns on both sides, foreign rows around."""
    tokens, inner = shape[0], torch.Size(shape[1:]).numel()
    big = torch.full((tokens + before + after, before * align + inner + after * align), float("nan"), dtype=dtype)
    view = big[before : before + tokens, before * align : before * align + inner]
    view.copy_(torch.randn(tokens, inner, generator=generator) * scale)
    big = big.to(device)
    return big[before : before + tokens, before * align : before * align + inner].unflatten(1, shape[1:])


def _lean(x, generator):
    """Adds one direction per head to all tokens, in place: keys of real models point alike, and only then do a node's
    ancestors weigh much in its solve."""
    return x.add_((torch.randn(x.shape[1:], generator=generator)).to(x))


def make_pool(layers, slots, content, dtype, generator, device, scale=0.5, slot_padding=64):
    """[layers, slots, *content] with NaN between the slots: the slot stride is larger than a slot's content."""
    inner = torch.Size(content).numel()
    big = torch.full((layers, slots, inner + slot_padding), float("nan"), dtype=dtype)
    big[..., :inner] = (torch.randn(layers, slots, inner, generator=generator) * scale).to(dtype)
    return big.to(device)[..., :inner].unflatten(2, content)


# (A_log, dt_bias) of heads: the extremes met in checkpoints, then decays so strong that e^G underflows within a few nodes.
GATE_CORNERS = ((2.8, -10.0), (2.8, 0.0), (-4.0, -2.0), (1.0, -5.0), (2.8, 6.0), (0.0, 0.0))


@dataclass
class Inputs:
    """Inputs of one verify call and of the commit after it; every tensor on `device`."""

    N: int
    T: int
    H: int
    HV: int
    K: int
    trees: list
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    pool: torch.Tensor  # [L, slots, HV, V, K]
    state_indices: torch.Tensor
    parents: torch.Tensor | None
    accepted: torch.Tensor
    mixed_qkv: torch.Tensor | None = None
    conv_weight: torch.Tensor | None = None
    conv_bias: torch.Tensor | None = None
    conv_pool: torch.Tensor | None = None  # [L, slots, D, W-1]
    extra: dict = field(default_factory=dict)

    @property
    def state(self):
        return self.pool[0]

    @property
    def live(self):
        return self.state_indices >= 0

    def args(self):
        """Arguments of tree_verify up to and including parents."""
        return self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, self.state, self.state_indices, self.parents

    def conv_args(self, layer=0):
        """Arguments of tree_conv_verify up to and including parents."""
        return (
            self.mixed_qkv, self.conv_weight, self.conv_bias, self.conv_pool[layer], self.a, self.b, self.A_log,
            self.dt_bias, self.pool[layer], self.state_indices, self.parents,
        )  # fmt: skip

    def stash(self, layers=1, extra_rows=2, extra_nodes=3, conv=False):
        """A poisoned stash with spare rows and nodes."""
        found = Stash.allocate(
            layers=layers, rows=self.N + extra_rows, nodes=self.T + extra_nodes, key_heads=self.H, value_heads=self.HV,
            key_dim=self.K, value_dim=self.K, conv_dim=self.mixed_qkv.shape[1] if conv else None,
            activation_dtype=self.q.dtype, device=self.q.device,
        )  # fmt: skip
        for x in (found.u, found.k, found.k_rnorm, found.g, found.conv):
            if x is not None:
                poison(x)
        return found

    def out(self, dtype=None):
        """A poisoned output, cut from a larger tensor."""
        tokens, inner = self.N * self.T, self.HV * self.K
        big = torch.empty(tokens + 2, inner + 16, dtype=dtype or self.q.dtype, device=self.q.device)
        return poison(big)[1:-1, 8:-8].unflatten(1, (self.HV, self.K))


def make_inputs(
    *, N=3, T=8, H=2, HV=4, K=128, act=torch.bfloat16, state=torch.float32, shape="random", seed=0, device="cpu",
    layers=1, padding=(), index_dtype=torch.int64, conv=False, width=4, bias=True, gate_dtype=torch.float32, align=8,
):  # fmt: skip
    """Random inputs with gates of real checkpoints, strided views, a padded pool, slots in random order.

    shape: a name of tree.SHAPES (each request gets its own tree) or "chain" (parents is None). padding: rows that get state
    index -1. align: views start at a multiple of this many elements; 1 makes them unaligned."""
    g = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    if shape == "chain":
        trees = [tree.chain(T) for _ in range(N)]
    else:
        trees = [tree.SHAPES[shape](T, rng) for _ in range(N)]
    cut = lambda *s, scale=1.0: _cut(s, act, g, device, scale, align=align)
    tokens = N * T
    slots = N + 5
    corner = [GATE_CORNERS[(i + seed) % len(GATE_CORNERS)] for i in range(HV)]
    indices = torch.randperm(slots, generator=g)[:N].to(index_dtype)
    for row in padding:
        indices[row] = -1
    found = Inputs(
        N=N, T=T, H=H, HV=HV, K=K, trees=trees,
        q=_lean(cut(tokens, H, K), g), k=_lean(cut(tokens, H, K), g), v=cut(tokens, HV, K),
        a=cut(tokens, HV, scale=2.0), b=cut(tokens, HV, scale=2.0),
        A_log=torch.tensor([c[0] for c in corner]).to(gate_dtype).to(device),
        dt_bias=torch.tensor([c[1] for c in corner]).to(gate_dtype).to(device),
        pool=make_pool(layers, slots, (HV, K, K), state, g, device),
        state_indices=indices.to(device),
        parents=None if shape == "chain" else tree.tensor(trees, device),
        accepted=torch.randint(0, T, (N,), generator=g).to(index_dtype).to(device),
    )  # fmt: skip
    if conv:
        D = 2 * H * K + HV * K
        found.mixed_qkv = cut(tokens, D)
        # Away from zero, so that redrawing an input (settle_conv) always moves its output.
        weight = (torch.rand(D, width, generator=g) + 0.3) * torch.randn(D, width, generator=g).sign()
        found.conv_weight = weight.to(act).to(device)
        found.conv_bias = (torch.randn(D, generator=g) * 0.2).to(act).to(device) if bias else None
        found.conv_pool = make_pool(layers, slots, (D, width - 1), act, g, device, scale=1.0)
        settle_conv(found, g)
    return found


def settle_conv(inputs, generator):
    """Redraw raw inputs whose convolution lies so near a rounding boundary of the activation dtype that float32 and float64
    may round it to different neighbours. What is left must round equally, so that the tests need no allowance for it."""
    act = inputs.mixed_qkv.dtype
    if act == torch.float32:
        return
    args = (inputs.conv_weight, inputs.conv_bias, inputs.conv_pool[0], inputs.state_indices, inputs.parents)
    if inputs.conv_pool.shape[0] > 1:
        raise ValueError("settle_conv looks at layer 0 only")
    for _ in range(50):
        exact = reference.conv(inputs.mixed_qkv, *args)
        windows = reference.conv_windows(inputs.mixed_qkv, args[2], args[3], args[4]).double()
        size = (windows * args[0].double()).abs().sum(-1).reshape(exact.shape)
        if args[1] is not None:
            size = size + args[1].double().abs()
        slack = size * 2.0**-22  # four roundings
        near = (exact - slack).to(act) != (exact + slack).to(act)
        if not bool(near.any()):
            return
        fresh = torch.randn(int(near.sum()), generator=generator).to(act).to(near.device)
        inputs.mixed_qkv[near] = fresh
    raise RuntimeError("settle_conv: no inputs without near ties found")
