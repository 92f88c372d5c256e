"""The recurrence itself, node after node, in any precision: float64 is the truth, float32 the yardstick.

Written from the equations alone and apart from `treewy_sglang.reference`, so that the two can disagree. Every node keeps
its own state, so a tree costs nothing in understanding: the parent of a node is the state it starts from.
"""

from __future__ import annotations

import torch


def exact_float32() -> None:
    """No TF32 anywhere: the yardstick is float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _norm(x, dtype):
    x = x.to(dtype)
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, a, b, A_log, dt_bias, start, parents, scale, dtype):
    """q, k [N,T,H,K], v [N,T,HV,V], a, b [N,T,HV], start [N,HV,V,K], parents [N,T] or None; all on one device.

    Returns outputs [N,T,HV,V] and the states of all nodes [N,T,HV,V,K], in `dtype`.
    """
    N, T, H, K = k.shape
    HV, V = v.shape[2:]
    q, k = _norm(q, dtype) * scale, _norm(k, dtype)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    v = v.to(dtype)
    x = a.to(dtype) + dt_bias.to(dtype)
    softplus = torch.where(x <= 20, torch.log1p(torch.exp(x.clamp(max=20))), x)
    g = -torch.exp(A_log.to(dtype)) * softplus
    decay, beta = torch.exp(g), torch.sigmoid(b.to(dtype))
    # Slot 0 holds the committed state, slot t + 1 the state of node t.
    states = torch.empty((N, T + 1, HV, V, K), dtype=dtype, device=q.device)
    states[:, 0] = start.to(dtype)
    if parents is None:
        parents = torch.arange(-1, T - 1, device=q.device).expand(N, T)
    rows = torch.arange(N, device=q.device)
    parents = parents.to(q.device).long() + 1
    out = torch.empty((N, T, HV, V), dtype=dtype, device=q.device)
    for t in range(T):
        S = states[rows, parents[:, t]] * decay[:, t, :, None, None]
        u = (v[:, t] - (S * k[:, t, :, None, :]).sum(-1)) * beta[:, t, :, None]
        S = S + u[..., None] * k[:, t, :, None, :]
        states[:, t + 1] = S
        out[:, t] = (S * q[:, t, :, None, :]).sum(-1)
    return out, states[:, 1:]


def convolution(mixed, weight, bias, window, parents, dtype, out_dtype):
    """Causal convolution over ancestors, then SiLU. mixed [N,T,D], weight [D,W], window [N,D,W-1] (last: most recent).

    Returns [N,T,D] rounded to out_dtype, and the window after each node [N,T,D,W-1] in mixed's dtype.
    """
    N, T, D = mixed.shape
    W = weight.shape[1]
    if parents is None:
        parents = torch.arange(-1, T - 1, device=mixed.device).expand(N, T)
    parents = parents.to(mixed.device).long() + 1
    rows = torch.arange(N, device=mixed.device)
    windows = torch.empty((N, T + 1, D, W - 1), dtype=mixed.dtype, device=mixed.device)
    windows[:, 0] = window
    out = torch.empty((N, T, D), dtype=dtype, device=mixed.device)
    for t in range(T):
        columns = torch.cat([windows[rows, parents[:, t]], mixed[:, t, :, None]], dim=-1)
        y = (columns.to(dtype) * weight.to(dtype)).sum(-1)
        if bias is not None:
            y = y + bias.to(dtype)
        out[:, t] = y * torch.sigmoid(y)
        windows[:, t + 1] = columns[..., 1:]
    return out.to(out_dtype), windows[:, 1:]


def split(mixed, H, HV, K, V):
    """[N,T,D] -> q, k [N,T,H,K], v [N,T,HV,V] (views)."""
    N, T, _ = mixed.shape
    q, k, v = torch.split(mixed, [H * K, H * K, HV * V], dim=-1)
    return q.view(N, T, H, K), k.view(N, T, H, K), v.view(N, T, HV, V)


def output_errors(out, truth) -> torch.Tensor:
    """[N,T,HV,V] -> [N,HV]"""
    return _errors(out, truth, (1, 3))


def state_errors(state, truth) -> torch.Tensor:
    """[N,HV,V,K] -> [N,HV]"""
    return _errors(state, truth, (2, 3))


def _errors(x, truth, dims):
    x, truth = x.double(), truth.double()
    error = torch.linalg.vector_norm(x - truth, dim=dims) / torch.linalg.vector_norm(truth, dim=dims).clamp(min=1e-30)
    return torch.where(torch.isfinite(error), error, torch.full_like(error, float("inf")))
