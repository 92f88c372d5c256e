"""What the answers of one or two servers show. Pure functions of plain data, so that they are tested without a server."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, Mapping, Sequence


class Missed(AssertionError):
    """The data is there and does not show what it has to."""


def need(condition: bool, text: str) -> None:
    if not condition:
        raise Missed(text)


# Greedy answers. An answer is {"tokens": [...], "gaps": [...]}; gaps: log(p of the token / p of the next best).


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Position of the first token that differs, None if there is none; a length that differs counts as a token."""
    for i, (a, b) in enumerate(zip(got, expected)):
        if a != b:
            return i
    return None if len(got) == len(expected) else min(len(got), len(expected))


def splits(reference: Sequence[Mapping], answers: Sequence[Mapping], tie: float) -> dict[str, Any]:
    """How answers leave a reference: {"answers", "split", "compared" tokens up to and with the split, "gaps" of the decisions
    of the reference that were turned around, "gap" the widest, "wide" those wider than `tie`: [answer, token, gap]}."""
    need(len(reference) == len(answers) > 0, f"{len(answers)} answers beside {len(reference)} of the reference")
    compared, gaps, wide = 0, [], []
    for i, (r, a) in enumerate(zip(reference, answers)):
        at = first_difference(a["tokens"], r["tokens"])
        if at is None:
            compared += len(r["tokens"])
            continue
        gap = r["gaps"][at] if at < len(r["gaps"]) else math.inf
        compared += at + 1
        gaps.append(gap)
        if gap > tie:
            wide.append([i, at, gap])
    return {"answers": len(answers), "split": len(gaps), "compared": compared, "gaps": gaps, "gap": max(gaps, default=0.0), "wide": wide}


def without_near_ties(reference: Sequence[Mapping], tie: float, count: int) -> list[int]:
    """The first `count` answers of a reference none of whose decisions is narrower than `tie`."""
    kept = [i for i, r in enumerate(reference) if min(r["gaps"]) > tie][:count]
    need(len(kept) == count, f"{len(kept)} answers without a near tie, {count} wanted")
    return kept


def no_more_frequent(ours: Mapping, theirs: Mapping, level: float = 0.01) -> float:
    """p of "our rate of splits per compared token is not above theirs", two counts of rare events, one-sided: given all
    splits, ours are binomial with our share of the compared tokens. Missed below `level`."""
    total = ours["split"] + theirs["split"]
    share = ours["compared"] / (ours["compared"] + theirs["compared"])
    p = sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(ours["split"], total + 1))
    need(p >= level, f"splits are more frequent: {ours['split']} in {ours['compared']} tokens, {theirs['split']} in {theirs['compared']} (p = {p:.2g})")  # fmt: skip
    return p


def no_wider(ours: Mapping, theirs: Mapping, level: float = 0.01) -> float:
    """p of "the decisions that we turn around are not wider than theirs", Mann-Whitney, one-sided. Missed below `level`."""
    from scipy.stats import mannwhitneyu

    if not ours["gaps"]:
        return 1.0
    need(bool(theirs["gaps"]), f"{ours['split']} splits, widest {ours['gap']:.3g}, where the other has none")
    p = float(mannwhitneyu(ours["gaps"], theirs["gaps"], alternative="greater").pvalue)
    need(p >= level, f"splits are wider: up to {ours['gap']:.3g}, the other's up to {theirs['gap']:.3g} (p = {p:.2g})")
    return p


# Sampled answers.


def chi_square(x: Mapping[Any, int], y: Mapping[Any, int], least: float = 5.0) -> tuple[float, int, float]:
    """(statistic, degrees of freedom, p) of "two samples of categories come from one distribution". Categories of which
    either sample is expected to hold fewer than `least` are counted as one."""
    import torch

    n, m = sum(x.values()), sum(y.values())
    rest = [0, 0]
    cells = []
    for key in sorted({*x, *y}, key=repr):
        a, b = x.get(key, 0), y.get(key, 0)
        if (a + b) * min(n, m) / (n + m) >= least:
            cells.append([a, b])
        else:
            rest = [rest[0] + a, rest[1] + b]
    if sum(rest) * min(n, m) / (n + m) >= least:
        cells.append(rest)
    elif sum(rest) and cells:
        smallest = min(cells, key=sum)
        smallest[0], smallest[1] = smallest[0] + rest[0], smallest[1] + rest[1]
    if len(cells) < 2:
        return 0.0, 0, 1.0
    statistic = 0.0
    for a, b in cells:
        for seen, size in ((a, n), (b, m)):
            expected = (a + b) * size / (n + m)
            statistic += (seen - expected) ** 2 / expected
    freedom = len(cells) - 1
    p = torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64))
    return statistic, freedom, float(p)


