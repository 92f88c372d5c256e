"""How a memory budget is split between state slots and stash rows, and what snapshots would have taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

from treewy_sglang.sizes import slots_beside_contexts, slots_within, snapshot_slots_within

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
    snapshot_slots: int  # slots SGLang's split buys with snapshots; `slots` when the split did not decide
    default_slots: int  # slots the same split buys; fewer than `slots` where these were raised
    ratio: float  # --mamba-full-memory-ratio
    rest_bytes: int  # what states and KV cache share
    context_tokens: Optional[int] = None  # of KV cache that a running request can use; None: slots may not be raised
    token_limit: Optional[int] = None  # --max-total-tokens

    @property
    def state_bytes(self) -> int:
        return (self.slots + 1) * self.slot_bytes + self.rows * self.row_bytes  # one slot is padding

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


def kv_bytes_per_token(configurator: Any, page_size: int) -> int:
    """Bytes of KV cache that a token takes on this rank, the draft's layers included; 0 where no layer has a KV cache."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    pools = create_memory_pool_configurator(configurator)
    # So large that rounding to whole tokens and pages is far below a byte a token. Without a KV cache SGLang gives the
    # same number of tokens for any memory.
    memory = 1 << 50
    once, twice = (pools.calculate_pool_sizes(n * memory, page_size).max_total_num_tokens for n in (1, 2))
    return round(memory / (twice - once)) if twice > once else 0


