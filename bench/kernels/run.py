"""Runs one case: fits it into memory, compares it with the truth, times it, and makes a row of it."""

from __future__ import annotations

import torch

from . import cases as C
from . import ours, peers, problem, timing, truth

ROWS_CHECKED = 2
TOLERANCE = {"out": 1e-2, "state": 2e-3}  # outputs are bfloat16; a wrong row or a leaking sibling is near 1


class WrongResult(RuntimeError):
    pass


def free_bytes(device: str) -> int | None:
    if device != "cuda":
        return None
    # What the caching allocator holds and nothing uses counts as free: it gives it back when an allocation needs it.
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def build(case: C.Case, pool: problem.Pool, device: str):
    shape = pool.shape
    if case.mode in peers.PEERS:
        need = peers.bytes_per_layer(case, shape, pool.slots)
        p = problem.plan(case, pool, need, free_bytes(device))
        return p, peers.PEERS[case.mode](peers.load(), p)
    need = ours.bytes_per_layer(case, shape)
    p = problem.plan(case, pool, need, free_bytes(device))
    return p, ours.TreeWY(p, fused=case.mode == "treewy-fused-conv")


def _expected(case, p, s, layer, rows):
    """Truth of a few rows: outputs, states of all their nodes, and the convolution windows in the fused form."""
    shape, pool = p.pool.shape, p.pool
    mixed, a, b = p.inputs(s, layer)
    mixed, a, b = (x.view(p.N, p.T, -1)[rows] for x in (mixed, a, b))
    parents = None if p.parents is None else p.parents[rows]
    slots = p.slots[s][rows].long()
    windows = None
    if case.mode == "treewy-fused-conv":
        mixed, windows = truth.convolution(
            mixed, pool.conv_weight, None, p.conv_state[layer][slots], parents, torch.float64, mixed.dtype
        )
    q, k, v = truth.split(mixed, shape.H, shape.HV, shape.K, shape.V)
    start = p.state[layer][slots]
    out, states = truth.recurrence(
        q, k, v, a, b, pool.gates.A_log, pool.gates.dt_bias, start, parents, shape.K**-0.5, torch.float64
    )
    return out, states, windows


def _compare(case, what, got, want, errors_of):
    error = errors_of(got, want).max().item()
    limit = TOLERANCE["state"] if what == "state" and case.state_dtype == "float32" else TOLERANCE["out"]
    if not error <= limit:
        raise WrongResult(f"{what} differs from float64 by {error:.3g} (allowed {limit})")


def check_in_place(case, p, kernels) -> None:
    """At the size that is timed: outputs of some rows of the last layer, then their committed states."""
    s, layer = p.sets - 1, p.layers - 1
    rows = torch.tensor(sorted({0, p.N - 1})[:ROWS_CHECKED], device=p.device)
    out, states, windows = _expected(case, p, s, layer, rows)
    for i in range(p.layers):  # the stash of every layer is needed by the commit
        got = kernels.verify(s, i)
    got = got.view(p.N, p.T, *out.shape[2:])[rows]
    _compare(case, "out", got, out, truth.output_errors)
    accepted = p.accepted.long()[rows]
    index = torch.arange(len(rows), device=p.device)
    slots = p.slots[s][rows].long()
    if peers.overflows(case, p.pool.shape) and not getattr(kernels, "commit_anyway", False):
        return
    getattr(kernels, "commit_state", kernels.commit)(s)
    _compare(case, "state", p.state[layer][slots], states[index, accepted], truth.state_errors)
    if windows is not None and not torch.equal(p.conv_state[layer][slots], windows[index, accepted]):
        raise WrongResult("conv state differs from the raw inputs along the accepted path")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def fatal(error: BaseException) -> bool:
    """The CUDA context is gone: nothing more can run in this process."""
    text = str(error).lower()
    return any(w in text for w in ("illegal memory access", "device-side assert", "unspecified launch failure",
                                   "misaligned address", "cuda error: an illegal"))


def run(case: C.Case, pool: problem.Pool, device: str, isolated: bool = False, budget_ms: float = 60.0):
    """Returns (figures of the row, the error that ended the process's CUDA context or None)."""
    row = dict(verify_us=None, conv_us=None, commit_us=None, error=None)
    try:
        p, kernels = build(case, pool, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        row["error"] = _short(error)
        return row, None
    row.update(layers=p.layers, sets=p.sets, accepted_depth=round(p.depth, 2))
    pairs, sets = p.pairs, range(p.sets)
    steps = []

    def step(name, calls, per_call=1):
        steps.append((name, calls, per_call))

    step("verify_us", [lambda s=s, i=i: kernels.verify(s, i) for s, i in pairs])
    commits = [lambda s=s: kernels.commit(s) for s in sets]
    if case.mode in peers.PEERS:
        overflow = peers.overflows(case, pool.shape)
        if overflow and not isolated:
            row["error"] = (
                "commit not run: the state scatter multiplies row x stride in 32 bits and "
                f"{case.requests - 1} x {case.nodes * pool.shape.state_numel} does not fit"
            )
        else:
            kernels.commit_anyway = True
            step("commit_us", commits, p.layers)
            step("commit_state_us", [lambda s=s: kernels.commit_state(s) for s in sets], p.layers)
        step("conv_us", [lambda s=s, i=i: kernels.conv(s, i) for s, i in pairs])
    else:
        step("commit_us", commits, p.layers)
        if case.mode == "treewy-fused-conv":
            row["conv_us"] = 0.0  # inside verify
            if p.links is not None:
                step("links_us", [kernels.links] * 20)
    try:
        if not isolated:
            check_in_place(case, p, kernels)
            row["checked"] = True
    except Exception as error:
        row["error"] = _short(error)
        if fatal(error) or case.mode not in peers.PEERS:
            return row, error
    if isolated:  # what may end the process comes last
        steps.sort(key=lambda s: s[0].startswith("commit"))
    for name, calls, per_call in steps:
        try:
            least = -(-timing.L2_FLOOR // (p.N * C.state_bytes(pool.shape, case.state_dtype) * per_call))
            us = timing.graph_us(calls, device, budget_ms, min(len(calls), least))
            row[name] = round(us / per_call, 4)
        except Exception as error:
            row["error"] = "; ".join(filter(None, [row["error"], f"{name[:-3]}: {_short(error)}"]))
            if fatal(error):
                return row, error
    if isolated and not row["error"]:  # it survived: are the states right?
        try:
            check_in_place(case, p, kernels)
            row["checked"] = True
        except Exception as error:
            row["error"] = _short(error)
    if device == "cuda":
        torch.cuda.synchronize()
    return row, None
