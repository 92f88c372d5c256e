"""The proof at start: --enable-treewy was given and TreeWY is what runs, or the server does not start."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

import torch

from treewy_sglang.sglang import sizing, status
from treewy_sglang.sglang.config import DTYPES, TreeWYRefused
from treewy_sglang.sizes import conv_window_columns

logger = logging.getLogger(__name__)

# A draft tree, as SGLang hands it over, and an accepted path that is not a prefix of the node order.
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
NEXT_TOKEN = [1, 3, 5, 6, -1, -1, -1]
NEXT_SIBLING = [-1, 2, -1, 4, -1, -1, -1]
PATH = [0, 1, 3, 6]


def refuse(reason: str) -> NoReturn:
    raise TreeWYRefused(f"--enable-treewy: {reason}")


def self_test(
    *,
    device: Any,
    key_heads: int,
    value_heads: int,
    dim: int,
    conv_width: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    a_log_dtype: torch.dtype = torch.float32,
    dt_bias_dtype: torch.dtype = torch.float32,
    bias: bool = False,
) -> float:
    """Verify and commit one small draft tree on `device`, in the model's own shape and dtypes, against the float64
    reference. Refuses when an operator is missing, fails, or answers something else; returns the seconds it took."""
    from treewy_sglang import Stash, ops, reference

    began = time.monotonic()
    generator = torch.Generator().manual_seed(20260)
    nodes, slots, slot = len(PARENTS), 3, 1
    channels = (2 * key_heads + value_heads) * dim

    def draw(*shape, to=dtype, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(to)

    inputs = (
        draw(nodes, channels),
        draw(channels, conv_width, scale=0.5),
        draw(channels, scale=0.1) if bias else None,
        draw(slots, channels, conv_width - 1),
        draw(nodes, value_heads),
        draw(nodes, value_heads),
        draw(value_heads, to=a_log_dtype),
        draw(value_heads, to=dt_bias_dtype),
        draw(slots, value_heads, dim, dim, to=state_dtype, scale=0.1),
        torch.tensor([slot], dtype=torch.int32),
    )
    accepted = torch.tensor(PATH[-1:])
    truth = reference.tree_conv_verify(*inputs, torch.tensor([PARENTS]), nodes=accepted)
    columns = torch.cat([inputs[3][slot], inputs[0][PATH].T], 1)[:, 1 - conv_width :]

    on_device = [x if x is None else x.to(device) for x in inputs]
    parents = torch.empty(1, nodes, dtype=torch.int32, device=device)
    out = torch.empty(nodes, value_heads, dim, dtype=dtype, device=device)
    stash = Stash.allocate(
        layers=1,
        rows=1,
        nodes=nodes,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=dim,
        value_dim=dim,
        conv_dim=channels,
        activation_dtype=dtype,
        device=device,
    )
    conv_state, state, indices = on_device[3], on_device[8], on_device[9]
    try:
        links = (torch.tensor([x], device=device) for x in (NEXT_TOKEN, NEXT_SIBLING))
        ops.parents_from_links(*links, parents)
        ops.tree_conv_verify(*on_device, parents, out, stash.layer(0))
        ops.commit(stash, parents, accepted.to(device), indices, state[None], conv_state=conv_state[None])
        results = {"parents": parents, "outputs": out, "state": state[slot], "convolution state": conv_state[slot]}
        results = {name: value.double().cpu() for name, value in results.items()}
    except Exception as error:  # whatever it is, it would be the first request's error otherwise
        raise TreeWYRefused(f"--enable-treewy: the operators do not run on {device} here: {error}") from error

    ulp = max(torch.finfo(x).eps for x in (dtype, state_dtype, torch.float32))
    expected = {
        "parents": (torch.tensor([PARENTS]), 0.0),
        "outputs": (truth.out, 16 * ulp),
        "state": (truth.states[0], 16 * ulp),
        "convolution state": (columns, 0.0),
    }
    for name, (right, tolerance) in expected.items():
        right = right.double()
        error = (results[name] - right).abs().max()
        if not bool(error <= tolerance * right.abs().max()):
            refuse(
                f"the operators answer wrongly on {device}: {name} off by {float(error):.3g} "
                f"(H={key_heads}, HV={value_heads}, K=V={dim}, {DTYPES[dtype]}, state {DTYPES[state_dtype]})."
            )
    return time.monotonic() - began


def snapshot_bytes_per_request(pool: Any, topk: int) -> int:
    """What intermediate_ssm and intermediate_conv_window would hold for one request, from this pool's tensors."""
    from sglang.srt.mem_cache.memory_pool import conv_window_dedup_enabled

    temporal, conv, nodes = pool.mamba_cache.temporal, pool.mamba_cache.conv[0], pool.stash.u.shape[3]
    window = conv.shape[-1]
    overlapping = conv_window_dedup_enabled(False, not conv.is_cuda, topk, False)
    columns = conv_window_columns(nodes, window, overlapping)
    state = temporal[0, 0].numel() * temporal.element_size()
    return temporal.shape[0] * (nodes * state + columns * conv.shape[2] * conv.element_size())


