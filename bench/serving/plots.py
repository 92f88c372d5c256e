"""Pictures of rows: throughput against concurrency, TTFT p99, running requests against draft nodes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from .rows import latest

COLOURS = {"none": "0.45", "snapshot": "#b3541e", "replayssm": "#5b7db1", "treewy": "#1b7a4b"}
STYLES = ("-", "--", ":", "-.")


def settings(rows: list[dict]) -> list[tuple]:
    return sorted({(r["memory"], r["mem_fraction"], r.get("slots")) for r in rows}, key=str)


def title(setting: tuple) -> str:
    memory, fraction, slots = setting
    return memory + (f", --mem-fraction-static {fraction:g}" if fraction is not None else "") + (f", {slots} state slots" if slots else "")


def plot(rows: list[dict], path: Path) -> str:
    """Writes PATH-throughput.png, -ttft.png and -requests.png; returns a sentence that says where, or why not."""
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
    for name, field, label, log in (
        ("throughput", "output_tok_s", "output tokens per second", False),
        ("ttft", "ttft_p99_ms", "TTFT p99, ms", True),
    ):
        groups = settings(good)
        figure, axes = pyplot.subplots(1, len(groups), figsize=(6.5 * len(groups), 4.5), squeeze=False, layout="constrained")
        for axis, setting in zip(axes[0], groups):
            modes = list(dict.fromkeys(r["mode"] for r in good))
            for mode in modes:
                points = figures(good, mode, setting, field)
                if not points:
                    continue
                xs = sorted(points)
                method = mode.partition("-")[0]
                style = STYLES[[m for m in modes if m.partition("-")[0] == method].index(mode) % len(STYLES)]
                axis.plot(xs, [median(points[x]) for x in xs], style, marker="o", color=COLOURS[method], label=mode)
                if any(len(v) > 1 for v in points.values()):  # the spread of repeats
                    axis.fill_between(xs, [min(points[x]) for x in xs], [max(points[x]) for x in xs], color=COLOURS[method], alpha=0.15)
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
                    if r["mode"].startswith(method) and (r["memory"], r["mem_fraction"], r.get("slots")) == setting
                    and r.get("max_running_requests") is not None}  # fmt: skip
            if caps:
                xs = sorted(caps)
                axis.plot(xs, [caps[x] for x in xs], style, marker="o", color=COLOURS[method], label=f"{method}, {title(setting)}")
    axis.set(xlabel="nodes of the draft", ylabel="requests that the server runs at a time")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    written.append(_save(pyplot, figure, good, path, "requests"))
    return "plots: " + ", ".join(map(str, written))


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
    target = path.with_name(f"{path.stem}-{name}.png")
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
    return target


def table(rows: list[dict]) -> str:
    """One line a case, repeats together: median, and the spread where there is one."""
    lines = [f"{'mode':18s} {'memory':>12s} {'conc':>5s} {'tok/s':>15s} {'TTFT p50/p99 ms':>19s} {'TPOT ms':>8s} {'accept':>7s} {'running':>8s} {'retr':>5s} {'GiB':>7s}"]
    groups: dict[tuple, list[dict]] = {}
    for r in latest(rows):
        groups.setdefault((r["mode"], r["memory"], r["mem_fraction"], r.get("slots"), r["concurrency"]), []).append(r)
    for (mode, memory, fraction, slots, concurrency), group in groups.items():
        good = [r for r in group if r["error"] is None]
        head = f"{mode:18s} {memory + ' ' + str(fraction if fraction is not None else slots if slots else ''):>12s} {concurrency:5d} "
        if not good:
            lines.append(head + f"  {group[0]['error'][:110]}")
            continue

        def mid(field, digits):
            values = [r[field] for r in good if r.get(field) is not None]
            return "-" if not values else f"{median(values):.{digits}f}"

        rates = [r["output_tok_s"] for r in good]
        spread = "" if len(rates) == 1 else f" +-{(max(rates) - min(rates)) / 2 / median(rates):.1%}"
        lines.append(
            head + f"{mid('output_tok_s', 0) + spread:>15s} {mid('ttft_p50_ms', 0) + '/' + mid('ttft_p99_ms', 0):>19s} "
            f"{mid('tpot_p50_ms', 2):>8s} {mid('accept_len', 2):>7s} {mid('running_max', 0):>8s} {mid('retractions', 0):>5s} {mid('peak_gib', 1):>7s}"
        )
    return "\n".join(lines)
