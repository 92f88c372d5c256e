"""Full attention on CPU for a server that speculates: SGLang's torch_native backend plus what draft trees need.

``torch_native`` knows whole prompts and one new token per request. Verification of a tree, drafting of several branches
and catching up on accepted drafts all have one shape: N requests with T queries each, where a query sees the whole text
of its request and some of a few extra tokens. :class:`Plan` describes that; :func:`attend` computes it for all requests
at once. Softmax does not care about the order of keys, so the extra tokens simply follow the padded text.

Letters: N requests, T queries of one request, P longest text, E extra tokens of one request, HQ query heads, HK key
heads (HQ a multiple of HK), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

import torch

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


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
    key_heads = k_cache.shape[1]
    queries = q.shape[0] // rows
    group = q.shape[1] // key_heads
    flat = plan.slots.flatten()
    key = k_cache.index_select(0, flat).view(rows, keys, key_heads, -1).permute(0, 2, 3, 1).float()
    value = v_cache.index_select(0, flat).view(rows, keys, key_heads, -1).transpose(1, 2).float()
    # the queries of all heads that share a key head become rows of one product
    query = q.view(rows, queries, key_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(rows, key_heads, group * queries, -1)
    score = (query.float() * scaling) @ key
    if plan.visible is not None:
        score = score.view(rows, key_heads, group, queries, keys)
        score = score.masked_fill(~plan.visible.unsqueeze(1), float("-inf")).view(rows, key_heads, -1, keys)
    out = score.softmax(-1) @ value
    out = out.view(rows, key_heads, group, queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape[0], q.shape[1], -1).to(q.dtype)


def _tree_visible(spec_info, rows: int, nodes: int) -> torch.Tensor:
    """Which nodes of its draft each node sees, bool ``[N or 1, T, T]``."""
    mask = spec_info.custom_mask
    if spec_info.tree_topk == 1 or mask is None or mask.numel() == 0:
        return torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
    if mask.numel() != rows * nodes * nodes:
        raise ValueError(
            f"the tree mask has {mask.numel()} elements; {rows} requests with {nodes} nodes need {rows * nodes * nodes}"
        )
    return mask.view(rows, nodes, nodes).bool()


class TreeAttnBackend(TorchNativeAttnBackend):
    """``torch_native`` with verification of draft trees and catching up after them.

    Prompts go through the parent class. Refuses what the shared computation leaves out: sliding windows, soft caps on
    the scores and cross attention.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.max_context_len = model_runner.model_config.context_len
        self.plan: Optional[Plan] = None

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self.plan = None
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        rows = forward_batch.batch_size
        table, requests = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        if mode.is_decode():
            self.plan = make_plan(table, requests, forward_batch.seq_lens)
        elif mode.is_target_verify():
            nodes = forward_batch.spec_info.draft_token_num
            visible = _tree_visible(forward_batch.spec_info, rows, nodes)
            # seq_lens does not count the draft here
            self.plan = make_plan(
                table, requests, forward_batch.seq_lens, forward_batch.out_cache_loc.view(rows, nodes), visible
            )
        elif mode.is_draft_extend_v2():
            nodes = forward_batch.out_cache_loc.shape[0] // rows
            visible = torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
            # here it does
            self.plan = make_plan(
                table,
                requests,
                forward_batch.seq_lens - nodes,
                forward_batch.out_cache_loc.view(rows, nodes),
                visible,
            )

    def _planned(self, q, k, v, layer, forward_batch, save_kv_cache) -> torch.Tensor:
        if layer.is_cross_attention or layer.logit_cap or (layer.sliding_window_size or -1) > -1:
            raise NotImplementedError(
                f"speculation on CPU: layer {layer.layer_id} has cross attention, a score cap or a sliding window"
            )
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        out = attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.plan,
            layer.scaling,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self.plan is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._planned(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return self._planned(q, k, v, layer, forward_batch, save_kv_cache)

    def update_verify_buffers_to_fill_after_draft(self, spec_info, cuda_graph_bs) -> None:
        """Nothing is planned ahead of the draft on CPU."""


class TreeMultiStepDraftBackend:
    """One :class:`TreeAttnBackend` per step of EAGLE drafting, planned together.

    In step i every branch sees the text and its own drafts of steps 0..i.
    """

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends: List[TreeAttnBackend] = [
            TreeAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)
        ]
        self.needs_cpu_seq_lens = False

    def init_forward_metadata(self, forward_batch) -> None:
        if not self.attn_backends:
            return
        rows = forward_batch.batch_size
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        drafts = forward_batch.out_cache_loc.view(rows, self.topk, self.speculative_num_steps)
        own = torch.eye(self.topk, dtype=torch.bool)
        for step, backend in enumerate(self.attn_backends):
            count = step + 1
            backend.plan = make_plan(
                table,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                drafts[:, :, :count].reshape(rows, -1),
                own.repeat_interleave(count, dim=1).unsqueeze(0),
            )


def create_backend(model_runner) -> TorchNativeAttnBackend:
    """What ``--attention-backend torch_native`` is on this server: SGLang's own unless it speculates on CPU."""
    if model_runner.device == "cpu" and model_runner.server_args.speculative_algorithm:
        return TreeAttnBackend(model_runner)
    return TorchNativeAttnBackend(model_runner)
