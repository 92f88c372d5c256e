"""A plan as an object for JSON, as a table made from that object, and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Iterator, Optional

from .capacity import GIB, MAX_NODES, METHODS, Plan, Sizes
from .errors import PlanError

TITLES = {"snapshot": "snapshots", "replayssm": "ReplaySSM", "treewy": "TreeWY"}
LIMITS = {
    "requests": "requests asked for",
    "state": "state slots",
    "kv": "KV cache",
    "both": "slots and KV cache",
    "weights": "weights do not fit",
    "method": "chains only",
}


def as_dict(p: Plan) -> dict[str, Any]:
    """Bytes are of one request over all layers and all GPUs; where the key ends with _per_gpu, of one GPU."""
    server, slots, tp = p.server, p.server.slots_per_request, p.tp
    kv, slot = p.kv_bytes_per_token * server.context_length, sum(p.slot.values())
    methods = {}
    for name in METHODS:
        fit = p.fits[name]
        served = fit.reason is None
        methods[name] = {
            "served": served,
            "reason": fit.reason,
            "draft_bytes_per_request": fit.total * tp if served else None,
            "draft_bytes_per_request_per_gpu": fit.total if served else None,
            "parts": {part: count * tp for part, count in fit.parts.items()},
            "charged_bytes_per_request_per_gpu": fit.charged if served else None,
            "bytes_per_request": (fit.total + slots * slot + kv) * tp if served else None,
            "running_requests": fit.running,
            "limited_by": fit.limit,
            "max_running_requests": fit.max_running,
            "max_mamba_cache_size": fit.slots,
            "max_mamba_cache_size_raised_from": fit.raised_from,
            "max_total_num_tokens": fit.tokens,
            "widest_free_draft_nodes": fit.widest,
        }
    copy = p.slot["state"] * tp
    return {
        "model": p.model.name,
        "source": p.model.source,
        "device": server.device,
        "algorithm": server.algorithm,
        "tp": tp,
        "dtype": p.dtype,
        "state_dtype": p.state_dtype,
        "kv_dtype": server.kv_dtype,
        "draft": {"nodes": p.draft.nodes, "drafts": p.draft.drafts, "topk": p.draft.topk, "shape": p.draft.shape},
        "gpu_memory_gib": server.gpu_memory,
        "mem_fraction_static": server.mem_fraction,
        "weights_gib_per_gpu": round(p.weights_bytes / GIB, 3),
        "states_and_kv_gib_per_gpu": round(p.rest_bytes / GIB, 3),
        "context_length": server.context_length,
        "requests": server.requests,
        "mamba_full_memory_ratio": server.mamba_full_memory_ratio,
        "slots_per_request": slots,
        "state_slot_bytes": slot * tp,
        "state_slot_bytes_per_gpu": slot,
        "kv_bytes_per_request": kv * tp,
        "kv_bytes_per_token_per_gpu": p.kv_bytes_per_token,
        "snapshot_bytes_per_node": copy,
        "snapshot_bytes_of_drafts": copy * p.draft.drafts,
        "methods": methods,
    }


def size(count: float) -> str:
    """A number of bytes in the unit that leaves at least one digit before the point."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError


