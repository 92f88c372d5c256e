"""Plain streaming kernels: what this GPU's memory gives when nothing else is asked of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import timing


@triton.jit
def _read(x, out, per_program, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    pid = tl.program_id(0)
    base = x + pid.to(tl.int64) * per_program
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, per_program, BLOCK * UNROLL):
        for j in tl.static_range(UNROLL):
            acc += tl.load(base + i + j * BLOCK + offsets)
    tl.store(out + pid, tl.sum(acc, 0))


@triton.jit
def _read_write(x, y, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets) * 0.999)


def measure() -> tuple[float, float]:
    """(read GB/s, read+write GB/s), best of a few tile sizes; read+write counts both directions."""
    numel = 1 << 29  # 2 GiB of float32, twice
    x = torch.randn(numel, device="cuda")
    y = torch.empty_like(x)
    out = torch.empty(1 << 20, device="cuda")
    read, both = [], []
    for block, unroll, per_program, warps in (
        (4096, 4, 1 << 16, 8),
        (2048, 8, 1 << 15, 4),
        (4096, 4, 1 << 14, 8),
        (4096, 8, 1 << 15, 8),
    ):
        def call(a, block=block, unroll=unroll, per_program=per_program, warps=warps):
            _read[(numel // per_program,)](a, out, per_program, BLOCK=block, UNROLL=unroll, num_warps=warps)

        us = timing.graph_us([lambda: call(x), lambda: call(y)], "cuda", budget_ms=20)
        read.append(numel * 4 / us / 1e3)
    for block, warps in ((2048, 4), (4096, 8), (8192, 8)):
        def scale(a, b, block=block, warps=warps):
            _read_write[(numel // block,)](a, b, BLOCK=block, num_warps=warps)

        for a, b in ((x, x), (x, y)):  # in place, as a commit does, and from one buffer to another
            us = timing.graph_us([lambda: scale(a, b)], "cuda", budget_ms=20)
            both.append(2 * numel * 4 / us / 1e3)
    us = timing.graph_us([lambda: y.copy_(x)], "cuda", budget_ms=20)
    both.append(2 * numel * 4 / us / 1e3)
    return max(read), max(both)
