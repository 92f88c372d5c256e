"""Registers the operators of this folder as ``torch.ops.sgl_kernel.*_cpu``, under the names and in the argument order
that SGLang's CPU path and the Python files of the sgl_kernel wheel call.

Every argument that is written is marked in the schema. The names differ from the functions of :mod:`.gdn` and
:mod:`.speculation` only where SGLang passes more than the mathematics needs.
"""

from __future__ import annotations

import ctypes
from typing import Optional, Tuple

import torch

from . import gdn, speculation

_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _register(schema: str):
    def decorate(function):
        name = schema.split("(", 1)[0]
        _library.define(schema)
        _library.impl(name, function, "CPU")
        return function

    return decorate


@_register(
    "causal_conv1d_fwd_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? conv_states, Tensor query_start_loc, "
    "Tensor cache_indices, Tensor? has_initial_state, bool silu_activation, int pad_slot_id, bool is_vnni) -> Tensor"
)
def causal_conv1d_fwd_cpu(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation, pad_slot_id, is_vnni
):
    """See :func:`.gdn.conv_prefill`; query_start_loc ``[N+1]`` holds the token offsets of the requests."""
    lengths = query_start_loc.diff().tolist()
    return gdn.conv_prefill(
        x, weight, bias, conv_states, has_initial_state, cache_indices, lengths, silu_activation
    )


@_register(
    "causal_conv1d_update_cpu(Tensor x, Tensor(a!) conv_states, Tensor weight, Tensor? bias, bool silu_activation, "
    "Tensor? cache_seqlens, Tensor conv_state_indices, int pad_slot_id, bool is_vnni) -> Tensor"
)
def causal_conv1d_update_cpu(
    x, conv_states, weight, bias, silu_activation, cache_seqlens, conv_state_indices, pad_slot_id, is_vnni
):
    """See :func:`.gdn.conv_step`."""
    return gdn.conv_step(x, conv_states, weight, bias, silu_activation, conv_state_indices)


@_register("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
def fused_gdn_gating_cpu(A_log, a, b, dt_bias) -> Tuple[torch.Tensor, torch.Tensor]:
    """See :func:`.gdn.gates`; g and beta come back as ``[1, n, HV]``."""
    g, beta = gdn.gates(A_log, a, b, dt_bias)
    return g.unsqueeze(0), beta.unsqueeze(0)


@_register(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, "
    "Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
    "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) -> Tensor"
)
def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    softplus_beta=1.0,
    softplus_threshold=20.0,
):
    """Gates and :func:`.gdn.delta_step`; q, k, v come as ``[1, N, heads, width]``, one token per request."""
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        raise ValueError(
            f"softplus_beta is {softplus_beta} and softplus_threshold {softplus_threshold}; only 1.0 and 20.0 are supported"
        )
    g, beta = gdn.gates(A_log, a.view(-1, A_log.shape[0]), b.view(-1, A_log.shape[0]), dt_bias)
    out = gdn.delta_step(
        q[0], k[0], v[0], g, beta, initial_state_source, initial_state_indices, normalize=use_qk_l2norm_in_kernel
    )
    return out.unsqueeze(0)


@_register(
    "chunk_gated_delta_rule_cpu(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) initial_state, "
    "bool output_final_state, Tensor cu_seqlens, bool head_first, bool use_qk_l2norm_in_kernel, "
    "Tensor initial_state_indices) -> (Tensor, Tensor)"
)
def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    output_final_state,
    cu_seqlens,
    head_first,
    use_qk_l2norm_in_kernel,
    initial_state_indices,
):
    """:func:`.gdn.delta_prefill` over ``[1, n, heads, width]``. Second result: the float32 states at the start of every
    chunk ``[1, chunks, HV, V, K]`` (SGLang saves prefixes from them); the final states are in the pool already."""
    if head_first:
        raise ValueError("head_first is True; only token-major q, k, v are supported")
    out, checkpoints = gdn.delta_prefill(
        q[0],
        k[0],
        v[0],
        g[0],
        beta[0],
        initial_state,
        initial_state_indices,
        cu_seqlens,
        normalize=use_qk_l2norm_in_kernel,
    )
    return out.unsqueeze(0), checkpoints.unsqueeze(0)


@_register("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor")
def fused_rmsnorm_gated_cpu(x, weight, gate, eps):
    """See :func:`.gdn.gated_rms_norm`."""
    return gdn.gated_rms_norm(x, weight, gate, eps)


