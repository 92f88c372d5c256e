"""Exactness: random cases against float64 with the sequential float32 recurrence as the yardstick, drift over many
verify/commit cycles, and repeats compared bit for bit."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import torch

from . import cases as C
from . import truth

LIMIT = 1.5  # worst (request, head) error over the yardstick's worst
DRAFTS = ("chain", "tree", "star", "comb", "binary", "forest")
SLACK = 4 * 2.0**-24  # an error this small is rounding noise of a single operation, whoever made it


@dataclasses.dataclass
class Sample:
    draft: str
    N: int
    T: int
    H: int
    HV: int
    K: int
    act: str
    state: str
    seed: int
    gates: str = "checkpoint"  # or "strong": decay that wipes the state within a node

    def __str__(self):
        return (
            f"{self.draft} N={self.N} T={self.T} H={self.H} HV={self.HV} K=V={self.K} act={self.act} "
            f"state={self.state} gates={self.gates} seed={self.seed}"
        )


def tree(draft: str, T: int, rng: random.Random) -> list[int]:
    def parent(t):
        if draft == "chain":
            return t - 1
        if draft == "star":
            return 0
        if draft == "comb":  # a long path with leaves hanging off it
            return t - 1 if t % 2 else max(0, t - 2)
        if draft == "binary":
            return (t - 1) // 2
        if draft == "forest":
            return rng.randrange(-1, t)
        return rng.randrange(0, t)

    return [-1] + [parent(t) for t in range(1, T)]


def large_batch(device: str) -> int:
    """Requests from which on a GPU prepares value heads together and shares rows, which is another kernel; 0 on a CPU."""
    return 0 if device == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count + 8


def samples(count: int, seed: int = 0, large: int = 0) -> list[Sample]:
    """`large`: requests of every twentieth sample, where that is not 0."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        T = max(1, round(math.exp(rng.uniform(0, math.log(128))))) if i % 10 else rng.choice((16, 17, 32, 33, 64, 65, 128))
        H, ratio = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
        ratio = max(ratio, 8 // (2 * H))  # at least eight (request, head) pairs behind every worst
        out.append(
            Sample(
                draft=DRAFTS[i % len(DRAFTS)],
                N=2 if H * ratio >= 4 else 4,
                T=T,
                H=H,
                HV=H * ratio,
                K=rng.choice((128,) * 6 + (64, 256)),
                act=rng.choice(("bfloat16", "bfloat16", "float16", "float32")),
                state=rng.choice(("float32", "float32", "bfloat16", "float16")),
                seed=seed * 1_000_003 + i,
                gates="strong" if i % 7 == 3 else "checkpoint",
            )
        )
        if large and i % 20 == 7:
            out[-1] = dataclasses.replace(out[-1], N=large, T=min(T, 64), H=1, HV=rng.choice((2, 3, 4)), K=128)
    return out


def tensors(s: Sample, device: str, slots: int | None = None):
    """Inputs of a sample, as strided views of packed tensors, slots in random order in a pool that is too large."""
    g = torch.Generator(device=device).manual_seed(s.seed)
    rng = random.Random(s.seed)
    act = C.DTYPES[s.act]
    slots = slots or s.N + 3

    def normal(*size, std=1.0, dtype=torch.float32):
        return (torch.randn(size, generator=g, device=device) * std).to(dtype)

    def uniform(n, low, high):
        return torch.rand(n, generator=g, device=device) * (high - low) + low

    D = 2 * s.H * s.K + s.HV * s.K
    if s.gates == "strong":
        A_log, dt_bias = uniform(s.HV, 1.5, 2.8), uniform(s.HV, -1.0, 2.0)
    else:
        A_log, dt_bias = uniform(s.HV, -4.0, 2.8), uniform(s.HV, -10.0, 1.0)
    parents = [tree(s.draft, s.T, rng) for _ in range(s.N)]
    data = dict(
        mixed=normal(s.N * s.T, D + 64, dtype=act)[:, :D],
        a=normal(s.N * s.T, s.HV, std=rng.choice((1.0, 3.0)), dtype=act),
        b=normal(s.N * s.T, s.HV, std=2.0, dtype=act),
        A_log=A_log,
        dt_bias=dt_bias,
        state=normal(slots, s.HV, s.K, s.K, std=rng.choice((0.05, 0.5, 2.0))).to(C.DTYPES[s.state]),
        indices=torch.randperm(slots, generator=g, device=device)[: s.N].to(torch.int32),
        parents=torch.tensor(parents, dtype=torch.int32).reshape(s.N, s.T).to(device),
        accepted=torch.tensor([rng.randrange(0, s.T) for _ in range(s.N)], dtype=torch.int32).to(device),
        conv_weight=normal(D, C.CONV_WIDTH, std=0.5, dtype=act),
        conv_bias=normal(D, std=0.1, dtype=act),
        conv_state=normal(1, slots, D, C.CONV_WIDTH - 1, dtype=act),
    )
    return data


def _stash(s: Sample, device: str, conv: bool, extra: int = 0):
    from treewy_sglang.stash import Stash

    return Stash.allocate(
        layers=1,
        rows=s.N + extra,
        nodes=s.T,
        key_heads=s.H,
        value_heads=s.HV,
        key_dim=s.K,
        value_dim=s.K,
        conv_dim=2 * s.H * s.K + s.HV * s.K if conv else None,
        activation_dtype=C.DTYPES[s.act],
        device=device,
    )


def treewy(s: Sample, d: dict, device: str, fused: bool = False, out_dtype=torch.float32):
    """One verify and commit. Returns outputs [N,T,HV,V], the whole state pool after the commit, and the conv pool."""
    from treewy_sglang import ops

    stash = _stash(s, device, fused)
    out = torch.full((s.N * s.T, s.HV, s.K), float("nan"), dtype=out_dtype, device=device)
    parents = None if s.draft == "chain" else d["parents"]
    scale = s.K**-0.5
    gates = (d["a"], d["b"], d["A_log"], d["dt_bias"], d["state"], d["indices"], parents, out, stash.layer(0), scale)
    conv_state = None
    if fused:
        conv_state = d["conv_state"].clone()
        ops.tree_conv_verify(d["mixed"], d["conv_weight"], d["conv_bias"], d["conv_state"][0], *gates)
    else:
        q, k, v = torch.split(d["mixed"], [s.H * s.K, s.H * s.K, s.HV * s.K], dim=-1)
        q, k = (x.unflatten(-1, (s.H, s.K)) for x in (q, k))
        ops.tree_verify(q, k, v.unflatten(-1, (s.HV, s.K)), *gates)
    state = d["state"].clone()[None]
    ops.commit(stash, parents, d["accepted"], d["indices"], state, conv_state)
    return out.view(s.N, s.T, s.HV, s.K), state[0], conv_state


def recurrence(s: Sample, d: dict, dtype, mixed=None):
    mixed = (d["mixed"] if mixed is None else mixed).reshape(s.N, s.T, -1)
    q, k, v = truth.split(mixed, s.H, s.HV, s.K, s.K)
    a, b = (d[x].view(s.N, s.T, s.HV) for x in "ab")
    start = d["state"][d["indices"].long()]
    return truth.recurrence(q, k, v, a, b, d["A_log"], d["dt_bias"], start, d["parents"], s.K**-0.5, dtype)


def errors(s: Sample, device: str) -> dict:
    """Worst (request, head) errors of treewy and of the yardstick: outputs in float32, committed states as stored."""
    d = tensors(s, device)
    out, pool, _ = treewy(s, d, device)
    want, want_states = recurrence(s, d, torch.float64)
    seq, seq_states = recurrence(s, d, torch.float32)
    rows = torch.arange(s.N, device=device)
    accepted = d["accepted"].long()
    want_state = want_states[rows, accepted]
    stored = seq_states[rows, accepted].to(C.DTYPES[s.state])
    return dict(
        out=truth.output_errors(out, want).max().item(),
        out_seq=truth.output_errors(seq, want).max().item(),
        state=truth.state_errors(pool[d["indices"].long()], want_state).max().item(),
        state_seq=truth.state_errors(stored, want_state).max().item(),
    )


def campaign(count: int, device: str, seed: int = 0, progress=print) -> dict:
    """`count` random cases. Green when the worst error is within LIMIT of the yardstick's worst, overall and for every
    draft shape, state dtype and kind of gates."""
    truth.exact_float32()
    results = []
    for i, s in enumerate(samples(count, seed, large_batch(device))):
        results.append((s, errors(s, device)))
        if progress and (i + 1) % 250 == 0:
            progress(f"accuracy: {i + 1} of {count} cases")
    report = {"cases": count, "seed": seed, "groups": {}, "ok": True}

    def group(name, chosen):
        if not chosen:
            return
        line = {}
        for what in ("out", "state"):
            ours, yard = (max(e[key] for _, e in chosen) for key in (what, what + "_seq"))
            ratios = [e[what] / max(e[what + "_seq"], SLACK) for _, e in chosen]
            line[what] = dict(
                error=ours, yardstick=yard, ratio=ours / yard, median_ratio=statistics.median(ratios), worst_case=max(ratios)
            )
            report["ok"] &= bool(ours <= LIMIT * max(yard, SLACK))
        line["cases"] = len(chosen)
        report["groups"][name] = line

    group("all", results)
    group("large batches", [r for r in results if r[0].N > 4])
    for field in ("draft", "state", "gates", "K", "act"):
        for value in sorted({getattr(s, field) for s, _ in results}, key=str):
            group(f"{field}={value}", [r for r in results if getattr(r[0], field) == value])
    worst = sorted(results, key=lambda r: -r[1]["out"] / max(r[1]["out_seq"], SLACK))[:5]
    report["worst"] = [dict(case=str(s), **e) for s, e in worst]
    return report


def drift(cycles: int, device: str, draft: str = "chain", T: int = 8, seed: int = 7) -> dict:
    """The same inputs through treewy, the float32 recurrence and the float64 one, each from its own last state."""
    truth.exact_float32()
    s = Sample(draft, N=2, T=T, H=4, HV=8, K=128, act="bfloat16", state="float32", seed=seed)
    d = tensors(s, device)
    d["A_log"] = torch.linspace(-6.0, 2.0, s.HV, device=device)  # from memory of a thousand tokens to a few
    d["dt_bias"] = torch.linspace(-6.0, -2.0, s.HV, device=device)
    states = {name: d["state"].clone() for name in ("treewy", "float32")}
    states["float64"] = d["state"].double()
    rows, indices = torch.arange(s.N, device=device), d["indices"].long()
    points = []
    for cycle in range(cycles):
        step = tensors(dataclasses.replace(s, seed=seed + 1 + cycle), device)
        step.update(A_log=d["A_log"], dt_bias=d["dt_bias"], indices=d["indices"])
        accepted = step["accepted"].long()
        for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            step["state"] = states[name]
            _, nodes = recurrence(s, step, dtype)
            states[name] = states[name].clone()
            states[name][indices] = nodes[rows, accepted]
        step["state"] = states["treewy"]
        _, states["treewy"], _ = treewy(s, step, device)
        if (cycle + 1) % max(1, cycles // 10) == 0:
            want = states["float64"][indices]
            e = {n: truth.state_errors(states[n][indices], want).max().item() for n in ("treewy", "float32")}
            points.append(dict(cycle=cycle + 1, **e))
    last = points[-1]
    worst = max(p["treewy"] / max(p["float32"], SLACK) for p in points)
    return dict(draft=draft, nodes=T, points=points, worst_ratio=worst, ok=bool(last["treewy"] <= LIMIT * last["float32"]))


def repeats(device: str, times: int = 10, count: int = 24) -> list[str]:
    """Outputs, state pool and conv pool of the same inputs, `times` times: bit for bit the same. Returns what was not."""
    wrong = []
    for s in samples(count, seed=99):
        d = tensors(s, device)
        for fused in (False, True):
            first = treewy(s, d, device, fused, C.DTYPES[s.act])
            for _ in range(times - 1):
                again = treewy(s, d, device, fused, C.DTYPES[s.act])
                for name, x, y in zip(("out", "state", "conv state"), first, again):
                    if x is not None and not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                        wrong.append(f"{name} of {s}{' fused' if fused else ''}")
    return wrong


def text(report: dict) -> str:
    lines = [f"accuracy over {report['cases']} cases: worst (request, head) error, sequential float32's, ratio"]
    for name, g in report["groups"].items():
        o, st = g["out"], g["state"]
        lines.append(
            f"  {name:18s} {g['cases']:5d}  out {o['error']:.2e} / {o['yardstick']:.2e} = {o['ratio']:.2f} "
            f"(median {o['median_ratio']:.2f}, worst case {o['worst_case']:.2f})   "
            f"state {st['error']:.2e} / {st['yardstick']:.2e} = {st['ratio']:.2f} (worst case {st['worst_case']:.2f})"
        )
    for w in report["worst"][:3]:
        lines.append(f"  worst: {w['case']}: out {w['out']:.2e} seq {w['out_seq']:.2e}")
    return "\n".join(lines)
