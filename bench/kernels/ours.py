"""treewy's operators on a problem, called through the package as the server calls them."""

from __future__ import annotations

import torch

from . import cases as C
from .problem import ACT, Problem, empty


def bytes_per_layer(case: C.Case, shape: C.Shape, sets: int = 1) -> int:
    return sets * case.requests * case.nodes * (C.stash_bytes_per_node(shape) + 4)


class TreeWY:
    def __init__(self, problem: Problem, fused: bool):
        from treewy_sglang import ops
        from treewy_sglang.stash import Stash

        self.ops, self.p, self.fused = ops, problem, fused
        shape, N, T = problem.pool.shape, problem.N, problem.T
        self.stashes = [
            Stash.allocate(
                layers=problem.layers,
                rows=N,
                nodes=T,
                key_heads=shape.H,
                value_heads=shape.HV,
                key_dim=shape.K,
                value_dim=shape.V,
                conv_dim=shape.D if fused else None,
                activation_dtype=ACT,
                device=problem.device,
            )
            for _ in range(problem.sets)
        ]
        self.layers = [[stash.layer(i) for i in range(problem.layers)] for stash in self.stashes]
        self.out = empty((N * T, shape.HV, shape.V), ACT, problem.device)
        self.parents = problem.parents

    def verify(self, s: int, layer: int) -> torch.Tensor:
        p, pool, shape = self.p, self.p.pool, self.p.pool.shape
        mixed, a, b = p.inputs(s, layer)
        rest = (
            a, b, pool.gates.A_log, pool.gates.dt_bias, p.state[layer], p.slots[s], self.parents, self.out,
            self.layers[s][layer], shape.K**-0.5,
        )  # fmt: skip
        if self.fused:
            self.ops.tree_conv_verify(mixed, pool.conv_weight, None, p.conv_state[layer], *rest)
        else:
            q, k, v = torch.split(mixed, [shape.H * shape.K, shape.H * shape.K, shape.HV * shape.V], dim=-1)
            self.ops.tree_verify(
                q.unflatten(-1, (shape.H, shape.K)),
                k.unflatten(-1, (shape.H, shape.K)),
                v.unflatten(-1, (shape.HV, shape.V)),
                *rest,
            )
        return self.out

    def commit(self, s: int) -> None:
        p = self.p
        conv_state = p.conv_state if self.fused else None
        self.ops.commit(self.stashes[s], self.parents, p.accepted, p.slots[s], p.state, conv_state)

    def links(self) -> None:
        """SGLang's links to parents: once a step for all layers."""
        self.ops.parents_from_links(*self.p.links, self._links_out())

    def _links_out(self):
        if not hasattr(self, "_parents_out"):
            self._parents_out = torch.empty_like(self.p.parents)
        return self._parents_out
