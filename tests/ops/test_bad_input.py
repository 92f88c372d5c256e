"""Every bad argument raises a sentence with argument, value and allowed values before anything is written; bad values
inside tensors skip their row and are counted."""

import re

import pytest
import torch
from ops_common import BF16, F16, F32, by_node, run_verify, verify_layers

import treewy_sglang
from treewy_sglang import ops, tree
from treewy_sglang.stash import StashLayer
from treewy_sglang.testing import assert_same_bits, make_inputs, poison

N, T, H, HV, K = 3, 4, 2, 4, 64
D = 2 * H * K + HV * K


class Call:
    """One call's arguments by name; `written` are the tensors that the operator may write."""

    def __init__(self, device):
        x = self.x = make_inputs(N=N, T=T, H=H, HV=HV, K=K, act=BF16, layers=2, device=device)
        y = make_inputs(N=N, T=T, H=H, HV=HV, K=K, act=BF16, conv=True, device=device)
        self.device = device
        self.stash = x.stash(layers=2)
        self.conv_stash = y.stash(layers=1, conv=True)
        layer, conv_layer = self.stash.layer(0), self.conv_stash.layer(0)
        names = ("u", "k", "k_rnorm", "g", "conv")
        stash = lambda s: {f"stash_{n}": getattr(s, n) for n in names if getattr(s, n) is not None}
        common = dict(
            a=x.a, b=x.b, A_log=x.A_log, dt_bias=x.dt_bias, state=x.state, state_indices=x.state_indices,
            parents=x.parents, scale=0.125, out=x.out(),
        )  # fmt: skip
        errors = treewy_sglang.errors.counter(device)
        committed = verify_layers(y, 1, conv=True)
        self.args = {
            "tree_verify": dict(q=x.q, k=x.k, v=x.v, **common, **stash(layer), errors=errors),
            "tree_conv_verify": dict(
                mixed_qkv=y.mixed_qkv, conv_weight=y.conv_weight, conv_bias=y.conv_bias, conv_state=y.conv_pool[0],
                **{**common, "state": y.state, "state_indices": y.state_indices}, **stash(conv_layer), errors=errors,
            ),
            "commit": dict(
                **stash(committed), parents=y.parents, accepted=y.accepted, state_indices=y.state_indices,
                track_indices=torch.full((N,), -1, device=device), track_nodes=torch.full((N,), -1, device=device),
                state=y.pool, conv_state=y.conv_pool, errors=errors,
            ),
            "parents_from_links": dict(
                next_token=torch.full((N, T), -1, device=device), next_sibling=torch.full((N, T), -1, device=device),
                parents=poison(torch.empty(N, T, dtype=torch.int32, device=device)),
                ancestors=poison(torch.empty(N, T, 1, dtype=torch.int32, device=device)), errors=errors,
            ),
        }  # fmt: skip
        self.written = {
            "tree_verify": ["out", *(f"stash_{n}" for n in names[:4])],
            "tree_conv_verify": ["out", *(f"stash_{n}" for n in names)],
            "commit": ["state", "conv_state"],
            "parents_from_links": ["parents", "ancestors"],
        }

    def run(self, op, **changes):
        getattr(torch.ops.treewy, op)(**{**self.args[op], **changes})


@pytest.fixture
def call(device):
    return Call(device)


def cut(*shape, dtype=BF16):
    return lambda t: torch.zeros(*shape, dtype=dtype, device=t.device)


def to(dtype):
    return lambda t: t.to(dtype)


def every_second(t):
    """The same shape with a last-dimension stride of 2."""
    return torch.stack([t, t], -1).flatten(-2)[..., ::2]


def other_device(t):
    return t.to("meta") if t.device.type == "cpu" else t.cpu()


def expanded(t):
    return t[:1].expand(t.shape)


