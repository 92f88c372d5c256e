"""The tables of docs/performance.md and docs/supported.md, from the rows in bench/results: no figure there is typed.

    python tools/performance_tables.py [--write]

Without --write: exit status 1 when a page differs from what the rows say.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import page_parts  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
RUN = "2026-12-01-h200-3c5cd9f13"
RESULTS = ROOT / "bench" / "results"
DRAFTS = (("chain", 4), ("tree", 16), ("tree", 64))
REQUESTS = (1, 4, 16, 64, 256)


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def shared(rows: list[dict], key: str) -> str:
    """The value of a key in all rows; where they differ, all values."""
    return ", ".join(sorted({str(r[key]) for r in rows}))


def rows() -> list[dict]:
    return read(f"kernels-{RUN}.jsonl")


def report():
    from bench.kernels import report

    return report


def markdown(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *lines])


def provenance() -> str:
    one = functools.partial(shared, rows())
    clocks = sorted({r["clock_mhz"] for r in rows()})
    return (f"Device: {one('gpu')} at {clocks[0]} to {clocks[-1]} MHz. Commit: {one('commit')}. Beside it: SGLang {one('sglang')}, PyTorch "
            f"{one('torch')}, Triton {one('triton')}. {len(rows())} rows.")  # fmt: skip


def comparison(kind: str, ours: str) -> str:
    found = report()._Rows(rows())
    value = getattr(found, kind)
    lines = []
    for draft, nodes in DRAFTS:
        for n in REQUESTS:
            mine = value(n, draft, nodes, ours)
            if mine is None:
                continue

            def peer(mode):
                theirs = value(n, draft, nodes, mode)
                if theirs is None:
                    row = found.by.get((n, draft, nodes, mode))
                    return "-" if row is None else "did not run"
                return f"{theirs:.0f} ({theirs / mine:.1f}x)"

            lines.append([f"{draft} of {nodes}", str(n), f"{mine:.0f}" if mine >= 20 else f"{mine:.1f}", peer("snapshot"), peer("replayssm")])
    return markdown(["draft", "requests", "TreeWY", "snapshots", "ReplaySSM"], lines)


def targets() -> str:
    names = {True: "met", False: "missed", None: "not measured"}
    return markdown(
        ["what", "aim", "measured", "verdict"],
        [[name, threshold, measured, names[met]] for name, threshold, measured, met in report().targets(rows())],
    )


def exactness() -> str:
    accuracy = json.loads((RESULTS / f"accuracy-{RUN}.json").read_text())["accuracy"]
    groups = accuracy["groups"]
    cases = f"{accuracy['cases']} random cases"
    # Both sides round a 16-bit state alike, and that rounding is most of its error: float32 states have a row of their own.
    lines = [
        [what, f"{groups[group][key]['error']:.1e}", f"{groups[group][key]['yardstick']:.1e}"]
        for what, group, key in (
            (f"worst error of an output, {cases}", "all", "out"),
            (f"worst error of a committed state in float32, {groups['state=float32']['cases']} of these cases", "state=float32", "state"),
            (f"worst error of a committed state in float32, bfloat16 or float16, {cases}", "all", "state"),
        )
    ]
    for drift in json.loads((RESULTS / f"drift-{RUN}.json").read_text())["drift"]:
        last = drift["points"][-1]
        lines.append([f"state after {last['cycle']} verify/commit cycles, {drift['draft']} of {drift['nodes']}",
                      f"{last['treewy']:.1e}", f"{last['float32']:.1e}"])  # fmt: skip
    return markdown(["what", "TreeWY", "float32 recurrence"], lines)


def memory() -> str:
    lines = []
    for shape in sorted({r["shape"] for r in rows()}):
        for draft in ("chain", "tree"):
            found = {(r["stash_bytes_per_node"], r["snapshot_bytes_per_node"]) for r in rows() if (r["shape"], r["draft"]) == (shape, draft)}
            ((stash, snapshot),) = found
            lines.append([shape, draft, f"{stash / 1024:.1f} KiB", f"{snapshot / 1024:.0f} KiB", f"{snapshot / stash:.1f}x"])
    return markdown(["shape", "draft", "TreeWY", "snapshot", "ratio"], lines)


def cliff() -> str:
    found = report()._Rows(rows())
    lines = []
    for n in REQUESTS:
        cells = []
        for mode in ("treewy-fused-conv", "treewy"):
            short, long = (found.get(n, "tree", nodes, mode, "verify_us") for nodes in (64, 128))
            cells += ["-" if t is None else f"{t:.0f}" for t in (short, long)]
            cells.append("-" if short is None or long is None else f"{long / short:.1f}x")
        lines.append([str(n), *cells])
    header = ["requests", "with the convolution: tree of 64", "tree of 128", "times", "without it: tree of 64", "tree of 128", "times"]
    return markdown(header, lines)


SERVING_NAMES = {"treewy-chain4": "TreeWY", "snapshot-chain4": "snapshots", "replayssm-chain4": "ReplaySSM"}
SERVING_RUN = "2026-12-01-h200-8b27d4a8a"  # the newest
SERVING_BEFORE = RUN  # before TreeWY raised the state slots: the three modes at one split of the memory


def serving_rows(run: str = SERVING_RUN) -> list[dict]:
    return read(f"serving-{run}.jsonl")


def serving_provenance(run: str) -> str:
    rows = serving_rows(run)
    one = functools.partial(shared, rows)
    return (f"Device: {one('gpu')}. Commit: {one('commit')}. SGLang {one('sglang')}. {one('model')}, {one('dtype')}, "
            f"`--mem-fraction-static {one('mem_fraction')}`, {one('input_len')} tokens in and {one('output_len')} out, accepted length held at "
            f"{one('accept')} (`SGLANG_SIMULATE_ACC_LEN`). {len(rows)} rows, one run each.")  # fmt: skip


def serving(run: str) -> str:
    found = {(r["mode"], r["concurrency"]): r for r in serving_rows(run)}
    lines = []
    for n in sorted({c for _, c in found}):
        ours = found["treewy-chain4", n]["output_tok_s"]
        for mode, name in SERVING_NAMES.items():
            r = found.get((mode, n))
            if r is None:
                lines.append([str(n), name, "not run", "-", "-", "-"])
                continue
            gain = "" if mode == "treewy-chain4" else f" (TreeWY {ours / r['output_tok_s']:.2f}x)"
            lines.append([str(n), name, f"{r['output_tok_s']:.0f}{gain}", str(r["running_max"]), f"{r['ttft_p50_ms']:.0f} / {r['ttft_p99_ms']:.0f}",
                          f"{r['tpot_p50_ms']:.1f}"])  # fmt: skip
    return markdown(["asked at a time", "chain of 3 drafts", "output tokens/s", "running", "time to first token, p50 / p99, ms", "time per token, ms"], lines)


CPU_RUN = "2026-12-01-epyc-299862783655"


def cpu_rows() -> list[dict]:
    return read(f"cpu-kernels-{CPU_RUN}.jsonl")


def cpu_provenance() -> str:
    one = functools.partial(shared, cpu_rows())
    ratios = sorted(r["speedup"] for r in cpu_rows())
    return (f"Device: {one('cpu')}, {one('threads')} thread, instructions {one('isa')}. Commit: {one('commit')}. PyTorch {one('torch')}. Over all "
            f"{len(ratios)} rows the operators take between 1/{ratios[0]:.1f} and 1/{ratios[-1]:.0f} of the time of the recurrence.")  # fmt: skip


def cpu() -> str:
    lines = []
    for shape in ("chain 4", "tree 16", "tree 64"):
        for n in (1, 4):
            cells = []
            for kernel in ("verify", "conv", "round"):
                for state in ("float32", "bfloat16"):
                    (row,) = [r for r in cpu_rows() if (r["kernel"], r["shape"], r["N"], r["H"], r["HV"], r["state"]) == (kernel, shape, n, 16, 32, state)]
                    cells.append(f"{row['speedup']:.1f}x")
            lines.append([shape.replace(" ", " of "), str(n), *(" / ".join(cells[i : i + 2]) for i in (0, 2, 4))])
    return markdown(["draft", "requests", "verify", "with the convolution", "verify and commit"], lines)


def matrix() -> str:
    """The newest row of every check; that a server stayed healthy is one line for all."""
    found: dict[str, dict] = {}
    for file in sorted(RESULTS.glob("matrix-*.jsonl")):
        found.update({row["check"]: row for row in read(file.name)})
    healthy = [found.pop(name) for name in list(found) if name.endswith(": healthy")]
    size = lambda r: f"{r['size']['prompts']} x {r['size']['new_tokens']}"  # noqa: E731
    lines = [
        [f"`{name}`" if " " not in name else name, r["outcome"], r["detail"].replace("|", "\\|"), size(r) if name.startswith(("f32", "bf16", "qwen35")) else "", r["commit"]]
        for name, r in sorted(found.items())
    ]  # fmt: skip
    well = sum(r["outcome"] == "ok" for r in healthy)
    lines.append([f"{len(healthy)} servers: no operator error, no complaint in the log, leak checks silent", "ok" if well == len(healthy) else "MISSED", f"{well} of {len(healthy)}", "", ""])
    return markdown(["check", "outcome", "found", "prompts x tokens", "commit"], lines)


SUPPORTED = ROOT / "docs" / "supported.md"
PARTS = {
    "provenance": provenance,
    "operators": lambda: comparison("total", "treewy"),
    "whole": lambda: comparison("whole", "treewy-fused-conv"),
    "targets": targets,
    "exactness": exactness,
    "memory": memory,
    "cliff": cliff,
    "serving provenance": lambda: serving_provenance(SERVING_RUN),
    "serving": lambda: serving(SERVING_RUN),
    "serving before provenance": lambda: serving_provenance(SERVING_BEFORE),
    "serving before": lambda: serving(SERVING_BEFORE),
    "cpu provenance": cpu_provenance,
    "cpu": cpu,
}


def filled(text: str) -> str:
    """The page with every part made anew."""
    return page_parts.filled(text, PAGE, "figures", PARTS)


def filled_supported(text: str) -> str:
    return page_parts.filled(text, SUPPORTED, "figures", {"matrix": matrix})


if __name__ == "__main__":
    sys.exit(page_parts.main(__doc__, lambda: {PAGE: filled(PAGE.read_text()), SUPPORTED: filled_supported(SUPPORTED.read_text())}))
