"""What the operator tests share: run an operator, then judge everything it wrote and everything it must not write."""

import dataclasses

import torch

from treewy_sglang import ops, reference
from treewy_sglang.testing import assert_same_bits, assert_within_yardstick, poison

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def storage(x):
    """The whole storage of a view, as a flat tensor: also what lies between and around its elements."""
    return torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


class Untouched:
    """Remembers whole storages and tells whether a later state differs outside the elements that may be written."""

    def __init__(self, **tensors):
        self.tensors = {name: (x, storage(x).clone()) for name, x in tensors.items() if x is not None}

    def check(self, **written):
        """written: per name, a function that fills the elements which the operator may write in a view like the tensor's."""
        for name, (x, before) in self.tensors.items():
            after = storage(x).clone()
            if name in written:
                view = lambda flat: torch.as_strided(flat, x.shape, x.stride(), x.storage_offset())
                before = before.clone()
                written[name](view(before))
                written[name](view(after))
            assert_same_bits(after, before, name=f"{name}, outside of what may be written")


def zero_(index):
    def fill(view):
        view[index] = 0

    return fill


def live_rows(x):
    return [n for n in range(x.N) if int(x.state_indices[n]) >= 0]


def by_node(t, x):
    """[N*T, ...] as [N, T, ...]."""
    return t.reshape(x.N, x.T, *t.shape[1:])


def layer_of(x, i):
    """Inputs of another layer: the same trees and slots, other activations, states of pool layer `i`."""
    if i == 0:
        return x
    roll = lambda t: None if t is None else torch.roll(t, i, 0)
    return dataclasses.replace(
        x, q=roll(x.q), k=roll(x.k), v=roll(x.v), a=roll(x.a), b=roll(x.b), mixed_qkv=roll(x.mixed_qkv),
        pool=x.pool[i:], conv_pool=None if x.conv_pool is None else x.conv_pool[i:],
    )  # fmt: skip


def truths(x, conv=False, nodes=None):
    """(float64 truth, float32 yardstick) of one verify call."""
    if conv:
        exact = reference.tree_conv_verify(*x.conv_args(), nodes=nodes)
        rough = reference.tree_conv_verify(*x.conv_args(), nodes=nodes, dtype=F32)
    else:
        exact = reference.recurrence(*x.args(), nodes=nodes)
        rough = reference.recurrence(*x.args(), nodes=nodes, dtype=F32)
    return exact, rough


def run_verify(x, out, stash_layer, conv=False):
    if conv:
        ops.tree_conv_verify(*x.conv_args(), out, stash_layer)
    else:
        ops.tree_verify(*x.args(), out, stash_layer)


def check_verify(x, conv=False, out_dtype=None):
    """Run verify twice and judge out, stash and everything around them. Returns the stash."""
    stash, out = x.stash(conv=conv), x.out(out_dtype)
    reads = dict(q=x.q, k=x.k, v=x.v, a=x.a, b=x.b, pool=x.pool, mixed_qkv=x.mixed_qkv, conv_pool=x.conv_pool)
    writes = dict(u=stash.u, k=stash.k, k_rnorm=stash.k_rnorm, g=stash.g, conv=stash.conv)
    unread = Untouched(**{f"{name} (read only)": t for name, t in reads.items()})
    unwritten = Untouched(out=out, **writes)
    run_verify(x, out, stash.layer(0), conv)
    rows = live_rows(x)
    live = torch.tensor(rows, device=out.device, dtype=torch.long)
    unread.check()
    unwritten.check(
        out=zero_(...),
        u=lambda s: s[0, :, :, : x.T].index_fill_(0, live, 0),
        k=lambda s: s[0, :, :, : x.T].index_fill_(0, live, 0),
        k_rnorm=lambda s: s[0, :, :, : x.T].index_fill_(0, live, 0),
        g=lambda s: s[0, :, :, : x.T].index_fill_(0, live, 0),
        conv=lambda s: s[0, :, : x.T].index_fill_(0, live, 0),
    )

    exact, rough = truths(x, conv)
    got = by_node(out, x)
    dead = [n for n in range(x.N) if n not in rows]
    if dead:
        assert_same_bits(got[dead], torch.zeros_like(got[dead]), name="out of padding rows")
    if rows:
        assert_within_yardstick(
            got[rows], by_node(exact.out, x)[rows], by_node(rough.out, x)[rows],
            name="out [request, node, head, v]", group_dims=(0, 2), dtype=out_dtype or x.q.dtype,
        )  # fmt: skip
        assert_within_yardstick(
            stash.u[0, rows, :, : x.T], exact.u[rows], rough.u[rows], name="stash u [request, head, node, v]",
            group_dims=(0, 1), dtype=F32,
        )  # fmt: skip
        # One value a node: its own scale is the only sensible one.
        assert_within_yardstick(
            stash.g[0, rows, :, : x.T], exact.g[rows], rough.g[rows], name="stash g [request, head, node]",
            group_dims=(0, 1, 2), dtype=F32, floor_ulps=8.0,
        )  # fmt: skip
        assert_within_yardstick(
            stash.k_rnorm[0, rows, :, : x.T], exact.k_rnorm[rows], rough.k_rnorm[rows],
            name="stash k_rnorm [request, head, node]", group_dims=(0, 1), dtype=F32,
        )  # fmt: skip
        if conv:
            hv, vdim, kdim = x.state.shape[1:]
            born = reference.conv(*x.conv_args()[:4], x.state_indices, x.parents).to(x.q.dtype)
            k = reference.split(born, x.H, hv, kdim, vdim)[1]
            columns = by_node(x.mixed_qkv, x)
            assert_same_bits(stash.conv[0, rows, : x.T], columns[rows].contiguous(), name="stash conv [request, node, channel]")
        else:
            k = x.k
        want = by_node(k, x).transpose(1, 2)[rows]
        if conv and x.q.dtype == F32:  # nothing rounds the convolution, so its last bits may differ
            torch.testing.assert_close(stash.k[0, rows, :, : x.T], want.float(), rtol=2e-6, atol=2e-6)
        else:
            assert_same_bits(stash.k[0, rows, :, : x.T].contiguous(), want.contiguous(), name="stash k [request, head, node, k]")

    # Once more into fresh poison: the same bits.
    again, out2 = x.stash(conv=conv), x.out(out_dtype)
    run_verify(x, out2, again.layer(0), conv)
    assert_same_bits(out2.contiguous(), out.contiguous(), name="out of a second run")
    for name in ("u", "k", "k_rnorm", "g", "conv"):
        if getattr(stash, name) is not None:
            assert_same_bits(getattr(again, name), getattr(stash, name), name=f"stash {name} of a second run")
    return stash


def verify_layers(x, layers, conv=False):
    """One stash over `layers` layers, filled by the operator."""
    stash = x.stash(layers=layers, conv=conv)
    out = poison(torch.empty(x.N * x.T, x.HV, x.K, device=x.q.device, dtype=x.q.dtype))
    for i in range(layers):
        run_verify(layer_of(x, i), out, stash.layer(i), conv)
    return stash
