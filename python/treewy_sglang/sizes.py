"""Arithmetic of state slots, stash rows and snapshots, shared by the server and by `treewy plan`. Standard library only.

L layers, R rows, T nodes, H key heads, HV value heads, K key and V value channels a head, D convolution channels.
"""

from __future__ import annotations

import math
from typing import Callable, Optional

ACTIVATION = "activation"  # stored in the dtype of the model's activations
FLOAT32 = "float32"

# What the operators take.
MAX_NODES = 128
HEAD_DIMS = (64, 128, 256)  # K = V
CONV_WIDTHS = (2, 3, 4)


def stash_shapes(
    *, layers: int, rows: int, nodes: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int,
    conv_dim: Optional[int],
) -> dict[str, tuple[tuple[int, ...], str]]:  # fmt: skip
    """Shape and kind of dtype of every tensor of a stash; conv_dim None: without convolution."""
    shapes = {
        "u": ((layers, rows, value_heads, nodes, value_dim), FLOAT32),
        "k": ((layers, rows, key_heads, nodes, key_dim), ACTIVATION),
        "k_rnorm": ((layers, rows, key_heads, nodes), FLOAT32),
        "g": ((layers, rows, value_heads, nodes), FLOAT32),
    }
    if conv_dim is not None:
        shapes["conv"] = ((layers, rows, nodes, conv_dim), ACTIVATION)
    return shapes


def stash_row_bytes(*, activation_bytes: int, **dimensions) -> dict[str, int]:
    """Bytes of one stash row (one request, all layers) by tensor; `dimensions` as for stash_shapes, without rows."""
    return {
        name: math.prod(shape) * (activation_bytes if kind == ACTIVATION else 4)
        for name, (shape, kind) in stash_shapes(rows=1, **dimensions).items()
    }


def _most_within(memory: int, cost: Callable[[int], int], low: int, high: int) -> int:
    """The largest n of low..high whose cost, which never falls, is within `memory`; low where none is."""
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= memory:
            low = middle
        else:
            high = middle - 1
    return low


def slots_within(
    budget: int, *, slot_bytes: int, row_bytes: int, slots_per_request: int, requested: int, rows: Callable[[int], int]
) -> int:
    """The most state slots that fit a budget of bytes together with the stash rows of the requests they can run.
    The pool adds one padding slot; `rows(n)` is the number of stash rows for n running requests."""

    def cost(slots: int) -> int:
        return (slots + 1) * slot_bytes + rows(min(requested, slots // slots_per_request)) * row_bytes

    return _most_within(budget, cost, 0, max(0, budget // slot_bytes))


def slots_beside_contexts(
    memory: int, *, least: int, slot_bytes: int, row_bytes: int, slots_per_request: int, requested: int,
    rows: Callable[[int], int], token_bytes: int, request_tokens: int, most_tokens: Optional[int] = None,
) -> int:  # fmt: skip
    """State slots for as many running requests as fit `memory` bytes together with a KV cache that holds the full context
    of each: `request_tokens` tokens of `token_bytes` bytes, `most_tokens` at most for all together. Never fewer slots than
    `least`, and more only for whole requests, up to those requested. Otherwise as for slots_within."""

    def cost(running: int) -> int:
        tokens = running * request_tokens
        if most_tokens is not None:
            tokens = min(tokens, most_tokens)
        return (running * slots_per_request + 1) * slot_bytes + rows(running) * row_bytes + tokens * token_bytes

    running = _most_within(memory, cost, least // slots_per_request, requested)
    return max(least, running * slots_per_request)


def snapshot_slots_within(budget: float, *, slot_bytes: int, nodes: int, slots_per_request: int) -> int:
    """The state slots that SGLang buys for a budget of bytes when it keeps a snapshot per draft node: it charges `nodes`
    slots for every `slots_per_request`, and one slot and one row of snapshots as padding."""
    row = slot_bytes * nodes
    return max(0, int((budget - slot_bytes - row) // (slot_bytes + row / slots_per_request)))


def conv_window_columns(nodes: int, window: int, overlapping: bool) -> int:
    """Columns of convolution input that SGLang keeps for a draft: a window of `window` columns per node, or, where the
    windows of a chain overlap in memory, each column once."""
    return nodes + window - 1 if overlapping else nodes * window
