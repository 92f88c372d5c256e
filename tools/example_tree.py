"""The worked example of docs/how-it-works.md: its numbers from treewy_sglang.reference, its picture from the same tree.

    python tools/example_tree.py [--write]

Without --write: exit status 1 and the names of what differs when the page or the picture is not what this makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
import page_parts  # noqa: E402

PAGE = ROOT / "docs" / "how-it-works.md"
PICTURE = ROOT / "docs" / "example-tree.svg"

# One head, K = V = 2. a = b = A_log = dt_bias = 0 makes e^g and beta exactly 1/2 for every node.
PARENTS = [-1, 0, 0, 1, 1, 2]
TOKENS = ["A", "draft", "guess", "is", "tree", "at"]
K = [(1, 0), (0, 1), (3, 4), (1, 0), (3, 4), (0, 1)]  # normalised by the operator: (3, 4) becomes (0.6, 0.8)
Q = [(0, 1), (1, 0), (1, 0), (0, 1), (1, 0), (3, 4)]
V = [(4, 2), (2, 6), (3, 4), (1, 1), (2, 3), (5, 2)]
S0 = [[4, 0], [0, 8]]
ACCEPTED = 4


def inputs():
    """Arguments of reference.recurrence and reference.wy, float64; scale 1."""
    import torch

    nodes = len(PARENTS)
    rows = lambda x: torch.tensor(x, dtype=torch.float64).reshape(nodes, 1, 2)
    zero = torch.zeros(nodes, 1, dtype=torch.float64)
    one = torch.zeros(1, dtype=torch.float64)
    state = torch.tensor([[S0]], dtype=torch.float64)
    return rows(Q), rows(K), rows(V), zero, zero, one, one, state, torch.tensor([0]), torch.tensor([PARENTS]), 1.0


def solve():
    """(u [T][2], o [T][2], state after ACCEPTED [2][2]) of the WY form."""
    import torch

    from treewy_sglang import reference

    done = reference.wy(*inputs(), nodes=torch.tensor([ACCEPTED]))
    return done.u[0, 0].tolist(), done.out[:, 0].tolist(), done.states[0, 0].tolist()


def path(node):
    from treewy_sglang.tree import ancestor_path

    return ancestor_path(PARENTS, node)


def unit(x):
    length = (x[0] ** 2 + x[1] ** 2) ** 0.5
    return x[0] / length, x[1] / length


def dot(x, y):
    return x[0] * y[0] + x[1] * y[1]


def number(x):
    text = f"{x:.4f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def pair(x):
    return f"({number(x[0])}, {number(x[1])})"


def matrix(m):
    return f"[{number(m[0][0])} {number(m[0][1])}; {number(m[1][0])} {number(m[1][1])}]"


def power(steps):
    return "1" if steps == 0 else f"1/{2 ** steps}"


def table():
    u, o, _ = solve()
    lines = ["| node t | parent | ancestors and t | e^G_t | k_t | q_t | v_t | u_t | o_t |", "| --- " * 9 + "|"]
    for t in range(len(PARENTS)):
        cells = (t, PARENTS[t] if t else "S0", " ".join(map(str, path(t))), power(len(path(t))), pair(unit(K[t])), pair(unit(Q[t])),
                 pair(V[t]), pair(u[t]), pair(o[t]))  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def steps():
    """Node ACCEPTED written out; each product below is checked against the reference's result by the sums."""
    u, o, state = solve()
    t, line = ACCEPTED, path(ACCEPTED)
    k, q = unit(K[t]), unit(Q[t])
    s0 = lambda x: (dot(S0[0], x), dot(S0[1], x))
    first = tuple(x / 2 ** len(line) for x in s0(k))
    out = ["```text", f"u_{t} = 1/2 ( v_{t} - {power(len(line))} S0 k_{t}"]
    total = list(first)
    for place, j in enumerate(line[:-1]):
        gap = len(line) - 1 - place
        out[-1] += f" - {power(gap)} (k_{j}.k_{t}) u_{j}"
        total = [a + dot(unit(K[j]), k) * b / 2**gap for a, b in zip(total, u[j])]
    out[-1] += " )"
    out.append(f"    = 1/2 ( {pair(V[t])} - {pair(first)}" + "".join(
        f" - {power(len(line) - 1 - p)} {number(dot(unit(K[j]), k))} {pair(u[j])}" for p, j in enumerate(line[:-1])) + f" ) = {pair(u[t])}")  # fmt: skip
    assert all(abs((v - x) / 2 - w) < 1e-5 for v, x, w in zip(V[t], total, u[t]))
    out.append("")
    out.append(f"o_{t} = {power(len(line))} S0 q_{t}" + "".join(f" + {power(len(line) - 1 - p)} (k_{j}.q_{t}) u_{j}" for p, j in enumerate(line)))
    out.append(f"    = {pair([x / 2 ** len(line) for x in s0(q)])}" + "".join(
        f" + {power(len(line) - 1 - p)} {number(dot(unit(K[j]), q))} {pair(u[j])}" for p, j in enumerate(line)) + f" = {pair(o[t])}")  # fmt: skip
    out.append("")
    out.append(f"S_{t} = {power(len(line))} S0" + "".join(f" + {power(len(line) - 1 - p)} u_{j} k_{j}^T" for p, j in enumerate(line)))
    out.append(f"    = {matrix(state)}")
    return "\n".join([*out, "```"])


