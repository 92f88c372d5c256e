"""What is timed: model shapes, drafts, cases, the order they run in, and how many bytes each must move."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch

MODES = ("treewy", "treewy-fused-conv", "snapshot", "replayssm")
REQUESTS = (1, 4, 16, 64, 128, 256)
DRAFTS = ("chain4", "chain8", "tree8", "tree16", "tree32", "tree64", "tree128")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONV_WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """One GDN layer of a checkpoint, as one tensor-parallel rank sees it."""

    name: str
    H: int  # key heads
    HV: int  # value heads
    layers: int  # GDN layers of the model
    K: int = 128
    V: int = 128

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def state_numel(self) -> int:
        return self.HV * self.V * self.K


SHAPES = {
    s.name: s
    for s in (
        Shape("35B", H=16, HV=32, layers=30),
        Shape("397B-tp8", H=2, HV=8, layers=45),
        Shape("397B", H=16, HV=64, layers=45),
        Shape("tiny", H=2, HV=4, layers=3),  # plumbing only: never in the default matrix
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    shape: str
    requests: int
    nodes: int
    draft: str  # "chain" or "tree"
    mode: str
    state_dtype: str = "float32"

    @property
    def key(self) -> tuple:
        return dataclasses.astuple(self)

    def __str__(self) -> str:
        return f"{self.shape} {self.requests}x{self.draft}{self.nodes} {self.mode} {self.state_dtype}"


def parse_draft(text: str) -> tuple[str, int]:
    for kind in ("chain", "tree"):
        if text.startswith(kind) and text[len(kind) :].isdigit() and 1 <= int(text[len(kind) :]) <= 128:
            return kind, int(text[len(kind) :])
    raise ValueError(f"draft {text!r} is not chainN or treeN with N in 1..128")


def matrix(shapes, requests, drafts, modes, state_dtype) -> list[Case]:
    """Every case asked for, in the order to run them."""
    cases = [
        Case(shape, n, nodes, draft, mode, state_dtype)
        for shape in shapes
        for n in requests
        for draft, nodes in map(parse_draft, drafts)
        for mode in modes
        if not (mode == "replayssm" and draft == "tree")  # ReplaySSM verifies chains only
    ]

    def order(case: Case):
        # Shape by shape, treewy before the peers and the batch of the targets first: a run cut short still says much.
        peer = case.mode in ("snapshot", "replayssm")
        target = case.requests == 64 or (case.draft, case.nodes) == ("chain", 4)
        return (list(shapes).index(case.shape), 0 if not peer else 1 if target else 2, case.requests != 64)

    return sorted(cases, key=order)


def sweep(shape: str, requests: int, first: int, last: int, state_dtype: str) -> list[Case]:
    """treewy alone at every T: the target allows no step above 1.35x between T and T+1."""
    return [
        Case(shape, requests, nodes, draft, "treewy", state_dtype)
        for draft in ("chain", "tree")
        for nodes in range(first, last + 1)
    ]


@functools.lru_cache(maxsize=None)
def _random_tree(nodes: int, seed: int) -> tuple[int, ...]:
    """Parents in an order where a parent precedes its children, as draft trees have."""
    rng = random.Random(1000 * nodes + seed)
    return (-1,) + tuple(rng.randrange(0, t) for t in range(1, nodes))


def parents_of(draft: str, requests: int, nodes: int) -> torch.Tensor:
    """int32 [N, T] on the CPU. Trees: a different random tree for each of eight rows, repeated."""
    if draft == "chain":
        rows = [tuple(range(-1, nodes - 1))] * requests
    else:
        rows = [_random_tree(nodes, n % 8) for n in range(requests)]
    return torch.tensor(rows, dtype=torch.int32).reshape(requests, nodes)


def links_of(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's first-child and next-sibling links (int32 [N, T], -1: none)."""
    child = torch.full_like(parents, -1)
    sibling = torch.full_like(parents, -1)
    for n, row in enumerate(parents.tolist()):
        last: dict[int, int] = {}
        for t, p in enumerate(row):
            if p < 0:
                continue
            if p in last:
                sibling[n, last[p]] = t
            else:
                child[n, p] = t
            last[p] = t
    return child, sibling


def deepest(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted node of each row (the end of its longest path: the most work a commit can have) and that path's length."""
    nodes, depths = [], []
    for row in parents.tolist():
        depth: list[int] = []
        for p in row:
            depth.append(1 if p < 0 else depth[p] + 1)
        best = max(range(len(row)), key=lambda t: (depth[t], t))
        nodes.append(best)
        depths.append(depth[best])
    return torch.tensor(nodes, dtype=torch.int32), torch.tensor(depths, dtype=torch.int32)


def state_bytes(shape: Shape, dtype: str) -> int:
    """State of one request and layer."""
    return shape.state_numel * torch.empty((), dtype=DTYPES[dtype]).element_size()


def stash_bytes_per_node(shape: Shape) -> int:
    """One node and layer: u in float32, k in bfloat16 with its inverse norm, G, one raw conv column in bfloat16."""
    return shape.HV * shape.V * 4 + shape.H * shape.K * 2 + shape.H * 4 + shape.HV * 4 + shape.D * 2


def snapshot_bytes_per_node(shape: Shape, dtype: str, draft: str = "tree") -> int:
    """One node and layer of SGLang's buffers: a state and a convolution window (chains share the window's columns)."""
    return state_bytes(shape, dtype) + shape.D * 2 * (CONV_WIDTH - 1 if draft == "tree" else 1)
