"""Gated DeltaNet in torch, for CPU: the operators between the projections of a GDN layer. :func:`delta_prefill` also
serves float32 on CUDA, see ..float32.

Letters: N requests, n tokens of all requests, D convolution channels, W taps, H key heads, HV value heads (a
multiple of H), K key width, V value width, C tokens of a chunk. State pools are ``[slots, HV, V, K]`` (row =
value channel) and ``[slots, D, W-1]`` (oldest column first), with any slot stride. A state index of -1 is a
padding row: it reads and writes no slot, and its outputs are zero.

Everything is computed in float32, or in float64 where float32 would lose digits (running sums of gates), whatever
the dtype of the activations; results are rounded once, when they are stored.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

CHUNK = 64
_NORM_EPS = 1e-6


def _silu_if(x: torch.Tensor, silu: bool) -> torch.Tensor:
    return F.silu(x) if silu else x


def conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    conv_states: torch.Tensor,
    has_initial_state: Optional[torch.Tensor],
    state_indices: torch.Tensor,
    lengths: Sequence[int],
    silu: bool,
) -> torch.Tensor:
    """Causal depthwise convolution over whole prompts; leaves the last W-1 inputs of each in its slot.

    x ``[D, n]`` (any strides), weight ``[D, W]``, bias ``[D]`` or None, conv_states ``[slots, D, W-1]`` (written),
    has_initial_state ``[N]`` bool or None (= none), state_indices ``[N]`` int, lengths: N token counts that add up
    to n. Returns ``[D, n]`` in the dtype of x.
    """
    taps = weight.shape[1]
    out = torch.zeros(x.shape, dtype=x.dtype)
    slots = state_indices.tolist()
    initial = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    kernel = weight.float().unsqueeze(1)
    offset = None if bias is None else bias.float()
    start = 0
    for row, length in enumerate(lengths):
        stop = start + length
        slot = slots[row]
        if slot >= 0 and length > 0:
            tokens = x[:, start:stop]
            if initial[row]:
                before = conv_states[slot].to(x.dtype)
            else:
                before = tokens.new_zeros(tokens.shape[0], taps - 1)
            window = torch.cat([before, tokens], dim=1)
            mixed = F.conv1d(window.float().unsqueeze(0), kernel, offset, groups=weight.shape[0])[0]
            out[:, start:stop] = _silu_if(mixed, silu).to(x.dtype)
            conv_states[slot] = window[:, window.shape[1] - (taps - 1) :].to(conv_states.dtype)
        start = stop
    return out


def conv_step(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    silu: bool,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """The same convolution for one new token per request; shifts each slot by one column.

    x ``[N, D]``, conv_states ``[slots, D, W-1]`` (written), weight ``[D, W]``, state_indices ``[N]``.
    Returns ``[N, D]``.
    """
    index = state_indices.long()
    live = index >= 0
    everyone = bool(live.all())
    if not everyone:
        out = torch.zeros_like(x)
        if bool(live.any()):
            out[live] = conv_step(x[live], conv_states, weight, bias, silu, index[live])
        return out
    window = torch.cat([conv_states[index].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    mixed = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        mixed = mixed + bias.float()
    conv_states[index] = window[..., 1:].to(conv_states.dtype)
    return _silu_if(mixed, silu).to(x.dtype)


def gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength: ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``.

    A_log, dt_bias ``[HV]``, a, b ``[n, HV]``. Returns g and beta, both float32 ``[n, HV]``.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid()


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    normalize: bool = True,
    scale: Optional[float] = None,
) -> torch.Tensor:
    """One token per request through the recurrence; the new state replaces the old one.

    q, k ``[N, H, K]``, v ``[N, HV, V]``, g, beta float32 ``[N, HV]``, state ``[slots, HV, V, K]`` (written),
    state_indices ``[N]``. Returns ``[N, HV, V]`` in the dtype of v.
    """
    index = state_indices.long()
    live = index >= 0
    if not bool(live.all()):
        out = torch.zeros_like(v)
        if bool(live.any()):
            out[live] = delta_step(
                q[live], k[live], v[live], g[live], beta[live], state, index[live], normalize=normalize, scale=scale
            )
        return out
    repeat = v.shape[1] // k.shape[1]
    scale = k.shape[2] ** -0.5 if scale is None else scale
    # key and query side by side [N, H, K, 2], so that one pass over the old state serves u and the output:
    # S q = e^g S_old q + u (k . q)
    pair = torch.stack([k, q], dim=-1).float()
    if normalize:
        pair = pair * torch.rsqrt(pair.square().sum(2, keepdim=True) + _NORM_EPS)
    pair[..., 1] *= scale
    overlap = pair.prod(-1).sum(-1).repeat_interleave(repeat, dim=1).unsqueeze(-1)
    pair = pair.repeat_interleave(repeat, dim=1).flatten(0, 1)
    current = state.index_select(0, index).float()
    matrix = current.flatten(0, 1)
    decay = g.exp().view(-1, 1, 1)
    seen, read = torch.bmm(matrix, pair).mul_(decay).unflatten(0, v.shape[:2]).unbind(-1)
    update = (v.float() - seen) * beta.unsqueeze(-1)
    matrix.mul_(decay).baddbmm_(update.flatten(0, 1).unsqueeze(-1), pair[..., :1].transpose(1, 2))
    state.index_copy_(0, index, current.to(state.dtype))
    return (read + update * overlap).to(v.dtype)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    starts: torch.Tensor,
    *,
    normalize: bool = True,
    scale: Optional[float] = None,
    chunk: int = CHUNK,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Whole prompts through the recurrence in chunks of C tokens; each ends with its state in its slot.

    q, k ``[n, H, K]``, v ``[n, HV, V]``, g, beta float32 ``[n, HV]``, state ``[slots, HV, V, K]`` (read as the state
    before the first token, then written), state_indices ``[N]``, starts ``[N+1]`` token offsets. Returns the outputs
    ``[n, HV, V]`` in the dtype of v, and the float32 states at the start of every chunk ``[chunks, HV, V, K]``, the
    chunks of request 0 first.

    Inside a chunk, with G the running sum of g: ``(I + A) U = beta (V - e^G K S0^T)`` where
    ``A_ij = beta_i e^(G_i - G_j) (k_i . k_j)`` for j < i, then ``O = e^G Q S0^T + (e^(G_i - G_j) q_i . k_j)_(j<=i) U``
    and ``S1 = e^(G_C) S0 + sum_j e^(G_C - G_j) u_j k_j^T``. S0 enters linearly, so the solve is done once for both
    right-hand sides, all chunks at a time, and only two products per chunk remain sequential. G and its differences
    are float64: a strongly decaying prefix would otherwise eat the digits of small later gates.
    """
    offsets = starts.tolist()
    slots = state_indices.tolist()
    heads, width, value_width = v.shape[1], k.shape[2], v.shape[2]
    scale = width**-0.5 if scale is None else scale
    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    checkpoints: List[torch.Tensor] = []
    for row, slot in enumerate(slots):
        begin, end = offsets[row], offsets[row + 1]
        length = end - begin
        if length <= 0:
            continue
        count = -(-length // chunk)
        if slot < 0:
            checkpoints.append(torch.zeros(count, heads, value_width, width, device=v.device))
            continue
        outputs, boundary, final = _delta_sequence(
            q[begin:end], k[begin:end], v[begin:end], g[begin:end], beta[begin:end], state[slot], normalize, scale, chunk
        )
        out[begin:end] = outputs.to(v.dtype)
        state[slot] = final.to(state.dtype)
        checkpoints.append(boundary)
    if checkpoints:
        return out, torch.cat(checkpoints)
    return out, torch.zeros(0, heads, value_width, width, device=v.device)


def _delta_sequence(q, k, v, g, beta, initial, normalize, scale, chunk):
    """One request of :func:`delta_prefill`: outputs float32 ``[n, HV, V]``, chunk-start states, final state."""
    length, heads = g.shape
    repeat = heads // k.shape[1]
    count = -(-length // chunk)
    pad = count * chunk - length
    query, key = q.float(), k.float()
    if normalize:
        query, key = _unit(query), _unit(key)
    query = query * scale

    def by_chunk(x: torch.Tensor) -> torch.Tensor:
        # [n, h, d] -> [chunks, h, C, d]; padding tokens write nothing (beta = 0) and decay nothing (g = 0)
        return F.pad(x, (0, 0, 0, 0, 0, pad)).view(count, chunk, *x.shape[1:]).transpose(1, 2)

    query = by_chunk(query)
    key = by_chunk(key)
    key_key = (key @ key.transpose(-1, -2)).repeat_interleave(repeat, dim=1)
    query_key = (query @ key.transpose(-1, -2)).repeat_interleave(repeat, dim=1)
    query, key = query.repeat_interleave(repeat, dim=1), key.repeat_interleave(repeat, dim=1)
    value = by_chunk(v.float())
    strength = by_chunk(beta.float().unsqueeze(-1))
    total = by_chunk(g.double().unsqueeze(-1)).squeeze(-1).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    # masked before exp: a difference of a later and an earlier token is <= 0, the other way round it overflows
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp().float()
    system = (key_key * decay * strength).tril(-1)
    from_start = total.exp().float().unsqueeze(-1)
    to_end = (total[..., -1:] - total).exp().float().unsqueeze(-1)
    right = torch.cat([value * strength, key * from_start * strength], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    base, gain = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    attend = query_key * decay
    query = query * from_start
    weighted = key * to_end
    last = total[..., -1].exp().float()[..., None, None]

    current = initial.float()
    boundary = torch.empty(count, *current.shape, device=v.device)
    outputs = torch.empty(value.shape, device=v.device)
    for c in range(count):
        boundary[c] = current
        update = base[c] - gain[c] @ current.transpose(-1, -2)
        outputs[c] = query[c] @ current.transpose(-1, -2) + attend[c] @ update
        current = current * last[c] + update.transpose(-1, -2) @ weighted[c]
    outputs = outputs.transpose(1, 2).reshape(count * chunk, heads, -1)[:length]
    return outputs, boundary, current


def gated_rms_norm(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight * silu(gate)`` over the last axis. x, gate ``[..., d]``, weight ``[d]``; dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float() * F.silu(gate.float())).to(x.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """``x *= sigmoid(gate)``, in place. x ``[n, d]``, gate of as many elements in any shape and strides."""
    x.copy_(x.float() * gate.reshape(x.shape).float().sigmoid())


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * (1 + weight)`` over the last axis. x ``[..., d]``, weight ``[d]``; dtype of x."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def gate_sigmoid_mul_add(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor, final_hidden_states: torch.Tensor
) -> None:
    """``final += sigmoid(hidden . weight) * shared``, in place: the gate of a shared expert.

    hidden_states, shared_output, final_hidden_states ``[n, d]``, gate_weight ``[d]``.
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(-1)
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def track_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of some requests to the slots where the prefix cache keeps them, one layer.

    conv_states ``[slots, ...]``, ssm_states ``[slots, ...]`` (written), cache_indices, mamba_track_mask (bool) and
    mamba_track_indices ``[>= batch_size]``. A slot of -1 on either side is skipped.
    """
    source, target = _tracked(cache_indices, mamba_track_mask, mamba_track_indices, batch_size)
    if source.numel():
        conv_states[target] = conv_states[source]
        ssm_states[target] = ssm_states[source]


def track_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same for pools of all layers ``[layers, slots, ...]``."""
    source, target = _tracked(cache_indices, mamba_track_mask, mamba_track_indices, batch_size)
    if source.numel():
        conv_states_pool[:, target] = conv_states_pool[:, source]
        ssm_states_pool[:, target] = ssm_states_pool[:, source]


def _tracked(source, mask, target, count):
    source, target = source[:count].long(), target[:count].long()
    kept = mask[:count].bool() & (source >= 0) & (target >= 0)
    return source[kept], target[kept]
