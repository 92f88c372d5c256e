"""The four operators: torch.ops.treewy.* with the error counter filled in and the stash passed as one object.

Axes: N requests, T draft nodes a request (1 to 128), H key heads, HV value heads (a multiple of H), K = V head dimension
(64, 128 or 256), L layers, D = 2*H*K + HV*V convolution channels, W convolution width (2 to 4). Dtypes: "act" is float32,
bfloat16 or float16 and the same for all activations of a call; the state pool has its own, one of the same three.

Every argument is written in place into tensors that the caller owns; nothing is returned. A bad argument raises
RuntimeError naming argument, value and allowed values before anything is written. Bad values inside integer tensors skip
the row (zeros in `out`, nothing else written) and are counted, see `treewy_sglang.check_errors`. All operators can be
captured in CUDA graphs. Formulas: reference.py.
"""

import torch

from . import _library  # noqa: F401  (loads the operators)
from .errors import counter

_ops = torch.ops.treewy


def tree_verify(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, out, stash_layer, scale=None):
    """Outputs of every node of N draft trees over Gated DeltaNet states that stay unchanged.

    q, k           act    [N*T, H, K]          strided views are fine as long as the last stride is 1, here and below
    v              act    [N*T, HV, V]
    a, b           act    [N*T, HV]            gate inputs: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
    A_log, dt_bias float  [HV]                 each of float32, bfloat16, float16
    state          float  [slots, HV, V, K]    read only
    state_indices  int    [N]                  slot of each request; -1: padding row (zeros in out, nothing else)
    parents        int32  [N, T] or None       parent node, -1: child of the committed state; None: a chain
    out            act or float32 [N*T, HV, V] written
    stash_layer    StashLayer                  written: rows 0..N-1, nodes 0..T-1
    scale          multiplies q after normalisation; None: K^-0.5
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    s = stash_layer
    _ops.tree_verify(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale,
        out, s.u, s.k, s.k_rnorm, s.g, counter(state.device),
    )  # fmt: skip


def tree_conv_verify(
    mixed_qkv, conv_weight, conv_bias, conv_state, a, b, A_log, dt_bias, state, state_indices, parents, out,
    stash_layer, scale=None,
):  # fmt: skip
    """`tree_verify` from the raw projection: causal convolution over ancestors, SiLU and split come first.

    mixed_qkv    act [N*T, D]          channels: q heads, k heads, v heads
    conv_weight  act [D, W]            last column: the node itself
    conv_bias    act [D] or None
    conv_state   act [slots, D, W-1]   last column: the most recent token; any strides; read only

    The output of the convolution is rounded to the activation dtype, so both forms see the same q, k and v. The raw
    columns of the nodes go into `stash_layer.conv`. The rest as in `tree_verify`.
    """
    if scale is None:
        scale = state.shape[-1] ** -0.5
    s = stash_layer
    if s.conv is None:
        raise RuntimeError("treewy::tree_conv_verify: argument 'stash_layer': has no conv tensor; allowed: a stash allocated with conv_dim")  # fmt: skip
    _ops.tree_conv_verify(
        mixed_qkv, conv_weight, conv_bias, conv_state, a, b, A_log, dt_bias, state, state_indices, parents, scale,
        out, s.u, s.k, s.k_rnorm, s.g, s.conv, counter(state.device),
    )  # fmt: skip


def commit(
    stash, parents, accepted, state_indices, state, conv_state=None, track_indices=None, track_nodes=None, nodes=None
):
    """Replace the states of N requests by the states after their accepted nodes, in all layers.

    stash          Stash                          of all L layers, as verify left it
    parents        int32 [N, T] or None           as given to verify
    accepted       int   [N]                      last accepted node; -1: this request commits nothing
    state_indices  int   [N]                      slot read and written; -1: padding row. Slots of a call differ.
    state          float [L, slots, HV, V, K]     written
    conv_state     float [L, slots, D, W-1]       written; None leaves convolution states alone, whatever the stash holds
    track_indices  int   [N] or None              second slot, which receives the state after `track_nodes`; -1: none
    track_nodes    int   [N] or None              the accepted node or an ancestor of it; -1: none
    nodes          int or None                    T of a chain, where parents is None

    The state of the track node is computed from the state before the call. Track slots are not slots that other rows of
    the call read or write. T is the second dimension of parents; for a chain (parents None) it is `nodes`, or the stash's
    capacity if that is None too: pass it when the drafts were shorter than the stash, else an accepted node beyond them is
    not found out.
    """
    u, k, k_rnorm, g, conv = stash.u, stash.k, stash.k_rnorm, stash.g, stash.conv
    if nodes is not None:
        if not 1 <= nodes <= u.shape[3]:
            raise RuntimeError(f"treewy::commit: argument 'nodes': is {nodes}; allowed: 1 to {u.shape[3]}, the capacity of the stash")  # fmt: skip
        if nodes < u.shape[3]:  # views cost host time on every step of a server
            u, k, k_rnorm, g = u[:, :, :, :nodes], k[:, :, :, :nodes], k_rnorm[:, :, :, :nodes], g[:, :, :, :nodes]
            conv = conv[:, :, :nodes] if conv is not None else None
    _ops.commit(
        u, k, k_rnorm, g, conv if conv_state is not None else None, parents, accepted,
        state_indices, track_indices, track_nodes, state, conv_state, counter(state.device),
    )  # fmt: skip


def parents_from_links(next_token, next_sibling, parents, ancestors=None):
    """Parents and ancestor sets of N trees given by first-child / next-sibling links, as SGLang builds them.

    next_token, next_sibling  int32 or int64 [N, T]  first child / next sibling, -1: none; a child comes after its parent
    parents    int32 [N, T]               written; -1 for the root and for nodes that no link reaches
    ancestors  int32 [N, T, ceil(T/32)]   written if given; bit j of word j//32: node j is t or an ancestor of t

    A row with a bad link is counted and gets -1 everywhere (each node its own ancestor set).
    """
    _ops.parents_from_links(next_token, next_sibling, parents, ancestors, counter(next_token.device))
