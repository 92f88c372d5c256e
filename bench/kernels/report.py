"""From rows to a table of targets and a plot."""

from __future__ import annotations

import math
from pathlib import Path

from . import cases as C

# (what, threshold, at least or at most): the targets, all at float32 state and the 35B shape.
READ_SHARE, READWRITE_SHARE = 0.75, 0.85
STEP, TREE16, TREE64 = 1.35, 1.3, 3.0
FUSED = 1.15


def line(row: dict) -> str:
    def us(key):
        return "     -" if row.get(key) is None else f"{row[key]:6.1f}"

    text = (
        f"{row['shape']:9s}{row['requests']:4d} x {row['draft']}{row['nodes']:<4d} {row['mode']:18s}"
        f"verify {us('verify_us')}  conv {us('conv_us')}  commit {us('commit_us')} us/layer"
    )
    return text + (f"  [{row['error']}]" if row.get("error") else "")


class _Rows:
    def __init__(self, rows, shape="35B", dtype="float32"):
        # The newest row of a case wins, so that a rerun replaces what it repeats.
        self.by = {
            (r["requests"], r["draft"], r["nodes"], r["mode"]): r
            for r in rows
            if r["shape"] == shape and r["state_dtype"] == dtype
        }

    def get(self, requests, draft, nodes, mode, *keys):
        """Sum of the keys, or None when one is missing."""
        row = self.by.get((requests, draft, nodes, mode))
        if row is None or any(row.get(k) is None for k in keys):
            return None
        return sum(row[k] for k in keys)

    def total(self, requests, draft, nodes, mode):
        """verify + commit of the state alone: the convolution's share is left out on both sides."""
        commit = "commit_us" if mode.startswith("treewy") else "commit_state_us"
        return self.get(requests, draft, nodes, mode, "verify_us", commit)

    def whole(self, requests, draft, nodes, mode):
        """Convolution, verify and the whole commit."""
        return self.get(requests, draft, nodes, mode, "conv_us", "verify_us", "commit_us")


def targets(rows: list[dict]) -> list[tuple[str, str, str, bool | None]]:
    """(target, threshold, measured, met); met is None where a figure is missing."""
    r, shape = _Rows(rows), C.SHAPES["35B"]
    out = []

    def add(name, threshold, value, met, text):
        out.append((name, threshold, "not measured" if value is None else text(value), None if value is None else met(value)))

    def ratio(a, b):
        return None if not a or not b else a / b

    # Rounded against the target, so that the printed figure never contradicts the verdict.
    def at_most(name, limit, value):
        add(name, f"<= {limit:.2f}", value, lambda x: x <= limit, lambda x: f"{math.ceil(x * 100) / 100:.2f}")

    def at_least(name, limit, value, suffix=""):
        add(name, f">= {limit:g}", value, lambda x: x >= limit, lambda x: f"{math.floor(x * 100) / 100:.2f}{suffix}")

    row = r.by.get((64, "chain", 4, "treewy"))
    moved = 64 * C.state_bytes(shape, "float32")
    verify = r.get(64, "chain", 4, "treewy", "verify_us")
    share = None if not verify or not row["read_gbps"] else moved / verify / 1e3 / row["read_gbps"]
    add("verify 64 x chain 4, share of read bandwidth", ">= 75 %", share, lambda x: x >= READ_SHARE,
        lambda x: f"{100 * x:.1f} % ({verify:.1f} us)")  # fmt: skip
    commit = r.get(64, "chain", 4, "treewy", "commit_us")
    share = None if not commit or not row["readwrite_gbps"] else 2 * moved / commit / 1e3 / row["readwrite_gbps"]
    add("commit 64 x chain 4, share of read+write bandwidth", ">= 85 %", share, lambda x: x >= READWRITE_SHARE,
        lambda x: f"{100 * x:.1f} % ({commit:.1f} us)")  # fmt: skip
    at_most("verify 64 x tree 16 / chain 4", TREE16, ratio(r.get(64, "tree", 16, "treewy", "verify_us"), verify))
    at_most("verify 64 x tree 64 / chain 4", TREE64, ratio(r.get(64, "tree", 64, "treewy", "verify_us"), verify))
    for draft in ("chain", "tree"):
        steps = []
        for T in range(2, 64):
            a, b = (r.get(64, draft, t, "treewy", "verify_us") for t in (T, T + 1))
            steps.append((ratio(b, a), T))
        known = [s for s in steps if s[0] is not None]
        worst = max(known) if len(known) == len(steps) else None
        add(f"verify 64, {draft}s: largest step from T to T+1, 2..64", f"<= {STEP}", worst, lambda x: x[0] <= STEP,
            lambda x: f"{x[0]:.2f} (T = {x[1]})")  # fmt: skip
    for n, limit, peer in (
        (64, 2.0, "snapshot"), (64, 1.5, "replayssm"), (256, 2.0, "snapshot"), (256, 1.5, "replayssm"),
        (1, 1.0, "snapshot"), (1, 1.0, "replayssm"), (4, 1.0, "snapshot"), (4, 1.0, "replayssm"),
    ):  # fmt: skip
        value = ratio(r.total(n, "chain", 4, peer), r.total(n, "chain", 4, "treewy"))
        at_least(f"verify+commit {n} x chain 4: {peer} / treewy", limit, value, "x")
    for nodes, limit in ((16, 8.0), (64, 30.0)):
        value = ratio(r.total(64, "tree", nodes, "snapshot"), r.total(64, "tree", nodes, "treewy"))
        at_least(f"verify+commit 64 x tree {nodes}: snapshot / treewy", limit, value, "x")
    for draft, nodes in (("chain", 4), ("tree", 16), ("tree", 64)):
        value = ratio(r.total(64, draft, nodes, "treewy-fused-conv"), r.total(64, draft, nodes, "treewy"))
        at_most(f"fused convolution / without, 64 x {draft} {nodes}", FUSED, value)
    share = C.snapshot_bytes_per_node(shape, "float32") / C.stash_bytes_per_node(shape)
    at_least("snapshot bytes / stash bytes per node", 50, share, "x")
    return out


