"""How a memory budget is split between state slots and stash rows, and what snapshots would have taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from treewy_sglang.sizes import slots_within, snapshot_slots_within

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Bytes are of one rank."""

    slot_bytes: int  # one request's recurrent and convolution state, all layers
    row_bytes: int  # one stash row, all layers
    snapshot_bytes: int  # what SGLang keeps per running request without TreeWY
    slots_per_request: int
    requested: int  # running requests the user asked for (or SGLang's default)
    slots: int
    rows: int
    snapshot_slots: int  # slots the same budget buys with snapshots; `slots` when the budget did not decide

    @property
    def running(self) -> int:
        return min(self.requested, self.slots // self.slots_per_request)

    @property
    def snapshot_running(self) -> int:
        return min(self.requested, self.snapshot_slots // self.slots_per_request)


_plan: Optional[Plan] = None


def last_plan() -> Optional[Plan]:
    return _plan


def stash_shape(cache_params: Any, layers: int, nodes: int) -> dict:
    """Keyword arguments of Stash.allocate (without rows and device) for SGLang's cache parameters."""
    value_heads, value_dim, key_dim = cache_params.shape.temporal
    return dict(
        layers=layers,
        nodes=nodes,
        key_heads=cache_params.shape.num_k_heads_per_tp,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_dim=cache_params.shape.conv[0][0],
        activation_dtype=cache_params.dtype.conv,
    )


def stash_rows(running_requests: int, server_args: Any = None) -> int:
    """Rows for this many running requests: batches may be padded to a multiple of the attention group's size."""
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.utils.common import get_cuda_graph_max_batch_size, get_eager_max_batch_size

    server_args = get_server_args() if server_args is None else server_args
    return max(
        running_requests,
        get_eager_max_batch_size(server_args, running_requests),
        get_cuda_graph_max_batch_size(server_args, running_requests),
    )


def split_budget(configurator: Any, rest_gib: float) -> float:
    """Set SGLang's max_mamba_cache_size; return the GiB left for the KV cache."""
    global _plan
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule, get_spec

    from treewy_sglang import Stash

    params = configurator.mambaish_config.mamba2_cache_params
    nodes = configurator.server_args.max_speculative_num_draft_tokens
    slot_bytes = params.mamba_cache_per_req
    row_bytes = Stash.bytes_per_row(**stash_shape(params, len(params.layers), nodes))
    snapshot_bytes = slot_bytes * nodes
    dp_size = configurator.ps.attn_dp_size
    requested = get_schedule().max_running_requests // dp_size
    ratio = configurator._calculate_mamba_ratio()
    budget = None

    if get_schedule().max_mamba_cache_size is not None:
        slots = get_schedule().max_mamba_cache_size // dp_size
    elif get_memory().disable_radix_cache:
        slots = requested
    else:
        share = get_schedule().mamba_full_memory_ratio
        budget = int(rest_gib * share / (1 + share) * GIB)
        slots = slots_within(
            budget,
            slot_bytes=slot_bytes,
            row_bytes=row_bytes,
            slots_per_request=ratio,
            requested=requested,
            rows=stash_rows,
        )
    snapshot_slots = slots
    if budget is not None:
        snapshot_slots = snapshot_slots_within(
            budget, slot_bytes=slot_bytes, nodes=get_spec().speculative_num_draft_tokens, slots_per_request=ratio
        )
    rows = stash_rows(min(requested, slots // ratio))
    _plan = Plan(slot_bytes, row_bytes, snapshot_bytes, ratio, requested, slots, rows, snapshot_slots)
    get_context().override("mamba_pool.treewy", max_mamba_cache_size=slots)
    if slots <= 0:
        raise RuntimeError(
            f"--enable-treewy: {rest_gib:.2f} GiB are left for state and KV cache and do not hold one state slot of "
            f"{slot_bytes / (1 << 20):.2f} MiB beside its stash row of {row_bytes / (1 << 20):.2f} MiB: lower "
            "--max-running-requests or --speculative-num-draft-tokens, or raise --mem-fraction-static."
        )
    return rest_gib - ((slots + 1) * slot_bytes + rows * row_bytes) / GIB


def start_line(plan: Plan, nodes: int, running: int) -> str:
    mib = 1 << 20
    return (
        f"TreeWY is active: drafts of up to {nodes} nodes, stash {plan.row_bytes / mib:.2f} MiB per running request "
        f"instead of {plan.snapshot_bytes / mib:.2f} MiB of snapshots; {plan.slots} state slots of "
        f"{plan.slot_bytes / mib:.2f} MiB (with snapshots: {plan.snapshot_slots}); running requests {running} (with "
        f"snapshots: {plan.snapshot_running})."
    )


def cap_warning(plan: Plan, running: int) -> Optional[str]:
    if running >= plan.requested:
        return None
    by_slots = plan.slots // plan.slots_per_request < plan.requested
    cause = (
        f"{plan.slots} state slots at {plan.slots_per_request} per running request" if by_slots else "the KV cache"
    )
    way = (
        "raise --mamba-full-memory-ratio, --max-mamba-cache-size or --mem-fraction-static, use --mamba-ssm-dtype "
        "bfloat16, or lower --speculative-num-draft-tokens"
        if by_slots
        else "raise --mem-fraction-static, or lower --mamba-full-memory-ratio"
    )
    return f"TreeWY: memory caps the running requests at {running} of the {plan.requested} asked for ({cause}): {way}."
