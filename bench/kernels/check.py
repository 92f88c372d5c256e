"""The gate before any timing: treewy against the float64 recurrence. Red means nothing is timed."""

from __future__ import annotations

import torch

from . import accuracy as A
from . import cases as C
from . import truth


def run(device: str, quick: bool = False, seed: int = 5) -> list[str]:
    """Every draft shape and dtype at small sizes, both forms of verify, with commit. Returns what is wrong."""
    from treewy_sglang import reference

    truth.exact_float32()
    wrong = []

    def expect(condition, text):
        if not condition:
            wrong.append(text)

    for i, s in enumerate(A.samples(12 if device == "cpu" else 36 if quick else 120, seed, A.large_batch(device))):
        d = A.tensors(s, device)
        rows, accepted, slots = torch.arange(s.N, device=device), d["accepted"].long(), d["indices"].long()
        untouched = torch.ones(d["state"].shape[0], dtype=torch.bool, device=device)
        untouched[slots] = False
        for fused in (False, True):
            name = f"{s}{' fused' if fused else ''}"
            out, pool, conv_pool = A.treewy(s, d, device, fused)
            mixed = windows = None
            if fused:
                mixed, windows = truth.convolution(
                    d["mixed"].reshape(s.N, s.T, -1),
                    d["conv_weight"],
                    d["conv_bias"],
                    d["conv_state"][0][slots],
                    d["parents"],
                    torch.float64,
                    d["mixed"].dtype,
                )
            want, states = A.recurrence(s, d, torch.float64, mixed)
            seq, seq_states = A.recurrence(s, d, torch.float32, mixed)
            got, yard = truth.output_errors(out, want).max().item(), truth.output_errors(seq, want).max().item()
            # A gate, not the accuracy campaign: loose enough for any correct float32 kernel, far below any real fault.
            # A convolution output beside a rounding boundary may round the other way in float32.
            slack = 2e-3 if fused and s.act != "float32" else 1e-5
            allowed = max(4 * yard, slack)
            expect(got <= allowed, f"{name}: out {got:.3g}, allowed {allowed:.3g}")
            stored = seq_states[rows, accepted].to(C.DTYPES[s.state])
            got = truth.state_errors(pool[slots], states[rows, accepted]).max().item()
            yard = truth.state_errors(stored, states[rows, accepted]).max().item()
            allowed = max(4 * yard, slack)
            expect(got <= allowed, f"{name}: committed state {got:.3g}, allowed {allowed:.3g}")
            expect(torch.equal(pool[untouched], d["state"][untouched]), f"{name}: a slot outside the batch changed")
            if fused:
                expect(torch.equal(conv_pool[0][slots], windows[rows, accepted]), f"{name}: conv state")
                expect(torch.equal(conv_pool[0][untouched], d["conv_state"][0][untouched]), f"{name}: conv slot changed")
    for s in A.samples(8, seed + 1):
        d = A.tensors(s, device)
        q, k, v = (x.flatten(0, 1) for x in truth.split(d["mixed"].reshape(s.N, s.T, -1), s.H, s.HV, s.K, s.K))
        theirs = reference.recurrence(
            q, k, v, d["a"], d["b"], d["A_log"], d["dt_bias"], d["state"], d["indices"], d["parents"], nodes=d["accepted"]
        )
        mine, states = A.recurrence(s, d, torch.float64)
        rows = torch.arange(s.N, device=device)
        for what, x, y in (("out", mine, theirs.out.view_as(mine)), ("state", states[rows, d["accepted"].long()], theirs.states)):
            error = (torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(x)).item()
            expect(error <= 1e-11, f"the two float64 references differ: {what} of {s}: {error:.3g}")
    wrong += [f"repeat not bit-equal: {w}" for w in A.repeats(device, times=3 if quick else 10, count=2 if device == "cpu" else 6 if quick else 24)]
    counts = _counters(device)
    expect(not any(counts.values()), f"error counters are not zero: {counts}")
    return wrong


def _counters(device: str) -> dict:
    import treewy_sglang

    return treewy_sglang.check_errors(torch.device(device), reset=True)