def table(rows: list[dict]) -> str:
    if not rows:
        return "no rows"
    lines = ["", f"{'target (35B, float32 state)':58s}{'threshold':>10s}  measured"]
    for name, threshold, measured, met in targets(rows):
        mark = {True: "met", False: "MISSED", None: ""}[met]
        lines.append(f"{name:58s}{threshold:>10s}  {measured:22s}{mark}")
    lines += ["", "convolution + verify + whole commit, us a layer (what a server pays)"]
    drafts = [C.parse_draft(d) for d in C.DRAFTS]
    for shape in [s for s in C.SHAPES if any(row["shape"] == s for row in rows)]:
        r = _Rows(rows, shape)
        for n in sorted({k[0] for k in r.by}):
            for draft, nodes in drafts:
                cells = {
                    "treewy": r.whole(n, draft, nodes, "treewy-fused-conv"),
                    "snapshot": r.whole(n, draft, nodes, "snapshot"),
                    "replayssm": r.whole(n, draft, nodes, "replayssm"),
                }
                if cells["treewy"] is None:
                    continue
                text = "  ".join(f"{k} {v:9.1f} ({v / cells['treewy']:5.1f}x)" for k, v in cells.items() if v)
                lines.append(f"  {shape:9s}{n:4d} x {draft}{nodes:<4d} {text}")
    errors = [row for row in rows if row.get("error")]
    if errors:
        lines += ["", f"{len(errors)} rows with an error:"]
        lines += [f"  {row['shape']:9s}{row['requests']:4d} x {row['draft']}{row['nodes']:<4d} {row['mode']}: {row['error']}"
                  for row in errors]  # fmt: skip
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> str:
    """Writes the PNG; returns a sentence that says where, or why not."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        return f"no plot: {error} (pip install matplotlib, then --report)"
    r = _Rows(rows)
    if not r.by:
        return "no plot: there are no rows of shape 35B with float32 state"
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    labels = {"treewy": "treewy", "treewy-fused-conv": "treewy, convolution fused", "snapshot": "SGLang snapshots",
              "replayssm": "SGLang ReplaySSM"}  # fmt: skip
    styles = {"treewy": "o-", "treewy-fused-conv": "s--", "snapshot": "^-", "replayssm": "d-"}
    colors = dict(zip(labels, ("C0", "C9", "C3", "C1")))
    any_row = next(iter(r.by.values()))
    for mode in labels:
        for draft, fill in (("tree", "full"), ("chain", "none")):
            points = sorted((k[2], r.total(*k)) for k in r.by if k[0] == 64 and k[1] == draft and k[3] == mode and r.total(*k))
            points = [p for p in points if mode != "treewy" or f"{draft}{p[0]}" in C.DRAFTS]
            if points:
                left.plot(*zip(*points), styles[mode], color=colors[mode], fillstyle=fill, label=f"{labels[mode]}, {draft}s")
        points = sorted((k[0], r.total(*k)) for k in r.by if k[1:3] == ("chain", 4) and k[3] == mode and r.total(*k))
        if points:
            right.plot(*zip(*points), styles[mode], color=colors[mode], label=labels[mode])
    state = C.state_bytes(C.SHAPES["35B"], "float32")
    if any_row.get("read_gbps"):
        floor = lambda n: n * state / any_row["read_gbps"] / 1e3 + 2 * n * state / any_row["readwrite_gbps"] / 1e3
        left.axhline(floor(64), color="0.6", ls=":", label="read once + read and write once")
        xs = sorted({k[0] for k in r.by})
        right.plot(xs, [floor(n) for n in xs], ":", color="0.6", label="read once + read and write once")
    left.set(xlabel="draft nodes", ylabel="verify + commit, us a layer", title="64 requests")
    right.set(xlabel="requests", ylabel="verify + commit, us a layer", title="chain of 4")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize=7)
    figure.suptitle(f"Qwen3.5-35B-A3B GDN layer, float32 state, {any_row['gpu']}, commit {any_row['commit']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return f"plot: {path}"