def same_distribution(x: Sequence[Sequence[int]], y: Sequence[Sequence[int]], level: float = 0.001) -> dict[str, Any]:
    """Samples of several tokens from one prompt each, in two lots: every position, every two neighbours and the first three
    tokens together have the same distribution. Samples of a lot are independent, their tokens are not: so each of these
    is one chi-square test over samples, and the smallest p is held against `level` over their number."""
    length = min(map(len, (*x, *y)))
    views = {f"token {i}": slice(i, i + 1) for i in range(length)}
    views |= {f"tokens {i}, {i + 1}": slice(i, i + 2) for i in range(length - 1)}
    views["first three"] = slice(0, 3)
    results = {
        name: chi_square(Counter(tuple(s[view]) for s in x), Counter(tuple(s[view]) for s in y)) for name, view in views.items()
    }
    worst = min(results, key=lambda name: results[name][2])
    statistic, freedom, p = results[worst]
    kinds = len({t for s in x for t in s})
    found = {"samples": [len(x), len(y)], "tokens": [sum(map(len, x)), sum(map(len, y))], "vocabulary": kinds,
             "tests": len(results), "worst": worst, "chi_square": statistic, "freedom": freedom, "p": p,
             "corrected": min(1.0, p * len(results))}  # fmt: skip
    need(kinds >= 2 and freedom >= 1, f"too little variety to test: {found}")
    need(found["corrected"] >= level, f"another distribution: {found}")
    return found


# One long answer.


def acceptance(events: Sequence[int], window: int = 1000) -> list[float]:
    """Tokens per step, window by window of tokens. `events`: tokens generated so far, after each step."""
    out, steps, start = [], 0, events[0]
    for before, now in zip(events, events[1:]):
        steps += 1
        if now - start >= window:
            out.append((now - start) / steps)
            steps, start = 0, now
    return out


def flat(accepted: Sequence[float], last_share: float = 0.9) -> None:
    """The second half of a long answer accepts as much as the first, but for `last_share`."""
    half = len(accepted) // 2
    need(half >= 2, f"{len(accepted)} windows of acceptance are too few")
    first, second = sum(accepted[:half]) / half, sum(accepted[-half:]) / half
    need(second >= last_share * first, f"acceptance falls from {first:.3f} to {second:.3f}: {accepted}")


def drift(errors: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]], factor: float = 1.5) -> dict[str, float]:
    """errors, plain: by layer and head, relative distances of the states from a float64 replay at the end of a long
    answer, with drafts and decoded plainly. The worst and the mean stay within `factor` of plain decoding's."""
    ours, theirs = ([e for layer in x.values() for e in layer] for x in (errors, plain))
    need(len(ours) == len(theirs) > 0, f"{len(ours)} and {len(theirs)} states")
    need(all(math.isfinite(e) for e in (*ours, *theirs)), "a state is not finite")
    found = {"worst": max(ours), "plain_worst": max(theirs), "mean": sum(ours) / len(ours), "plain_mean": sum(theirs) / len(theirs)}
    need(found["worst"] <= factor * found["plain_worst"] and found["mean"] <= factor * found["plain_mean"], f"states drift further: {found}")  # fmt: skip
    return found


# Start lines.

_ROWS = re.compile(r"draft state per request: snapshot=(\d+) stash=(\d+) bytes \(T=(\d+), layers=(\d+), rows=(\d+)\)")
_ACTIVE = re.compile(
    r"TreeWY is active: .*?; (\d+) state slots of ([\d.]+) MiB \(with snapshots: (\d+)\); running requests (\d+) "
    r"\(with snapshots: (\d+)\)"
)


def start_lines(text: str) -> dict[str, Any]:
    """The figures of the two lines that a server with --enable-treewy logs at start; a line may be wrapped."""
    text = " ".join(text.split())
    rows, active = _ROWS.search(text), _ACTIVE.search(text)
    need(rows is not None and active is not None, "the log lacks TreeWY's start lines")
    snapshot, stash, nodes, layers, count = map(int, rows.groups())
    return {
        "snapshot_bytes": snapshot, "stash_bytes": stash, "nodes": nodes, "layers": layers, "rows": count,
        "slots": int(active[1]), "slot_mib": float(active[2]), "snapshot_slots": int(active[3]),
        "running": int(active[4]), "snapshot_running": int(active[5]),
    }  # fmt: skip


def share_of_bare_budget(lines: Mapping, slot_bytes: int) -> float:
    """State slots over what the same budget holds when drafts leave nothing behind: the stash rows' bytes, as slots."""
    bare = lines["slots"] + lines["rows"] * lines["stash_bytes"] // slot_bytes
    return lines["slots"] / bare