FLOATS = "allowed: torch.float32, torch.bfloat16, torch.float16"
# (operator, argument, how it is spoiled, what the message says of value and allowed values)
CASES = [
    # wrong dtype
    ("tree_verify", "q", to(torch.float64), f"dtype is torch.float64; {FLOATS}"),
    ("tree_verify", "k", to(F16), "dtype is torch.float16; allowed: torch.bfloat16"),
    ("tree_verify", "v", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_verify", "a", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_verify", "b", to(F16), "dtype is torch.float16; allowed: torch.bfloat16"),
    ("tree_verify", "A_log", to(torch.float64), f"dtype is torch.float64; {FLOATS}"),
    ("tree_verify", "dt_bias", to(torch.int32), f"dtype is torch.int32; {FLOATS}"),
    ("tree_verify", "state", to(torch.float64), f"dtype is torch.float64; {FLOATS}"),
    ("tree_verify", "state_indices", to(torch.int16), "dtype is torch.int16; allowed: torch.int32, torch.int64"),
    ("tree_verify", "parents", to(torch.int64), "dtype is torch.int64; allowed: torch.int32"),
    ("tree_verify", "out", to(F16), "dtype is torch.float16; allowed: torch.bfloat16, torch.float32"),
    ("tree_verify", "stash_u", to(BF16), "dtype is torch.bfloat16; allowed: torch.float32"),
    ("tree_verify", "stash_k", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_verify", "stash_k_rnorm", to(torch.float64), "dtype is torch.float64; allowed: torch.float32"),
    ("tree_verify", "stash_g", to(BF16), "dtype is torch.bfloat16; allowed: torch.float32"),
    ("tree_verify", "errors", to(torch.int32), "dtype is torch.int32; allowed: torch.int64"),
    ("tree_conv_verify", "mixed_qkv", to(torch.int32), f"dtype is torch.int32; {FLOATS}"),
    ("tree_conv_verify", "conv_weight", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_conv_verify", "conv_bias", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_conv_verify", "conv_state", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("tree_conv_verify", "stash_conv", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("commit", "state", to(torch.float64), f"dtype is torch.float64; {FLOATS}"),
    ("commit", "conv_state", to(torch.float64), f"dtype is torch.float64; {FLOATS}"),
    ("commit", "stash_u", to(BF16), "dtype is torch.bfloat16; allowed: torch.float32"),
    ("commit", "stash_conv", to(F32), "dtype is torch.float32; allowed: torch.bfloat16"),
    ("commit", "accepted", to(torch.int16), "dtype is torch.int16; allowed: torch.int32, torch.int64"),
    ("commit", "track_nodes", to(F32), "dtype is torch.float32; allowed: torch.int32, torch.int64"),
    ("commit", "parents", to(torch.int64), "dtype is torch.int64; allowed: torch.int32"),
    ("parents_from_links", "next_token", to(torch.int16), "dtype is torch.int16; allowed: torch.int32, torch.int64"),
    ("parents_from_links", "next_sibling", to(torch.int32), "dtype is torch.int32; allowed: torch.int64"),
    ("parents_from_links", "parents", to(torch.int64), "dtype is torch.int64; allowed: torch.int32"),
    ("parents_from_links", "ancestors", to(torch.int64), "dtype is torch.int64; allowed: torch.int32"),
    # wrong rank
    ("tree_verify", "q", lambda t: t.flatten(1), "rank is 2 (shape [12, 128]); allowed: 3, shape [N*T, H, K]"),
    ("tree_verify", "v", lambda t: t[None], "rank is 4 (shape [1, 12, 4, 64]); allowed: 3, shape [N*T, HV, V]"),
    ("tree_verify", "state", lambda t: t[None], "rank is 5 (shape [1, 8, 4, 64, 64]); allowed: 4, shape [slots, HV, V, K]"),
    ("tree_verify", "state_indices", lambda t: t[:, None], "rank is 2 (shape [3, 1]); allowed: 1, shape [N]"),
    ("tree_verify", "parents", lambda t: t.flatten(), "rank is 1 (shape [12]); allowed: 2, shape [N, T]"),
    ("tree_verify", "A_log", lambda t: t[None], "rank is 2 (shape [1, 4]); allowed: 1, shape [HV]"),
    ("tree_verify", "stash_u", lambda t: t[None], "allowed: 4, shape [R, HV, Tc, V]"),
    ("tree_conv_verify", "conv_state", lambda t: t[None], "allowed: 3, shape [slots, D, W-1]"),
    ("tree_conv_verify", "stash_conv", lambda t: t[None], "allowed: 3, shape [R, Tc, D]"),
    ("commit", "state", lambda t: t[0], "rank is 4 (shape [8, 4, 64, 64]); allowed: 5, shape [L, slots, HV, V, K]"),
    ("commit", "stash_k", lambda t: t[0], "allowed: 5, shape [L, R, H, Tc, K]"),
    ("commit", "accepted", lambda t: t[:, None], "rank is 2 (shape [3, 1]); allowed: 1, shape [N]"),
    ("parents_from_links", "next_token", lambda t: t[0], "rank is 1 (shape [4]); allowed: 2, shape [N, T]"),
    ("parents_from_links", "ancestors", lambda t: t[0], "allowed: 3, shape [N, T, ceil(T/32)]"),
    # wrong device
    *[(op, name, other_device, "device is ") for op, name in [
        ("tree_verify", "k"), ("tree_verify", "a"), ("tree_verify", "state"), ("tree_verify", "state_indices"),
        ("tree_verify", "parents"), ("tree_verify", "out"), ("tree_verify", "stash_g"), ("tree_verify", "errors"),
        ("tree_conv_verify", "conv_weight"), ("tree_conv_verify", "conv_state"), ("tree_conv_verify", "stash_conv"),
        ("commit", "stash_u"), ("commit", "accepted"), ("commit", "conv_state"),
        ("parents_from_links", "next_sibling"), ("parents_from_links", "parents"),
    ]],  # fmt: skip
    # wrong stride
    *[("tree_verify", name, every_second, "is 2; allowed: 1") for name in
        ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "state_indices", "parents", "out", "stash_u", "stash_k", "stash_k_rnorm", "stash_g")],
    *[("tree_conv_verify", name, every_second, "is 2; allowed: 1") for name in ("mixed_qkv", "conv_weight", "conv_bias", "stash_conv")],
    *[("commit", name, every_second, "is 2; allowed: 1") for name in ("state", "stash_u", "stash_k", "stash_conv", "accepted", "track_nodes", "parents")],
    *[("parents_from_links", name, every_second, "is 2; allowed: 1") for name in ("next_token", "next_sibling", "parents")],
    ("tree_verify", "state", lambda t: t[..., :64, :].transpose(2, 3).contiguous().transpose(2, 3), "is 64; allowed: 1"),
    ("tree_verify", "state", lambda t: torch.cat([t, t], 3)[..., :64], "stride of dimension 2 is 128; allowed: 64"),
    ("tree_verify", "stash_u", lambda t: torch.cat([t, t], 3)[..., :64], "stride of dimension 2 is 128; allowed: 64"),
    ("commit", "stash_k", lambda t: torch.cat([t, t], 4)[..., :64], "stride of dimension 3 is 128; allowed: 64"),
    ("parents_from_links", "ancestors", lambda t: torch.cat([t, t], 0)[::2], "allowed: contiguous"),
    ("tree_verify", "out", expanded, "map several elements to one address"),
    ("tree_verify", "stash_u", expanded, "map several elements to one address"),
    ("commit", "state", lambda t: t[:, :1].expand(t.shape), "map several elements to one address"),
    # K, V, T, W out of range
    ("tree_verify", "state", cut(8, HV, 32, 32), "K is 32; allowed: 64, 128, 256"),
    ("tree_verify", "state", cut(8, HV, 96, 96), "K is 96; allowed: 64, 128, 256"),
    ("tree_verify", "state", cut(8, HV, 128, 64), "V is 128 and K is 64; allowed: V = K"),
    ("tree_verify", "state", cut(8, HV, 512, 512), "K is 512; allowed: 64, 128, 256"),
    ("commit", "state", cut(1, 8, HV, 80, 80), "K is 80; allowed: 64, 128, 256"),
    ("tree_verify", "q", cut(N * 129, H, K), "T (draft nodes a request) is 129; allowed: 1 to 128"),
    ("tree_verify", "q", cut(0, H, K), "T (draft nodes a request) is 0; allowed: 1 to 128"),
    ("tree_verify", "q", cut(N * T + 1, H, K), "has 13 tokens; allowed: a multiple of N = 3"),
    ("tree_conv_verify", "mixed_qkv", cut(N * 129, D), "T (draft nodes a request) is 129; allowed: 1 to 128"),
    ("commit", "parents", cut(N, 129, dtype=torch.int32), "T (draft nodes a request) is 129; allowed: 1 to 128"),
    ("commit", "parents", cut(N, 0, dtype=torch.int32), "T (draft nodes a request) is 0; allowed: 1 to 128"),
    ("parents_from_links", "next_token", cut(N, 129, dtype=torch.int64), "T (draft nodes a request) is 129; allowed: 1 to 128"),
    ("tree_conv_verify", "conv_weight", cut(D, 5), "W (convolution width) is 5; allowed: 2 to 4"),
    ("tree_conv_verify", "conv_weight", cut(D, 1), "W (convolution width) is 1; allowed: 2 to 4"),
    ("commit", "conv_state", cut(1, 8, D, 4), "W (its last dimension plus 1) is 5; allowed: 2 to 4"),
    # shapes that do not fit together
    ("tree_verify", "q", cut(N * T, 3, K), "HV (value heads) is 4 and H (key heads) is 3; allowed: HV a multiple of H"),
    ("tree_verify", "q", cut(N * T, 0, K), "HV (value heads) is 4 and H (key heads) is 0"),
    ("commit", "stash_k", cut(1, N, 3, T, K), "HV (value heads) is 4 and H (key heads) is 3; allowed: HV a multiple of H"),
    ("tree_verify", "q", cut(N * T, H, 128), "size of dimension 2 is 128 (shape [12, 2, 128]); allowed: 64"),
    ("tree_verify", "k", cut(N * T, 1, K), "size of dimension 1 is 1 (shape [12, 1, 64]); allowed: 2"),
    ("tree_verify", "k", cut(N * T - 1, H, K), "size of dimension 0 is 11 (shape [11, 2, 64]); allowed: 12"),
    ("tree_verify", "v", cut(N * T, 3, K), "size of dimension 1 is 3 (shape [12, 3, 64]); allowed: 4"),
    ("tree_verify", "a", cut(N * T, 3), "size of dimension 1 is 3 (shape [12, 3]); allowed: 4"),
    ("tree_verify", "A_log", cut(3, dtype=F32), "size of dimension 0 is 3 (shape [3]); allowed: 4"),
    ("tree_verify", "parents", cut(N, T + 1, dtype=torch.int32), "size of dimension 1 is 5 (shape [3, 5]); allowed: 4"),
    ("tree_verify", "parents", cut(N - 1, T, dtype=torch.int32), "size of dimension 0 is 2 (shape [2, 4]); allowed: 3"),
    ("tree_verify", "out", cut(N * T, HV, 32), "size of dimension 2 is 32 (shape [12, 4, 32]); allowed: 64"),
    ("tree_verify", "errors", cut(4, dtype=torch.int64), "size of dimension 0 is 4 (shape [4]); allowed: 8"),
    ("tree_conv_verify", "mixed_qkv", cut(N * T, D + 64), "D (channels) is 576; allowed: 2*H*K + HV*V with K = 64 and HV*V = 256"),
    ("tree_conv_verify", "mixed_qkv", cut(N * T, 256), "D (channels) is 256; allowed: 2*H*K + HV*V"),
    ("tree_conv_verify", "conv_weight", cut(D - 1, 4), "size of dimension 0 is 511 (shape [511, 4]); allowed: 512"),
    ("tree_conv_verify", "conv_bias", cut(D - 1), "size of dimension 0 is 511 (shape [511]); allowed: 512"),
    ("tree_conv_verify", "conv_state", cut(8, D, 2), "size of dimension 2 is 2 (shape [8, 512, 2]); allowed: 3"),
    ("tree_conv_verify", "conv_state", cut(7, D, 3), "size of dimension 0 is 7 (shape [7, 512, 3]); allowed: 8"),
    ("commit", "accepted", cut(N - 1, dtype=torch.int64), "size of dimension 0 is 2 (shape [2]); allowed: 3"),
    ("commit", "track_indices", lambda t: None, "is None although 'track_nodes' is given; allowed: both or neither"),
    ("commit", "track_nodes", lambda t: None, "is None although 'track_indices' is given; allowed: both or neither"),
    ("commit", "conv_state", lambda t: None, "is None although 'stash_conv' is given; allowed: both or neither"),
    ("commit", "stash_conv", lambda t: None, "is None although 'conv_state' is given; allowed: both or neither"),
    ("commit", "conv_state", cut(2, 8, D, 3), "size of dimension 0 is 2 (shape [2, 8, 512, 3]); allowed: 1"),
    ("parents_from_links", "next_sibling", cut(N, T + 1, dtype=torch.int64), "size of dimension 1 is 5 (shape [3, 5]); allowed: 4"),
    ("parents_from_links", "parents", cut(N, T - 1, dtype=torch.int32), "size of dimension 1 is 3 (shape [3, 3]); allowed: 4"),
    ("parents_from_links", "ancestors", cut(N, T, 2, dtype=torch.int32), "size of dimension 2 is 2 (shape [3, 4, 2]); allowed: 1"),
    # stash too small
    ("tree_verify", "stash_u", cut(N - 1, HV, T, K, dtype=F32), "size of dimension 0 is 2 (shape [2, 4, 4, 64]); allowed: at least 3 (rows"),
    ("tree_verify", "stash_u", cut(N, HV, T - 1, K, dtype=F32), "size of dimension 2 is 3 (shape [3, 4, 3, 64]); allowed: at least 4 (nodes"),
    ("tree_verify", "stash_k", cut(N - 1, H, T, K), "size of dimension 0 is 2 (shape [2, 2, 4, 64]); allowed: at least 3 (rows"),
    ("tree_verify", "stash_k_rnorm", cut(N, H, T - 1, dtype=F32), "size of dimension 2 is 3 (shape [3, 2, 3]); allowed: at least 4 (nodes"),
    ("tree_verify", "stash_g", cut(N, HV, T - 1, dtype=F32), "size of dimension 2 is 3 (shape [3, 4, 3]); allowed: at least 4 (nodes"),
    ("tree_verify", "stash_g", cut(N, H, T, dtype=F32), "size of dimension 1 is 2 (shape [3, 2, 4]); allowed: 4"),
    ("tree_conv_verify", "stash_conv", cut(N, T - 1, D), "size of dimension 1 is 3 (shape [3, 3, 512]); allowed: at least 4 (nodes"),
    ("tree_conv_verify", "stash_conv", cut(N - 1, T, D), "size of dimension 0 is 2 (shape [2, 4, 512]); allowed: at least 3 (rows"),
    ("commit", "stash_u", cut(1, N - 1, HV, T, K, dtype=F32), "size of dimension 1 is 2 (shape [1, 2, 4, 4, 64]); allowed: at least 3 (rows"),
    ("commit", "stash_g", cut(1, N, HV, T - 1, dtype=F32), "size of dimension 3 is 3 (shape [1, 3, 4, 3]); allowed: at least 4 (nodes"),
    ("commit", "stash_u", cut(2, N, HV, T, K, dtype=F32), "size of dimension 0 is 2 (shape [2, 3, 4, 4, 64]); allowed: 1"),
]


@pytest.mark.parametrize("op,name,spoil,message", CASES, ids=[f"{i}-{c[0]}-{c[1]}" for i, c in enumerate(CASES)])
def test_bad_argument(call, op, name, spoil, message):
    args = call.args[op]
    before = {w: args[w].clone() for w in call.written[op]}
    with pytest.raises(RuntimeError) as error:
        call.run(op, **{name: spoil(args[name])})
    text = str(error.value)
    assert f"treewy::{op}: argument '" in text
    assert message in text
    # The argument named is the one spoiled, except where one tensor sets the measure that another fails.
    assert f"'{name}'" in text or name in ("q", "k", "next_token", "state", "mixed_qkv", "parents", "stash_k", "conv_state", "stash_conv", "track_indices", "track_nodes"), text
    for w, old in before.items():
        assert_same_bits(args[w], old, name=f"{w} after a refused call")


def test_good_arguments_pass(call):
    """The cases above fail for what they spoil: unspoiled, every call runs."""
    for op in call.args:
        call.run(op)


def test_empty_batch(call):
    """No request: nothing to do and nothing written."""
    x = call.x
    none = lambda t: t[:0]
    out = none(x.out())
    ops.tree_verify(none(x.q), none(x.k), none(x.v), none(x.a), none(x.b), x.A_log, x.dt_bias, x.state, none(x.state_indices), x.parents[:0, :1], out, call.stash.layer(0))  # fmt: skip
    # As a server has them: the trees of a batch without a request are still T wide.
    ops.tree_verify(none(x.q), none(x.k), none(x.v), none(x.a), none(x.b), x.A_log, x.dt_bias, x.state, none(x.state_indices), x.parents[:0], out, call.stash.layer(0))  # fmt: skip
    c = make_inputs(N=N, T=T, H=H, HV=HV, K=K, conv=True, device=call.device)
    ops.tree_conv_verify(none(c.mixed_qkv), c.conv_weight, None, c.conv_pool[0], none(c.a), none(c.b), c.A_log, c.dt_bias, c.state, none(c.state_indices), c.parents[:0], none(c.out()), c.stash(conv=True).layer(0))  # fmt: skip
    before = x.pool.clone()
    ops.commit(call.stash, x.parents[:0], none(x.accepted), none(x.state_indices), x.pool)
    assert_same_bits(x.pool, before, name="pool")


def test_facade_names_the_missing_conv_stash(call):
    x = make_inputs(N=N, T=T, H=H, HV=HV, K=K, conv=True, device=call.device)
    with pytest.raises(RuntimeError, match="no conv tensor; allowed: a stash allocated with conv_dim"):
        ops.tree_conv_verify(*x.conv_args(), x.out(), x.stash().layer(0))


# ---- values inside tensors ---------------------------------------------------------------------------------------------


def counted(device, **expected):
    got = treewy_sglang.check_errors(device)
    assert got == {**dict.fromkeys(("parent", "state_index", "accepted_node", "track", "link"), 0), **expected}
    assert not any(treewy_sglang.check_errors(device).values()), "reading resets"


PARENT_FAULTS = {"root": (0, 0), "itself": (2, 2), "a later node": (1, 3), "past the end": (3, T), "below -1": (2, -2), "huge": (3, 2**31 - 1), "tiny": (3, -(2**31))}
SLOT_FAULTS = {"slots": 8, "far": 10**6, "-2": -2, "most": 2**31 - 1, "least": -(2**31)}


@pytest.mark.parametrize("conv", [False, True], ids=["plain", "conv"])
@pytest.mark.parametrize("fault", [*PARENT_FAULTS, *SLOT_FAULTS])
def test_verify_skips_and_counts_bad_rows(device, fault, conv):
    good = make_inputs(N=N, T=T, H=H, HV=HV, K=K, conv=conv, device=device)
    bad = make_inputs(N=N, T=T, H=H, HV=HV, K=K, conv=conv, device=device)
    if fault in PARENT_FAULTS:
        node, value = PARENT_FAULTS[fault]
        bad.parents[1, node] = value
    else:
        bad.state_indices[1] = SLOT_FAULTS[fault]
    out, stash, want, want_stash = bad.out(), bad.stash(conv=conv), good.out(), good.stash(conv=conv)
    run_verify(good, want, want_stash.layer(0), conv)
    run_verify(bad, out, stash.layer(0), conv)
    counted(device, **{"parent" if fault in PARENT_FAULTS else "state_index": 1})
    by_node(want, good)[1] = 0
    assert_same_bits(out.contiguous(), want.contiguous(), name="out: zeros in the bad row, the others as if it were good")
    for name in ("u", "k", "k_rnorm", "g", "conv"):
        if getattr(stash, name) is not None:
            poison(getattr(want_stash, name)[:, 1])
            assert_same_bits(getattr(stash, name), getattr(want_stash, name), name=f"stash {name}: bad row untouched")


def test_a_row_counts_once_and_padding_never(device):
    """HV heads and two kinds of fault count one error, under the slot; a padding row may hold any parents."""
    x = make_inputs(N=4, T=T, H=H, HV=HV, K=K, padding=(3,), device=device)
    x.parents[0, 2] = 7
    x.parents[1, 2], x.state_indices[1] = 7, 99
    x.parents[3] = 12345
    for _ in range(3):
        run_verify(x, x.out(), x.stash().layer(0))
    counted(device, parent=3, state_index=3)


COMMIT_FAULTS = {
    "accepted = T": ("accepted", T, "accepted_node"),
    "accepted = -2": ("accepted", -2, "accepted_node"),
    "accepted far": ("accepted", 2**31 - 1, "accepted_node"),
    "slot = slots": ("state_indices", 8, "state_index"),
    "slot = -2": ("state_indices", -2, "state_index"),
    "slot far": ("state_indices", 2**31 - 1, "state_index"),
    "track slot = slots": ("track_indices", 8, "track"),
    "track slot = -2": ("track_indices", -2, "track"),
    "track node = T": ("track_nodes", T, "track"),
    "track node = -2": ("track_nodes", -2, "track"),
    "track node off the path": ("track_nodes", 1, "track"),
    "parent": ("parents", 3, "parent"),
}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("fault", COMMIT_FAULTS)
def test_commit_skips_and_counts_bad_rows(device, fault, index_dtype):
    name, value, kind = COMMIT_FAULTS[fault]
    x = make_inputs(N=N, T=T, H=H, HV=HV, K=K, layers=1, conv=True, index_dtype=index_dtype, device=device)
    x.parents = tree.tensor([[-1, 0, 0, 2]] * N, device)
    x.accepted.fill_(3)
    free = [s for s in range(8) if s not in x.state_indices.tolist()]
    track_indices = torch.tensor(free[:N], dtype=index_dtype, device=device)
    track_nodes = torch.tensor([0, 2, 3], dtype=index_dtype, device=device)
    stash = verify_layers(x, 1, conv=True)
    want, want_conv = x.pool.clone(), x.conv_pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, want, want_conv, track_indices, track_nodes)
    for slot in (int(x.state_indices[1]), int(track_indices[1])):
        want[:, slot], want_conv[:, slot] = x.pool[:, slot], x.conv_pool[:, slot]
    changed = dict(parents=x.parents, accepted=x.accepted, state_indices=x.state_indices, track_indices=track_indices, track_nodes=track_nodes)
    changed[name] = changed[name].clone()
    changed[name][(1, 2) if name == "parents" else 1] = value
    pool, conv_pool = x.pool.clone(), x.conv_pool.clone()
    ops.commit(stash, changed["parents"], changed["accepted"], changed["state_indices"], pool, conv_pool, changed["track_indices"], changed["track_nodes"])
    counted(device, **{kind: 1})
    assert_same_bits(pool, want, name="pool: the bad row's slots untouched, the others committed")
    assert_same_bits(conv_pool, want_conv, name="conv pool: the bad row's slots untouched, the others committed")


def test_commit_of_nothing_is_no_error(device):
    """Padding rows and rows that accept nothing are silent, whatever their other values are."""
    x = make_inputs(N=2, T=T, H=H, HV=HV, K=K, device=device)
    stash = verify_layers(x, 1)
    x.accepted[0], x.state_indices[0] = 99, -1
    x.accepted[1], x.parents[1] = -1, 77
    before = x.pool.clone()
    ops.commit(stash, x.parents, x.accepted, x.state_indices, x.pool)
    assert_same_bits(x.pool, before, name="pool")


def test_check_errors_without_reset_and_over_devices(device):
    x = make_inputs(N=2, T=T, H=H, HV=HV, K=K, device=device)
    x.state_indices[0] = 99
    run_verify(x, x.out(), x.stash().layer(0))
    assert treewy_sglang.check_errors(device, reset=False)["state_index"] == 1
    assert treewy_sglang.check_errors(reset=False)["state_index"] == 1
    assert treewy_sglang.check_errors()["state_index"] == 1
    assert treewy_sglang.check_errors()["state_index"] == 0


def test_messages_quote_shapes_in_full(call):
    with pytest.raises(RuntimeError) as error:
        call.run("tree_verify", k=torch.zeros(12, 1, 64, dtype=BF16, device=call.device))
    assert re.search(r"argument 'k': size of dimension 1 is 1 \(shape \[12, 1, 64\]\); allowed: 2 \(H, the heads of 'q'\)", str(error.value))


def test_stash_layer_fields():
    assert [f for f in StashLayer.__dataclass_fields__] == ["u", "k", "k_rnorm", "g", "conv"]