def table(d: dict[str, Any]) -> str:
    """The object of `as_dict` for people."""
    methods = d["methods"]
    gpus = "one GPU" if d["tp"] == 1 else f"all {d['tp']} GPUs"
    rows: list[tuple[str, ...]] = [(f"per request, {gpus}", *(TITLES[m] for m in METHODS))]

    def add(label: str, cell, served_only: bool = True) -> None:
        rows.append((label, *("-" if served_only and not methods[m]["served"] else cell(methods[m]) for m in METHODS)))

    add("state of the draft", lambda m: size(m["draft_bytes_per_request"]))
    for part in dict.fromkeys(part for m in METHODS for part in methods[m]["parts"]):
        add("  " + part, lambda m, part=part: size(m["parts"][part]) if part in m["parts"] else "-")
    add(f"state slots ({d['slots_per_request']})", lambda m: size(d["slots_per_request"] * d["state_slot_bytes"]))
    add(f"KV cache ({d['context_length']} tokens)", lambda m: size(d["kv_bytes_per_request"]))
    add("together", lambda m: size(m["bytes_per_request"]))
    if d["tp"] > 1:
        add("state of the draft on one GPU", lambda m: size(m["draft_bytes_per_request_per_gpu"]))
    add("requests that run at a time", lambda m: str(m["running_requests"]))
    add("  limited by", lambda m: LIMITS[m["limited_by"]], served_only=False)
    add("  state slots in the pool", lambda m: str(m["max_mamba_cache_size"]))
    add("  tokens in the KV cache", lambda m: str(m["max_total_num_tokens"]))
    add("widest draft that costs no request", lambda m: widest(m["widest_free_draft_nodes"]))

    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    draft = d["draft"]
    lines = [
        f"{d['model']}: {draft['shape']}, {draft['nodes']} nodes with the root; state {d['state_dtype']}, "
        f"activations {d['dtype']}, tp {d['tp']}",
        f"A copy of the state is {size(d['snapshot_bytes_per_node'])}: {size(d['snapshot_bytes_of_drafts'])} for the "
        f"{draft['drafts']} drafts, {size(d['snapshot_bytes_per_node'] * draft['nodes'])} with the root.",
        f"{d['gpu_memory_gib']:g} GiB a GPU x {d['mem_fraction_static']:g} - {d['weights_gib_per_gpu']:.2f} GiB of weights = "
        f"{d['states_and_kv_gib_per_gpu']:.2f} GiB for states and KV cache",
        "",
    ]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    raised = methods["treewy"]
    if raised["max_mamba_cache_size_raised_from"] is not None:
        default = raised["max_mamba_cache_size_raised_from"]
        lines += [
            "",
            f"TreeWY's server raises the state slots from {default} to {raised['max_mamba_cache_size']}: the default split would "
            f"run {default // d['slots_per_request']} requests and",
            "leave KV cache that these cannot fill. A --mamba-full-memory-ratio other than the default fixes the split.",
        ]
    if d["states_and_kv_gib_per_gpu"] <= 0:
        lines += [
            "",
            "The weights do not fit: raise --tp, --gpu-memory or --mem-fraction, or give a smaller --weights-dtype.",
        ]
    return "\n".join(lines)


def widest(nodes: Optional[int]) -> str:
    if nodes is None:
        return "-"
    if nodes == 0:
        return "none"
    return f"{nodes} nodes" + (" (all)" if nodes == MAX_NODES else "")


def sweep(p: Plan) -> Iterator[dict[str, Any]]:
    """The plan for every number of nodes up to the operators' limit."""
    sizes = Sizes(p.model, p.server)
    for nodes in range(1, MAX_NODES + 1):
        draft = p.draft.with_nodes(nodes)
        yield {"nodes": nodes, **{m: sizes.fit(m, draft) for m in METHODS}}


def picture(p: Plan, path: Path) -> None:
    """Bytes per request, and requests that run, against the nodes of the draft."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise PlanError(
            f"--png is {str(path)!r} and matplotlib cannot be imported ({error}); allowed: with it "
            "(pip install 'treewy-sglang[plot]'), or no --png"
        ) from error
    points = list(sweep(p))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for method, colour in zip(METHODS, ("#b3541e", "#5b7db1", "#1b7a4b")):
        served = [x for x in points if x[method].reason is None]
        nodes = [x["nodes"] for x in served]
        if nodes:
            left.plot(nodes, [x[method].total / 2**20 for x in served], color=colour, label=TITLES[method])
            right.plot(
                nodes, [x[method].running for x in served], color=colour, label=TITLES[method], drawstyle="steps-post"
            )
    for axes in (left, right):
        axes.axvline(p.draft.nodes, color="0.7", linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        ticks = [2**i for i in range(int(math.log2(MAX_NODES)) + 1)]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xlabel("nodes of the draft")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_yscale("log")
    left.set_title("state of the draft, MiB per request" + (" and GPU" if p.tp > 1 else ""))
    right.set_title(f"requests that run ({p.server.context_length} tokens each)")
    right.set_ylim(bottom=0)
    figure.suptitle(f"{p.model.name}, state {p.state_dtype}, tp {p.tp}, {p.server.gpu_memory:g} GiB a GPU")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise PlanError(f"--png is {str(path)!r}, which cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
