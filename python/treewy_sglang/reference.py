"""The mathematics of the operators, plainly, in float64: the truth that kernels are tested against.

Functional: same arguments in the same order as ops.py, results returned instead of written. Two independent ways to the
same numbers:

recurrence - one step per node, as the gated delta rule is defined (Gated Delta Networks, arXiv 2412.06464, eq. 10):

    S_t = e^{g_t} S_p + u_t k_t^T,   u_t = beta_t (v_t - e^{g_t} S_p k_t),   o_t = S_t q_t        p = parent of t

wy - without any S_t, from the committed state S0 and a triangular solve over ancestors (the WY form of products of
Householder-like factors: Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484, section 3.2; with decay:
arXiv 2412.06464, section 3.3; over trees, sums run over ancestors):

    u_t = beta_t (v_t - e^{G_t} S0 k_t - sum_{j<t} e^{G_t-G_j} (k_j . k_t) u_j)
    o_t = e^{G_t} S0 q_t + sum_{j<=t} e^{G_t-G_j} (k_j . q_t) u_j
    S_a = e^{G_a} S0 + sum_{j<=a} e^{G_a-G_j} u_j k_j^T

with k, q L2-normalised (x / sqrt(sum x^2 + 1e-6)), q times scale, g = -exp(A_log) softplus(a + dt_bias), beta =
sigmoid(b), G_t the sum of g over root..t, "j < t" meaning j is a strict ancestor of t.

`dtype=torch.float32` runs the recurrence in the kernels' precision: the yardstick of testing.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

EPS = 1e-6  # of the L2 normalisation


@dataclass
class Verified:
    """out [N*T, HV, V]; u [N, HV, T, V]; g [N, HV, T]; k_rnorm [N, H, T]; states [N, HV, V, K] after `nodes`, or None."""

    out: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor
    k_rnorm: torch.Tensor
    states: torch.Tensor | None = None


def _chain(n, t, device):
    return torch.arange(-1, t - 1, device=device).expand(n, t)


def ancestors(parents):
    """bool [N, T, T]: [n, t, j] is true if j is a strict ancestor of t. parents: int [N, T]."""
    n, t = parents.shape
    rows = torch.zeros(n, t, t, dtype=torch.bool, device=parents.device)
    for i in range(t):
        parent = parents[:, i].long()
        has = parent >= 0
        at = parent.clamp(min=0)
        line = rows[torch.arange(n, device=parents.device), at].clone()
        line[torch.arange(n, device=parents.device), at] = True
        rows[:, i] = line & has[:, None]
    return rows


def gates(a, b, A_log, dt_bias, dtype=torch.float64):
    """Log decay g (<= 0) and beta in [0, 1], each [N*T, HV]."""
    g = -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype), threshold=20.0)
    return g, b.to(dtype).sigmoid()


def _prepare(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale, dtype):
    """Everything with a request axis in front and key heads repeated for their value heads."""
    n = state_indices.shape[0]
    hv, kdim = state.shape[1], state.shape[3]
    t = q.shape[0] // n
    group = hv // q.shape[1]
    if scale is None:
        scale = kdim**-0.5
    if parents is None:
        parents = _chain(n, t, q.device)
    rows = lambda x: x.to(dtype).reshape(n, t, *x.shape[1:])
    norm = lambda x: 1 / (x.square().sum(-1, keepdim=True) + EPS).sqrt()
    q, k, v = rows(q), rows(k), rows(v)
    k_rnorm = norm(k)
    q = (q * norm(q) * scale).repeat_interleave(group, 2)
    k = (k * k_rnorm).repeat_interleave(group, 2)
    g, beta = (x.reshape(n, t, hv) for x in gates(a, b, A_log, dt_bias, dtype))
    live = state_indices >= 0
    start = state[state_indices.long().clamp(min=0)].to(dtype) * live.to(dtype)[:, None, None, None]
    return q, k, v, g, beta, start, parents.long(), live, k_rnorm[..., 0].transpose(1, 2)


def _path_sums(g, parents):
    """G [N, T, HV]: g summed over root..t."""
    n, t, hv = g.shape
    total = torch.zeros(n, t + 1, hv, dtype=g.dtype, device=g.device)  # column 0: before the root
    row = torch.arange(n, device=g.device)
    for i in range(t):
        total[:, i + 1] = total[row, parents[:, i] + 1] + g[:, i]
    return total[:, 1:]


def _finish(out, u, g, live, k_rnorm, states):
    n, t, hv, vdim = out.shape
    out = torch.where(live[:, None, None, None], out, torch.zeros_like(out))
    return Verified(out.reshape(n * t, hv, vdim), u.transpose(1, 2), g.transpose(1, 2), k_rnorm, states)


def recurrence(
    q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale=None, *, nodes=None, dtype=torch.float64
):
    """Verify by one step per node. nodes: int [N], the node after which each request's state is returned (-1: before)."""
    q, k, v, g, beta, start, parents, live, k_rnorm = _prepare(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale, dtype
    )
    n, t = parents.shape
    row = torch.arange(n, device=q.device)
    states = torch.empty(n, t + 1, *start.shape[1:], dtype=dtype, device=q.device)  # column 0: the committed state
    states[:, 0] = start
    out, us = [], []
    for i in range(t):
        s = states[row, parents[:, i] + 1] * g[:, i].exp()[..., None, None]
        u = beta[:, i, :, None] * (v[:, i] - (s @ k[:, i, :, :, None])[..., 0])
        s += u[..., None] * k[:, i, :, None, :]
        states[:, i + 1] = s
        out.append((s @ q[:, i, :, :, None])[..., 0])
        us.append(u)
    after = None if nodes is None else states[row, nodes.long() + 1].clone()
    return _finish(torch.stack(out, 1), torch.stack(us, 1), g, live, k_rnorm, after)