def context_tokens(configurator: Any, page_size: int) -> int:
    """Tokens of KV cache that one running request can hold: its full context, and what SGLang allocates ahead of it for
    the next drafts, in whole pages."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    tokens = configurator.model_config.context_len + get_alloc_reserve_per_decode(configurator.server_args)
    return -(-tokens // page_size) * page_size


def split_budget(configurator: Any, rest_gib: float) -> float:
    """Set SGLang's max_mamba_cache_size; return the GiB left for the KV cache."""
    global _plan
    from sglang.srt.runtime_context import get_context, get_memory, get_schedule, get_spec
    from sglang.srt.server_args import ServerArgs

    from treewy_sglang import Stash

    params = configurator.mambaish_config.mamba2_cache_params
    nodes = configurator.server_args.max_speculative_num_draft_tokens
    slot_bytes = params.mamba_cache_per_req
    row_bytes = Stash.bytes_per_row(**stash_shape(params, len(params.layers), nodes))
    snapshot_bytes = slot_bytes * nodes
    dp_size = configurator.ps.attn_dp_size
    requested = get_schedule().max_running_requests // dp_size
    ratio = configurator._calculate_mamba_ratio()
    share = get_schedule().mamba_full_memory_ratio
    budget = full_context = token_limit = None

    if get_schedule().max_mamba_cache_size is not None:
        slots = get_schedule().max_mamba_cache_size // dp_size
    elif get_memory().disable_radix_cache:
        slots = requested
    else:
        budget = int(rest_gib * share / (1 + share) * GIB)
        costs = dict(
            slot_bytes=slot_bytes, row_bytes=row_bytes, slots_per_request=ratio, requested=requested, rows=stash_rows
        )
        slots = slots_within(budget, **costs)
    default_slots = snapshot_slots = slots
    if budget is not None and share == ServerArgs.mamba_full_memory_ratio:
        # Nobody asked for this split. It can leave the KV cache more than the requests that have a slot can ever fill,
        # while others wait for a slot.
        page_size, token_limit = get_schedule().page_size, get_schedule().max_total_tokens
        full_context = context_tokens(configurator, page_size)
        slots = slots_beside_contexts(
            int(rest_gib * GIB),
            least=default_slots,
            token_bytes=kv_bytes_per_token(configurator, page_size),
            request_tokens=full_context,
            most_tokens=token_limit,
            **costs,
        )
    if budget is not None:
        snapshot_slots = snapshot_slots_within(
            budget, slot_bytes=slot_bytes, nodes=get_spec().speculative_num_draft_tokens, slots_per_request=ratio
        )
    rows = stash_rows(min(requested, slots // ratio))
    _plan = Plan(
        slot_bytes=slot_bytes,
        row_bytes=row_bytes,
        snapshot_bytes=snapshot_bytes,
        slots_per_request=ratio,
        requested=requested,
        slots=slots,
        rows=rows,
        snapshot_slots=snapshot_slots,
        default_slots=default_slots,
        ratio=share,
        rest_bytes=int(rest_gib * GIB),
        context_tokens=full_context,
        token_limit=token_limit,
    )
    get_context().override("mamba_pool.treewy", max_mamba_cache_size=slots)
    if slots <= 0:
        raise RuntimeError(
            f"--enable-treewy: {rest_gib:.2f} GiB are left for state and KV cache and do not hold one state slot of "
            f"{slot_bytes / (1 << 20):.2f} MiB beside its stash row of {row_bytes / (1 << 20):.2f} MiB: lower "
            "--max-running-requests or --speculative-num-draft-tokens, or raise --mem-fraction-static."
        )
    return rest_gib - _plan.state_bytes / GIB


def start_line(plan: Plan, nodes: int, running: int) -> str:
    mib = 1 << 20
    return (
        f"TreeWY is active: drafts of up to {nodes} nodes, stash {plan.row_bytes / mib:.2f} MiB per running request "
        f"instead of {plan.snapshot_bytes / mib:.2f} MiB of snapshots; {plan.slots} state slots of "
        f"{plan.slot_bytes / mib:.2f} MiB (with snapshots: {plan.snapshot_slots}); running requests {running} (with "
        f"snapshots: {plan.snapshot_running})."
    )


def raised_line(plan: Plan) -> Optional[str]:
    """Why there are more state slots than the default split gives; None where there are not."""
    if plan.slots == plan.default_slots:
        return None
    assert plan.context_tokens is not None
    tokens = plan.running * plan.context_tokens
    if plan.token_limit is not None:
        tokens = min(tokens, plan.token_limit)
    return (
        f"TreeWY: state slots are raised from {plan.default_slots} to {plan.slots}, for {plan.running} running requests "
        f"instead of {plan.default_slots // plan.slots_per_request}, because the KV cache keeps the {tokens} tokens that "
        f"these can use at most (a --mamba-full-memory-ratio other than the default {plan.ratio:g} fixes the split)."
    )


def cap_warning(plan: Plan, running: int) -> Optional[str]:
    if running >= plan.requested:
        return None
    if running < plan.slots // plan.slots_per_request:
        cause, way = "the KV cache", "raise --mem-fraction-static, or lower --mamba-full-memory-ratio"
    else:
        cause = f"{plan.slots} state slots at {plan.slots_per_request} per running request"
        way = (
            "raise --mamba-full-memory-ratio, --max-mamba-cache-size or --mem-fraction-static, use --mamba-ssm-dtype "
            "bfloat16, or lower --speculative-num-draft-tokens"
        )
        if plan.context_tokens is not None:
            # The slots were weighed against the KV cache. A ratio below that of this split would take slots away.
            limited = plan.token_limit is not None and plan.token_limit < (running + 1) * plan.context_tokens
            beside = (
                f"a KV cache of {plan.token_limit} tokens"
                if limited
                else f"a KV cache for {running + 1} contexts of {plan.context_tokens} tokens"
            )
            cause += f", and no memory for more beside {beside}"
            kv_bytes = max(1, plan.rest_bytes - plan.state_bytes)
            ratio = max(plan.ratio, math.ceil(100 * plan.state_bytes / kv_bytes) / 100)
            way = (
                f"raise --mem-fraction-static, lower {'--max-total-tokens' if limited else '--context-length'} or "
                "--speculative-num-draft-tokens, use --mamba-ssm-dtype bfloat16, or give up KV cache with "
                f"--mamba-full-memory-ratio above {ratio:g} or --max-mamba-cache-size above {plan.slots}"
            )
    return f"TreeWY: memory caps the running requests at {running} of the {plan.requested} asked for ({cause}): {way}."