def prove(model_runner: Any) -> None:
    """Called once per rank when pools and attention backends exist, before any CUDA graph is captured."""
    from treewy_sglang import build_info
    from treewy_sglang.sglang.backend import TreeWYGDNAttnBackend, TreeWYHybridLinearAttnBackend
    from treewy_sglang.sglang.pool import TreeWYMambaPool

    pool = getattr(model_runner.req_to_token_pool, "mamba_pool", None)
    if not isinstance(pool, TreeWYMambaPool) or pool.stash is None:
        refuse(f"the state pool is a {type(pool).__name__} without a stash: apply the patches again.")
    backend = model_runner.attn_backend
    if not isinstance(backend, TreeWYHybridLinearAttnBackend):
        refuse(f"the attention backend is a {type(backend).__name__}, not TreeWY's: apply the patches again.")
    linear = backend.linear_attn_backend
    if not isinstance(linear, TreeWYGDNAttnBackend):
        refuse(f"the linear attention backend is a {type(linear).__name__}, not TreeWY's: apply the patches again.")

    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    layers = [x for x in model_runner.model.modules() if isinstance(x, RadixLinearAttention)]
    if len(layers) != pool.stash.u.shape[0]:
        refuse(f"the model has {len(layers)} Gated DeltaNet layers and the stash {pool.stash.u.shape[0]}.")
    layer, dtype = layers[0], pool.stash.k.dtype
    for name in ("conv_weights", "bias"):
        tensor = getattr(layer, name)
        if tensor is not None and tensor.dtype != dtype:
            refuse(f"the convolution's {name} are {tensor.dtype} and its state {dtype}: set --dtype {DTYPES[dtype]}.")
    seconds = self_test(
        device=pool.mamba_cache.temporal.device,
        key_heads=layer.num_k_heads,
        value_heads=layer.num_v_heads,
        dim=layer.head_v_dim,
        conv_width=layer.conv_weights.shape[1],
        dtype=dtype,
        state_dtype=pool.mamba_cache.temporal.dtype,
        a_log_dtype=layer.A_log.dtype,
        dt_bias_dtype=layer.dt_bias.dtype,
        bias=layer.bias is not None,
    )

    args, stash = model_runner.server_args, pool.stash
    layer_count, rows, nodes = stash.u.shape[0], stash.u.shape[1], stash.u.shape[3]
    snapshot = snapshot_bytes_per_request(pool, args.speculative_eagle_topk or 0)
    logger.info(
        "TreeWY: draft state per request: snapshot=%d stash=%d bytes (T=%d, layers=%d, rows=%d)",
        snapshot,
        stash.nbytes // rows,
        nodes,
        layer_count,
        rows,
    )
    plan, running = sizing.last_plan(), model_runner.max_running_requests
    if plan is not None:
        logger.info(sizing.start_line(plan, nodes, running))
        raised = sizing.raised_line(plan)
        if raised is not None:
            logger.info(raised)
        warning = sizing.cap_warning(plan, running)
        if warning is not None:
            logger.warning(warning)
    logger.info("TreeWY: operators passed their self-test on %s in %.2f s.", stash.u.device, seconds)
    status.started(
        device=str(stash.u.device),
        build=dict(build_info()),
        draft_nodes=nodes,
        stash_rows=rows,
        stash_bytes=stash.nbytes,
        stash_bytes_per_request=stash.nbytes // rows,
        snapshot_bytes_per_request=snapshot,
        state_slots=pool.size,
        max_running_requests=running,
    )
    # As SGLang's scheduler metrics: one rank of an attention group speaks for it.
    ps = model_runner.ps
    if args.enable_metrics and (ps.attn_tp_rank == 0 or args.enable_metrics_for_all_schedulers):
        labels = {"model_name": args.served_model_name, "tp_rank": ps.tp_rank}
        if ps.attn_dp_size > 1:
            labels["dp_rank"] = ps.attn_dp_rank
        status.start_metrics({name: str(value) for name, value in labels.items()})
