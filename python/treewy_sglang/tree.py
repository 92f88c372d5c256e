"""Draft trees as plain lists: shapes to test with, SGLang's links, ancestor sets.

A tree of T nodes is a list `parents` with parents[0] = -1 and -1 <= parents[t] < t (a further -1 makes it a forest: that
node too is a child of the committed state).
"""

import random

import torch


def chain(nodes):
    """One path: node t follows t - 1."""
    return list(range(-1, nodes - 1))


path = chain


def star(nodes):
    """All nodes are children of the root."""
    return [-1] + [0] * (nodes - 1)


def caterpillar(nodes):
    """A path of every second node, each with one leaf."""
    return [-1] + [t - 1 if t % 2 else max(0, t - 2) for t in range(1, nodes)]


def random_tree(nodes, rng, forest=False):
    """Every node picks its parent among the nodes before it. rng: random.Random or a seed."""
    rng = rng if isinstance(rng, random.Random) else random.Random(rng)
    return [-1] + [rng.randrange(-1 if forest else 0, t) for t in range(1, nodes)]


def top_k_tree(nodes, width, rng):
    """Grown in levels of at most `width` nodes, as EAGLE drafts are."""
    rng = rng if isinstance(rng, random.Random) else random.Random(rng)
    parents, level = [-1], [0]
    while len(parents) < nodes:
        count = min(width, nodes - len(parents))
        chosen = sorted(rng.choice(level) for _ in range(count))
        level = list(range(len(parents), len(parents) + count))
        parents += chosen
    return parents


SHAPES = {
    "path": lambda nodes, rng: path(nodes),
    "star": lambda nodes, rng: star(nodes),
    "caterpillar": lambda nodes, rng: caterpillar(nodes),
    "random": lambda nodes, rng: random_tree(nodes, rng),
    "forest": lambda nodes, rng: random_tree(nodes, rng, forest=True),
    "topk4": lambda nodes, rng: top_k_tree(nodes, 4, rng),
}


def check_parents(parents):
    """The list itself, or ValueError naming the bad entry, its value and the values allowed."""
    from . import _host

    return _host.check_parents(list(parents))


def links_from_parents(parents):
    """(next_token, next_sibling): first child and next sibling of each node, -1 for none, children in rising order.

    A forest's further roots hang on node 0 as siblings, which is how links can say it."""
    nodes = len(parents)
    next_token, next_sibling, last = [-1] * nodes, [-1] * nodes, {}
    for t, parent in enumerate(parents):
        if parent in last:
            next_sibling[last[parent]] = t
        elif parent >= 0:
            next_token[parent] = t
        last[parent] = t
    return next_token, next_sibling


def parents_from_links(next_token, next_sibling):
    """Parents of a tree given by links, or ValueError naming the bad link. Nodes that no link reaches get -1."""
    from . import _host

    return _host.parents_from_links(list(next_token), list(next_sibling))


def ancestor_path(parents, node):
    """Nodes from the root to `node`, inclusive."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def ancestor_words(parents):
    """[T][ceil(T/32)] signed 32-bit words: bit j of word j // 32 says that j is t or an ancestor of t."""
    words = (len(parents) + 31) // 32
    rows = []
    for t in range(len(parents)):
        bits = sum(1 << j for j in ancestor_path(parents, t))
        row = [(bits >> (32 * w)) & 0xFFFFFFFF for w in range(words)]
        rows.append([w - (1 << 32) if w >= 1 << 31 else w for w in row])
    return rows


def tensor(trees, device="cpu"):
    """A list of N trees of T nodes each as int32 [N, T]."""
    return torch.tensor([list(t) for t in trees], dtype=torch.int32, device=device)
