"""Modes of speculation: their names, what they add to a server's command line, and the accepted length to simulate.

    none                 no speculation
    METHOD-chainN        a chain of N nodes: the root and N - 1 drafts
    METHOD-treeN         a tree of N nodes from 3 draft steps and the least topk that fills it
    METHOD-treeN@SxK     a tree of N nodes from S steps with topk K
    METHOD-ngramN        drafts of N nodes from the prompt itself
    ...+lazy             with SGLang's extra_buffer_lazy strategy: a state slot less for every running request
    ...+ratioR           with --mamba-full-memory-ratio R, another split between state slots and KV cache

METHOD is snapshot (SGLang's default), replayssm (chains alone) or treewy.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Optional

METHODS = ("snapshot", "replayssm", "treewy")
MAX_NODES = 128
STEPS = 3
# Accepted lengths published for Qwen3.5 with its own MTP layer: chains of 3 drafts, [2,2,2] trees, [3,3,3] trees.
PUBLISHED = ((4, "chain", 3.2), (39, "tree", 3.38), (MAX_NODES, "tree", 3.58))


class BadMode(ValueError):
    pass


@dataclass(frozen=True)
class Mode:
    name: str
    method: Optional[str] = None  # None: no speculation
    kind: Optional[str] = None  # chain, tree, ngram
    nodes: int = 0
    steps: Optional[int] = None
    topk: Optional[int] = None
    options: tuple[str, ...] = ()  # of the server, beside those of speculation

    @property
    def arguments(self) -> list[str]:
        """What the mode adds to `sglang.launch_server`."""
        if self.method is None:
            return [*self.options]
        values = {"algorithm": "NGRAM" if self.kind == "ngram" else "NEXTN", "num-draft-tokens": self.nodes}
        if self.kind != "ngram":
            values.update({"num-steps": self.steps, "eagle-topk": self.topk})
        flags = {"snapshot": [], "replayssm": ["--enable-linear-replayssm-spec"], "treewy": ["--enable-treewy"]}
        return [w for k, v in values.items() for w in (f"--speculative-{k}", str(v))] + flags[self.method] + [*self.options]

    def simulated(self, asked: str) -> Optional[float]:
        """The accepted length to simulate: none for "real", the published one for "published", else the number; never
        more than the draft can give."""
        if self.method is None or self.kind == "ngram" or asked == "real":
            return None
        most = float(self.steps + 1)
        if asked == "published":
            fitting = [value for nodes, kind, value in PUBLISHED if kind == self.kind and self.nodes <= nodes]
            # A longer chain is not published; its first 3 drafts are accepted as a chain's of 3.
            return min(most, fitting[0] if fitting else 3.2)
        return min(most, float(asked))


def parse(name: str) -> Mode:
    whole, *more = name.split("+")
    options: list[str] = []
    for text in more:
        ratio = re.fullmatch(r"ratio(\d+(?:\.\d+)?)", text)
        if text != "lazy" and (ratio is None or not float(ratio[1]) > 0):
            raise BadMode(f"mode {name!r}: +{text}; allowed: +lazy, +ratioR with R above 0")
        options += ["--mamba-full-memory-ratio", ratio[1]] if ratio else ["--mamba-radix-cache-strategy", "extra_buffer_lazy"]
    return dataclasses.replace(_draft(whole), name=name, options=tuple(options))


def _draft(name: str) -> Mode:
    if name == "none":
        return Mode(name)
    found = re.fullmatch(rf"({'|'.join(METHODS)})-(chain|tree|ngram)(\d+)(?:@(\d+)x(\d+))?", name)
    if found is None:
        raise BadMode(
            f"mode {name!r}; allowed: none, or {', '.join(METHODS)} with -chainN, -treeN, -treeN@STEPSxTOPK, -ngramN"
        )
    method, kind, nodes = found[1], found[2], int(found[3])
    if not 2 <= nodes <= MAX_NODES:
        raise BadMode(f"mode {name!r}: {nodes} nodes; allowed: 2 to {MAX_NODES}")
    if method == "replayssm" and kind != "chain":
        raise BadMode(f"mode {name!r}: SGLang's ReplaySSM verifies chains alone; allowed: replayssm-chainN")
    if kind == "ngram":
        return Mode(name, method, kind, nodes)
    if kind == "chain":
        if found[4]:
            raise BadMode(f"mode {name!r}: the steps of a chain follow from its nodes; allowed: @STEPSxTOPK on trees")
        return Mode(name, method, kind, nodes, nodes - 1, 1)
    steps, topk = int(found[4] or STEPS), int(found[5] or 0)
    if not topk:
        topk = next(k for k in range(2, MAX_NODES) if proposed(steps, k) >= nodes - 1)
    if steps < 1 or topk < 2 or proposed(steps, topk) < nodes - 1:
        raise BadMode(f"mode {name!r}: {steps} steps with topk {topk} do not fill {nodes} nodes")
    return Mode(name, method, kind, nodes, steps, topk)


def proposed(steps: int, topk: int) -> int:
    return topk + (steps - 1) * topk**2
