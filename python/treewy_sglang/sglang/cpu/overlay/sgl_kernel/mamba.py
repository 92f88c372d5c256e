"""The functions of ``sgl_kernel.mamba`` that SGLang's CPU path calls, over ``torch.ops.sgl_kernel``.

Takes the place of the wheel's file because that one cannot return the states at chunk boundaries, which SGLang
needs to keep prefixes of hybrid models in its cache.
"""

import torch


def causal_conv1d_fn_cpu(
    mixed_qkv_transposed,
    conv_weights,
    bias,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    seq_lens_cpu,
):
    """``[D, n]`` -> ``[D, n]``; see ``treewy_sglang.sglang.cpu.gdn.conv_prefill``."""
    return torch.ops.sgl_kernel.causal_conv1d_fwd_cpu(
        mixed_qkv_transposed,
        conv_weights,
        bias,
        conv_states,
        query_start_loc,
        cache_indices,
        has_initial_state,
        activation == "silu",
        -1,
        False,
    )


def causal_conv1d_update_cpu(
    mixed_qkv, conv_states, conv_weights, bias, activation, conv_state_indices
):
    """``[N, D]`` -> ``[N, D]``; see ``treewy_sglang.sglang.cpu.gdn.conv_step``."""
    return torch.ops.sgl_kernel.causal_conv1d_update_cpu(
        mixed_qkv,
        conv_states,
        conv_weights,
        bias,
        activation == "silu",
        None,
        conv_state_indices,
        -1,
        False,
    )


def chunk_gated_delta_rule_cpu(
    q,
    k,
    v,
    g,
    beta,
    initial_state,
    cu_seqlens,
    head_first,
    use_qk_l2norm_in_kernel,
    initial_state_indices,
):
    """Outputs, nothing for the final states (they are in the pool), states at chunk starts ``[1, chunks, HV, V, K]``."""
    out, checkpoints = torch.ops.sgl_kernel.chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        True,
        cu_seqlens,
        head_first,
        use_qk_l2norm_in_kernel,
        initial_state_indices,
    )
    return out, None, checkpoints