def wy(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale=None, *, nodes=None, dtype=torch.float64):
    """Verify by the WY form; arguments and results as in `recurrence`."""
    q, k, v, g, beta, start, parents, live, k_rnorm = _prepare(
        q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale, dtype
    )
    n, t = parents.shape
    hv = g.shape[2]
    row = torch.arange(n, device=q.device)
    strict = ancestors(parents)[:, None]  # [N, 1, T, T]
    G = _path_sums(g, parents).transpose(1, 2)  # [N, HV, T]
    # The difference is formed first and only ancestor pairs are exponentiated: exp(G_t) * exp(-G_j) is 0 * inf for the
    # decays of real checkpoints, and exp of a pair that is no ancestor pair may overflow before any mask.
    pair = strict | torch.eye(t, dtype=torch.bool, device=q.device)
    decay = torch.where(pair, G[..., :, None] - G[..., None, :], torch.zeros_like(G[..., None])).exp() * pair
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [N, HV, T, K or V]
    beta = beta.transpose(1, 2)
    # Unit lower triangular system: (I + beta e^{G_t-G_j} (k_t.k_j)) u = beta (v - e^{G} S0 k)
    system = torch.eye(t, dtype=dtype, device=q.device) + beta[..., None] * decay * (k @ k.mT) * strict
    right = beta[..., None] * (v - G.exp()[..., None] * (k @ start.mT))
    u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = G.exp()[..., None] * (q @ start.mT) + (decay * (q @ k.mT)) @ u
    after = None
    if nodes is not None:
        at = nodes.long().clamp(min=0)
        weight = decay[row, :, at] * (nodes >= 0)[:, None, None]  # [N, HV, T]: e^{G_a-G_j}, 0 off the path
        first = torch.where((nodes >= 0)[:, None], G[row, :, at], torch.zeros(n, hv, dtype=dtype, device=q.device)).exp()
        after = first[..., None, None] * start + (u * weight[..., None]).mT @ k
    return _finish(out.transpose(1, 2), u.transpose(1, 2), g, live, k_rnorm, after)


def tree_verify(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale=None, *, nodes=None):
    """What ops.tree_verify computes, in float64: a `Verified`."""
    return recurrence(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale, nodes=nodes)


# ---- convolution -------------------------------------------------------------------------------------------------------


def conv_windows(columns, conv_state, state_indices, parents):
    """The W-1 inputs before each node and the node's own: [N, T, D, W], oldest first.

    columns [N*T, D] raw inputs of the nodes, conv_state [slots, D, W-1]. A node's window is its parent's, moved by one."""
    n = state_indices.shape[0]
    t = columns.shape[0] // n
    if parents is None:
        parents = _chain(n, t, columns.device)
    columns = columns.reshape(n, t, -1)
    row = torch.arange(n, device=columns.device)
    windows = torch.empty(n, t + 1, columns.shape[2], conv_state.shape[2], dtype=columns.dtype, device=columns.device)
    windows[:, 0] = conv_state[state_indices.long().clamp(min=0)].to(columns.dtype)
    full = []
    for i in range(t):
        wide = torch.cat([windows[row, parents[:, i].long() + 1], columns[:, i, :, None]], -1)
        windows[:, i + 1] = wide[..., 1:]
        full.append(wide)
    return torch.stack(full, 1)