PARTS = {"table": table, "steps": steps}


def filled(text):
    """The page with every part made anew."""
    return page_parts.filled(text, PAGE, "example", PARTS)


def picture():
    """SVG: the tree with the accepted path, and the triangular system's pattern beside it."""
    place = {0: (170, 130), 1: (100, 220), 2: (250, 220), 3: (50, 310), 4: (150, 310), 5: (250, 310)}
    accepted = path(ACCEPTED)
    ink, soft, mark = "#1f2933", "#9aa5b1", "#0b7285"
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 380" role="img" font-family="sans-serif" font-size="15">',
        f"<title>A draft tree of {len(PARENTS)} nodes and the pattern of its triangular system</title>",
        '<rect width="760" height="380" rx="8" fill="#ffffff"/>',
        f'<rect x="110" y="28" width="120" height="40" rx="6" fill="#e6f4f6" stroke="{mark}" stroke-width="2"/>',
        f'<text x="170" y="53" text-anchor="middle" fill="{ink}">committed S0</text>',
    ]

    def edge(a, b, strong):
        return (f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="{mark if strong else soft}" '
                f'stroke-width="{3.5 if strong else 2}"/>')  # fmt: skip

    out.append(edge((170, 68), place[0], True))
    out += [edge(place[p], place[t], t in accepted) for t, p in enumerate(PARENTS) if p >= 0]
    for t, (x, y) in place.items():
        strong = t in accepted
        out.append(f'<circle cx="{x}" cy="{y}" r="21" fill="{mark if strong else "#ffffff"}" stroke="{mark if strong else soft}" stroke-width="2.5"/>')
        out.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-weight="bold" fill="{"#ffffff" if strong else ink}">{t}</text>')
        out.append(f'<text x="{x + 27}" y="{y + 5}" fill="{ink}">{TOKENS[t]}</text>')
    out.append(f'<text x="170" y="362" text-anchor="middle" fill="{mark}">accepted: {" → ".join(map(str, accepted))}</text>')
    size, left, top = 36, 450, 92
    out.append(f'<text x="{left + 3 * size}" y="40" text-anchor="middle" fill="{ink}">row t uses the u_j of its ancestors j only</text>')
    for t in range(len(PARENTS)):
        out.append(f'<text x="{left + t * size + size / 2}" y="{top - 10}" text-anchor="middle" fill="{ink}">{t}</text>')
        out.append(f'<text x="{left - 14}" y="{top + t * size + size / 2 + 5}" text-anchor="middle" fill="{ink}">{t}</text>')
        for j in range(len(PARENTS)):
            inside = j in path(t)
            fill = "#ffffff" if not inside else (mark if j != t else "#99d1db")
            out.append(f'<rect x="{left + j * size}" y="{top + t * size}" width="{size}" height="{size}" fill="{fill}" stroke="{soft}"/>')
            if j < t and not inside:
                out.append(f'<text x="{left + j * size + size / 2}" y="{top + t * size + size / 2 + 5}" text-anchor="middle" fill="{soft}">0</text>')
    y = top + len(PARENTS) * size + 22
    for x, fill, text in ((left - 10, mark, "strict ancestor"), (left + 130, "#99d1db", "the node itself")):
        out.append(f'<rect x="{x}" y="{y - 2}" width="16" height="16" fill="{fill}" stroke="{soft}"/>')
        out.append(f'<text x="{x + 23}" y="{y + 11}" font-size="14" fill="{ink}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    sys.exit(page_parts.main(__doc__, lambda: {PAGE: filled(PAGE.read_text()), PICTURE: picture()}))