@_register("fused_sigmoid_mul_cpu(Tensor(a!) attn_output, Tensor gate, bool inplace=False) -> Tensor(a!)")
def fused_sigmoid_mul_cpu(attn_output, gate, inplace=False):
    """See :func:`.gdn.sigmoid_mul`; returns its first argument."""
    if not inplace:
        raise ValueError("inplace is False; only inplace=True is supported")
    gdn.sigmoid_mul(attn_output, gate)
    return attn_output


@_register(
    "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
    "-> (Tensor, Tensor)"
)
def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    """:func:`.gdn.gemma_rms_norm` of every head of q ``[n, HQ*D]`` and k ``[n, HK*D]``; ``[n*HQ, D]``, ``[n*HK, D]``."""
    return (
        gdn.gemma_rms_norm(q.reshape(-1, head_dim), q_weight, eps),
        gdn.gemma_rms_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


@_register(
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
    "int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)"
)
def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """The same where each head of q_gate ``[n, HQ*2*D]`` is a query and then its gate; the gate comes third, as it is."""
    query, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    return (
        gdn.gemma_rms_norm(query.reshape(-1, head_dim), q_weight, eps),
        gdn.gemma_rms_norm(k.reshape(-1, head_dim), k_weight, eps),
        gate.reshape(-1, head_dim).contiguous(),
    )


@_register(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, "
    "int num_heads_v, int head_qk, int head_v) -> (Tensor, Tensor, Tensor, Tensor)"
)
def fused_qkvzba_split_reshape_cat_contiguous_cpu(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """Split ``[n, q|k|v|z]`` and ``[n, b|a]`` into qkv ``[n, q|k|v]``, z ``[n, HV, V]``, b and a ``[n, HV]``."""
    width = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    qkv, z = mixed_qkvz[:, :width], mixed_qkvz[:, width:]
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=1)
    # an operator must not hand out views of its arguments
    return qkv.clone(), z.clone().view(-1, num_heads_v, head_v), b.clone(), a.clone()


_TREE_OUTPUTS = (
    "Tensor(a!) positions, Tensor(b!) retrive_index, Tensor(c!) retrive_next_token, Tensor(d!) retrive_next_sibling"
)
_VERIFY = (
    "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates, "
    "Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, Tensor target_predict) -> ()"
)
_SLOTS = "Tensor req_pool_indices, Tensor{} req_to_token, Tensor start_offset, Tensor end_offset, Tensor{} out_cache_loc"

_register(
    "build_tree_kernel_efficient_cpu(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
    f"Tensor(e!) tree_mask, {_TREE_OUTPUTS}, int topk, int depth, int draft_token_num, int tree_mask_mode) -> ()"
)(speculation.build_tree)
_register(
    "reconstruct_indices_from_tree_mask_cpu(Tensor tree_mask, Tensor verified_seq_len, "
    f"{_TREE_OUTPUTS}, int batch_size, int draft_token_num) -> ()"
)(speculation.reconstruct_tree)
_register("verify_tree_greedy_cpu" + _VERIFY)(speculation.verify_greedy)
_register(
    "fill_bonus_tokens_cpu(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, int accept_stride) -> ()"
)(speculation.fill_bonus_tokens)
_register(
    "fill_accept_out_cache_loc_cpu(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()"
)(speculation.fill_accept_out_cache_loc)
_register(f"assign_req_to_token_pool_cpu({_SLOTS.format('(a!)', '')}, int pool_len) -> ()")(
    speculation.assign_req_to_token_pool
)
_register(f"assign_extend_cache_locs_cpu({_SLOTS.format('', '(a!)')}, int pool_len) -> ()")(
    speculation.assign_extend_cache_locs
)
_register(
    "assign_draft_cache_locs_contiguous_cpu(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
    "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()"
)(speculation.assign_draft_cache_locs_contiguous)


@_register("copy_all_layer_kv_cache_cpu(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()")
def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc) -> None:
    """Copy rows ``src_loc`` to rows ``tgt_loc`` of every buffer, as if all were read before any is written.

    data_ptrs ``[B]`` addresses of the buffers, strides ``[B]`` bytes of one row, locations ``[n]``. The buffers are
    named by address, so no schema can mark them as written.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist()):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]