def conv(mixed_qkv, conv_weight, conv_bias, conv_state, state_indices, parents, *, dtype=torch.float64):
    """SiLU(causal convolution over ancestors), not yet rounded: [N*T, D] in `dtype`."""
    windows = conv_windows(mixed_qkv, conv_state, state_indices, parents).to(dtype)
    total = (windows * conv_weight.to(dtype)).sum(-1)
    if conv_bias is not None:
        total = total + conv_bias.to(dtype)
    return F.silu(total).reshape(mixed_qkv.shape)


def split(qkv, key_heads, value_heads, key_dim, value_dim):
    """[N*T, D] into q, k [N*T, H, K] and v [N*T, HV, V]."""
    q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], 1)
    return q.unflatten(1, (key_heads, key_dim)), k.unflatten(1, (key_heads, key_dim)), v.unflatten(1, (value_heads, value_dim))


def tree_conv_verify(
    mixed_qkv, conv_weight, conv_bias, conv_state, a, b, A_log, dt_bias, state, state_indices, parents, scale=None, *,
    nodes=None, dtype=torch.float64,
):  # fmt: skip
    """What ops.tree_conv_verify computes: `conv` rounded to the activation dtype, split, then `recurrence`."""
    hv, vdim, kdim = state.shape[1:]
    qkv = conv(mixed_qkv, conv_weight, conv_bias, conv_state, state_indices, parents, dtype=dtype)
    # Rounding is part of the definition; float64 inputs (tests of the mathematics) are left as they are.
    qkv = qkv.to(mixed_qkv.dtype)
    q, k, v = split(qkv, (mixed_qkv.shape[1] - hv * vdim) // (2 * kdim), hv, kdim, vdim)
    return recurrence(q, k, v, a, b, A_log, dt_bias, state, state_indices, parents, scale, nodes=nodes, dtype=dtype)


# ---- commit ------------------------------------------------------------------------------------------------------------


def commit(stash, parents, accepted, state_indices, state, conv_state=None, track_indices=None, track_nodes=None):
    """New (state, conv_state) in float64 from a stash, by the formula for S_a; slots that nothing is committed to keep
    their values. Rows with bad values must not be given."""
    n, t = accepted.shape[0], (stash.u.shape[3] if parents is None else parents.shape[1])
    layers, hv = state.shape[0], state.shape[2]
    if parents is None:
        parents = _chain(n, t, state.device)
    old, new = state.double(), state.double().clone()
    old_conv = None if conv_state is None else conv_state.double()
    new_conv = None if conv_state is None else old_conv.clone()
    group = hv // stash.k.shape[2]

    def write(row, node, slot):
        source = int(state_indices[row])
        path = [node]
        while parents[row, path[-1]] >= 0:
            path.append(int(parents[row, path[-1]]))
        path.reverse()
        for layer in range(layers):
            G = stash.g[layer, row][:, path].double().cumsum(1)  # [HV, len]
            k = (stash.k[layer, row].double() * stash.k_rnorm[layer, row].double()[..., None])[:, path]
            k = k.repeat_interleave(group, 0)
            u = stash.u[layer, row][:, path].double()
            weight = (G[:, -1:] - G).exp()
            new[layer, slot] = G[:, -1].exp()[:, None, None] * old[layer, source] + (u * weight[..., None]).mT @ k
            if new_conv is not None:
                columns = stash.conv[layer, row][path].double().T  # [D, len]
                new_conv[layer, slot] = torch.cat([old_conv[layer, source], columns], 1)[:, -old_conv.shape[3] :]

    for row in range(n):
        if state_indices[row] < 0 or accepted[row] < 0:
            continue
        if track_indices is not None and track_indices[row] >= 0 and track_nodes[row] >= 0:
            write(row, int(track_nodes[row]), int(track_indices[row]))
        write(row, int(accepted[row]), int(state_indices[row]))
    return new, new_conv
