"""Attention of several queries per request over a paged KV pool, on CPU in torch.

Whole prompts aside, everything that speculation asks of attention has one shape: N requests with T queries each, where a
query sees the whole text of its request and some of a few extra tokens: its ancestors in a draft tree, the earlier drafts
of its branch, the accepted drafts before it. :class:`Plan` describes that; :func:`attend` computes it for all requests
at once. Softmax does not care about the order of keys, so the extra tokens simply follow the padded text.

Letters: N requests, T queries of one request, P longest text, E extra tokens of one request, HQ query heads, HK key
heads (HQ a multiple of HK), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F


@dataclass
class Plan:
    """Which slots of the KV pool each query sees.

    slots int64 ``[N, P + E]``: slots of the text (padded with slot 0), then of the extra tokens.
    visible bool ``[N, 1, T, P + E]``, or None if every query sees everything.
    """

    slots: torch.Tensor
    visible: Optional[torch.Tensor]


def make_plan(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lengths: torch.Tensor,
    extra_slots: Optional[torch.Tensor] = None,
    extra_visible: Optional[torch.Tensor] = None,
) -> Plan:
    """Plan for texts of ``lengths`` ``[N]`` tokens that lie in their rows of req_to_token ``[requests, width]``.

    extra_slots ``[N, E]``, extra_visible bool ``[N or 1, T, E]``; both or neither.
    """
    lengths = lengths.long()
    longest = int(lengths.max()) if lengths.numel() else 0
    column = torch.arange(longest)
    text = column < lengths.unsqueeze(1)
    slots = torch.where(text, req_to_token[req_pool_indices.long(), :longest].long(), 0)
    if extra_slots is None:
        return Plan(slots, None if bool(text.all()) else text[:, None, None, :])
    rows, extra = extra_slots.shape
    queries = extra_visible.shape[1]
    visible = torch.cat(
        [text.unsqueeze(1).expand(rows, queries, longest), extra_visible.expand(rows, queries, extra)], dim=-1
    )
    return Plan(torch.cat([slots, extra_slots.long()], dim=1), visible.unsqueeze(1))


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan, scaling: float
) -> torch.Tensor:
    """Attention of N requests with equally many queries.

    q ``[N*T, HQ, D]``, k_cache ``[slots, HK, D]``, v_cache ``[slots, HK, DV]``. Returns ``[N*T, HQ, DV]`` in the dtype
    of q; the sums are float32.
    """
    rows, keys = plan.slots.shape
    flat = plan.slots.flatten()
    # one gather per pool; heads become the second axis by strides alone
    key = k_cache.index_select(0, flat).to(q.dtype).unflatten(0, (rows, keys)).transpose(1, 2)
    value = v_cache.index_select(0, flat).to(q.dtype).unflatten(0, (rows, keys)).transpose(1, 2)
    query = q.unflatten(0, (rows, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=plan.visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)


def tree_visible(mask: Optional[torch.Tensor], rows: int, nodes: int) -> torch.Tensor:
    """Which nodes of its draft each node sees, bool ``[N or 1, T, T]``.

    mask: ``N*T*T`` elements, row of a node = its ancestors and itself; None or empty for a chain.
    """
    if mask is None or mask.numel() == 0:
        return torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
    if mask.numel() != rows * nodes * nodes:
        raise ValueError(
            f"the tree mask has {mask.numel()} elements; {rows} requests with {nodes} nodes need {rows * nodes * nodes}"
        )
    return mask.view(rows, nodes, nodes).bool()


def branch_visible(branches: int, steps: int) -> torch.Tensor:
    """Which drafts each branch sees after so many steps, bool ``[1, branches, branches * steps]``: its own."""
    return torch.eye(branches, dtype=torch.bool).repeat_interleave(steps, dim=1).unsqueeze(0)
