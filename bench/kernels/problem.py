"""Tensors of a case: pools, slot sets, inputs. On device "meta" nothing is allocated, which is enough to compile."""

from __future__ import annotations

import dataclasses
import math

import torch

from . import cases as C
from .timing import L2_FLOOR

SLOTS = 272  # slots of every pool: SGLang's conv kernel is compiled anew for each pool size
POOL_BYTES = 20 << 30  # state pool of a shape, all layers
CASE_BYTES = 24 << 30  # buffers that grow with requests x nodes
ACT = torch.bfloat16


def empty(size, dtype, device):
    return torch.empty(size, dtype=dtype, device=device)


def normal(size, dtype, device, std=1.0):
    x = torch.empty(size, dtype=dtype, device=device)
    if device == "meta":
        return x
    return x.normal_(0.0, std)


class Gates:
    """A_log and dt_bias as Mamba-2 style initialisation leaves them and training keeps them: A in [1, 16], softplus
    of dt_bias in [1e-3, 0.1]."""

    def __init__(self, HV: int, device: str, generator=None):
        A = torch.rand(HV, generator=generator) * 15 + 1
        dt = torch.exp(torch.rand(HV, generator=generator) * math.log(100.0) + math.log(1e-3))
        self.A_log = torch.log(A).to(device)
        self.dt_bias = (dt + torch.log(-torch.expm1(-dt))).to(device)


class Pool:
    """State and convolution state of one shape, shared by its cases."""

    def __init__(self, shape: C.Shape, state_dtype: str, device: str, slots: int = SLOTS):
        self.shape, self.device, self.slots, self.state_dtype = shape, device, slots, state_dtype
        per_layer = slots * C.state_bytes(shape, state_dtype)
        self.layers = max(1, min(shape.layers, POOL_BYTES // per_layer))
        size = (self.layers, slots, shape.HV, shape.V, shape.K)
        self.state = normal(size, C.DTYPES[state_dtype], device, 0.3)
        self.conv_state = normal((self.layers, slots, shape.D, C.CONV_WIDTH - 1), ACT, device)
        self.conv_weight = normal((shape.D, C.CONV_WIDTH), ACT, device, 0.4)
        self.gates = Gates(shape.HV, device)


@dataclasses.dataclass
class Problem:
    case: C.Case
    pool: Pool
    layers: int  # of the pool, as many as fit beside the buffers of this mode
    sets: int  # disjoint groups of slots; a set is one batch

    def __post_init__(self):
        case, pool, shape, device = self.case, self.pool, self.pool.shape, self.pool.device
        N, T = case.requests, case.nodes
        self.N, self.T, self.device = N, T, device
        self.state, self.conv_state = pool.state[: self.layers], pool.conv_state[: self.layers]
        order = torch.randperm(pool.slots, generator=torch.Generator().manual_seed(N))
        self.slots = [order[i * N : (i + 1) * N].to(torch.int32).clone().to(device) for i in range(self.sets)]
        parents = C.parents_of(case.draft, N, T)
        accepted, depth = C.deepest(parents)
        self.depth = float(depth.float().mean())
        self.accepted = accepted.to(device)
        self.accept_lens = depth.to(device)
        self.parents = parents.to(device) if case.draft == "tree" else None
        self.links = tuple(x.to(device) for x in C.links_of(parents)) if case.draft == "tree" else None
        per_copy = N * T * shape.D * 2
        copies = max(1, min(self.layers * self.sets, L2_FLOOR // per_copy))
        self.mixed = [normal((N * T, shape.D), ACT, device) for _ in range(copies)]
        self.ab = [
            (normal((N * T, shape.HV), ACT, device), normal((N * T, shape.HV), ACT, device)) for _ in range(copies)
        ]

    @property
    def pairs(self):
        """(set, layer) of every call in a graph, in an order that never meets the same data twice in a row."""
        return [(s, layer) for s in range(self.sets) for layer in range(self.layers)]

    def inputs(self, s: int, layer: int):
        i = (s * self.layers + layer) % len(self.mixed)
        return (self.mixed[i], *self.ab[i])


def plan(case: C.Case, pool: Pool, bytes_per_layer: int, free_bytes: int | None) -> Problem:
    """As many layers as the memory holds; raises MemoryError when one does not fit."""
    limit = CASE_BYTES if free_bytes is None else min(CASE_BYTES, int(free_bytes * 0.9))
    if bytes_per_layer > limit:
        # One layer may use everything there is before a case counts as one that does not fit.
        if free_bytes is None or bytes_per_layer > free_bytes * 0.95:
            free = "" if free_bytes is None else f", {free_bytes / 1e9:.1f} GB are free"
            raise MemoryError(f"needs {bytes_per_layer / 1e9:.1f} GB for one layer{free}")
    layers = max(1, min(pool.layers, limit // max(1, bytes_per_layer)))
    touched = layers * case.requests * C.state_bytes(pool.shape, case.state_dtype)
    sets = max(1, min(-(-L2_FLOOR // touched), pool.slots // case.requests))
    return Problem(case, pool, layers, sets)
