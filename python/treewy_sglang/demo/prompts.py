"""What is asked: a few lines for the eye, and a seeded set of mixed lengths with shared prefixes for comparison."""

from __future__ import annotations

import random

from treewy_sglang.demo.checkpoint import TEXT

SHOWN = (
    "What is a draft?",
    "How does a server answer sooner without a change in the text?",
    "Tell me about the quick brown fox and the lazy dog, please.",
    "A wide tree costs a few more vectors. Continue: a wide tree",
    "def solve(tree):\n    for node in tree:\n        ",
    "List ten branches of a tree that are checked together, one a line.",
)

# Lengths in tokens of the first sixteen; one token is one byte.
LENGTHS = (8, 700, 33, 128, 65, 257, 12, 411, 64, 96, 513, 20, 180, 300, 47, 640)


def mixed(count: int = 16, seed: int = 0) -> list[list[int]]:
    """`count` prompts of 8 to 700 tokens. Of every four, two share a long prefix, as chats with one system prompt do;
    one is text the head was fitted to, one is noise that it never saw."""
    draw = random.Random(seed)
    data = TEXT.encode()
    out: list[list[int]] = []
    for i in range(count):
        length = LENGTHS[i] if i < len(LENGTHS) else draw.randint(8, 700)
        start = draw.randrange(len(data) - 700)
        if i % 4 in (1, 2):
            # The prefix is the same within a group of eight prompts, the last eighth of the prompt differs.
            shared = (i // 8 * 211) % (len(data) - 700)
            keep = length - max(4, length // 8)
            tokens = [*data[shared : shared + keep], *data[start : start + length - keep]]
        elif i % 4 == 3:
            tokens = [draw.randrange(32, 127) for _ in range(length)]
        else:
            tokens = list(data[start : start + length])
        out.append(tokens)
    return out
