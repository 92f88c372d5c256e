"""Pictures of rows: throughput against concurrency, TTFT p99, running requests against draft nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import median

from .rows import case_of, latest

COLOURS = {"none": "0.45", "snapshot": "#b3541e", "replayssm": "#5b7db1", "treewy": "#1b7a4b"}
STYLES = ("-", "--", ":", "-.")


def settings(rows: list[dict]) -> list[tuple]:
    return sorted({(r["memory"], r["mem_fraction"], r.get("slots")) for r in rows}, key=str)


def title(setting: tuple) -> str:
    memory, fraction, slots = setting
    return (
        memory
        + (f", --mem-fraction-static {fraction:g}" if fraction is not None else "")
        + (f", {slots} state slots" if slots else "")
    )


def plot(rows: list[dict], path: Path) -> str:
    """Writes PATH-MODEL-throughput.png, -ttft.png and -requests.png for every model; returns a sentence that says where,
    or why not."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"no plots: {error} (pip install matplotlib, then --report)"
    good = [r for r in latest(rows) if r["error"] is None]
    if not good:
        return "no plots: there is no row without an error"
    written = []
    for model in dict.fromkeys(r["model"] for r in good):
        written += _plots(pyplot, [r for r in good if r["model"] == model], path.with_name(f"{path.stem}-{model}"))
    return "plots: " + ", ".join(map(str, written))


def _plots(pyplot, good: list[dict], path: Path) -> list[Path]:
    written = []
    for name, field, label, log in (
        ("throughput", "output_tok_s", "output tokens per second", False),
        ("ttft", "ttft_p99_ms", "TTFT p99, ms", True),
    ):
        groups = settings(good)
        figure, axes = pyplot.subplots(
            1, len(groups), figsize=(6.5 * len(groups), 4.5), squeeze=False, layout="constrained"
        )
        for axis, setting in zip(axes[0], groups):
            modes = list(dict.fromkeys(r["mode"] for r in good))
            for mode in modes:
                points = figures(good, mode, setting, field)
                if not points:
                    continue
                xs = sorted(points)
                method = method_of(mode)
                style = STYLES[[m for m in modes if method_of(m) == method].index(mode) % len(STYLES)]
                axis.plot(xs, [median(points[x]) for x in xs], style, marker="o", color=COLOURS[method], label=mode)
                if any(len(v) > 1 for v in points.values()):  # the spread of repeats
                    axis.fill_between(
                        xs,
                        [min(points[x]) for x in xs],
                        [max(points[x]) for x in xs],
                        color=COLOURS[method],
                        alpha=0.15,
                    )
            axis.set(xlabel="concurrent requests", ylabel=label, title=title(setting))
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks := sorted({r["concurrency"] for r in good}), [str(t) for t in ticks])
            if log:
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        written.append(_save(pyplot, figure, good, path, name))

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for setting, style in zip(settings(good), STYLES * 4):
        for method in ("snapshot", "replayssm", "treewy"):
            caps = {r["nodes"]: r["max_running_requests"] for r in good
                    if method_of(r["mode"]) == method and "+" not in r["mode"] and (r["memory"], r["mem_fraction"], r.get("slots")) == setting
                    and r.get("max_running_requests") is not None}  # fmt: skip
            if caps:
                xs = sorted(caps)
                axis.plot(
                    xs,
                    [caps[x] for x in xs],
                    style,
                    marker="o",
                    color=COLOURS[method],
                    label=f"{method}, {title(setting)}",
                )
    axis.set(xlabel="nodes of the draft", ylabel="requests that the server runs at a time")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    written.append(_save(pyplot, figure, good, path, "requests"))
    return written


def method_of(mode: str) -> str:
    return mode.partition("+")[0].partition("-")[0]


def figures(rows: list[dict], mode: str, setting: tuple, field: str) -> dict[int, list[float]]:
    """Concurrency -> the figure of every repeat."""
    points: dict[int, list[float]] = {}
    for r in rows:
        if r["mode"] == mode and (r["memory"], r["mem_fraction"], r.get("slots")) == setting and r[field] is not None:
            points.setdefault(r["concurrency"], []).append(r[field])
    return points


def _save(pyplot, figure, rows: list[dict], path: Path, name: str) -> Path:
    first = rows[0]
    figure.suptitle(f"{first['model']}, {first['gpu']}, commit {first['commit']}", fontsize=10)
    target = path.with_name(f"{path.name}-{name}.png")
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
    return target


# Heading, width, and the figure of a row with its decimals, or the text of a group of repeats.
COLUMNS = (
    ("mode", -18, lambda g: g[0]["mode"]),
    ("memory", 10, lambda g: f"{g[0]['memory']} {_amount(g[0])}".strip()),
    ("conc", 5, lambda g: str(g[0]["concurrency"])),
    ("tok/s", 16, lambda g: _middle(g, "output_tok_s", 0) + _spread(g, "output_tok_s")),
    ("TTFT p50", 9, lambda g: _middle(g, "ttft_p50_ms", 0)),
    ("p99 ms", 8, lambda g: _middle(g, "ttft_p99_ms", 0)),
    ("TPOT ms", 8, lambda g: _middle(g, "tpot_p50_ms", 2)),
    ("accept", 7, lambda g: _middle(g, "accept_len", 2)),
    ("running", 8, lambda g: _middle(g, "running_max", 0)),
    ("retr", 5, lambda g: _middle(g, "retractions", 0)),
    ("GiB", 7, lambda g: _middle(g, "peak_gib", 1)),
)


def _amount(row: dict) -> str:
    value = row["slots"] if row["mem_fraction"] is None else row["mem_fraction"]
    return "" if value is None else f"{value:g}"


def _middle(group: list[dict], field: str, digits: int) -> str:
    values = [r[field] for r in group if r.get(field) is not None]
    return f"{median(values):.{digits}f}" if values else "-"


def _spread(group: list[dict], field: str) -> str:
    values = [r[field] for r in group]
    return f" +-{(max(values) - min(values)) / 2 / median(values):.1%}" if len(values) > 1 else ""


def table(rows: list[dict]) -> str:
    """One line a case, repeats together: median, and half the spread where there are repeats."""

    def line(cells) -> str:
        return " ".join(f"{c:<{-w}}" if w < 0 else f"{c:>{w}}" for c, (_, w, _) in zip(cells, COLUMNS)).rstrip()

    groups: dict[tuple, list[dict]] = {}
    for r in latest(rows):
        case = dataclasses.replace(case_of(r), repeat=0)
        groups.setdefault((case.model, case), []).append(r)
    lines, model = [], None
    for (name, _), group in sorted(groups.items(), key=lambda item: item[0][0]):
        if name != model:
            model = name
            lines += [f"{model}:", line(heading for heading, _, _ in COLUMNS)]
        good = [r for r in group if r["error"] is None]
        head = line(cell(group) for _, _, cell in COLUMNS[:3])
        lines.append(line(cell(good) for _, _, cell in COLUMNS) if good else f"{head}  {group[0]['error'][:110]}")
    return "\n".join(lines)
