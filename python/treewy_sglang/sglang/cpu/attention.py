"""Full attention on CPU for a server that speculates: SGLang's torch_native backend plus what draft trees need.

``torch_native`` knows whole prompts and one new token per request. Verification of a tree, drafting of several branches
and catching up on accepted drafts go through :mod:`.paged`.
"""

from __future__ import annotations

from typing import List, Optional

import torch

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from .paged import Plan, attend, branch_visible, make_plan, tree_visible


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
            chain = forward_batch.spec_info.tree_topk == 1
            visible = tree_visible(None if chain else forward_batch.spec_info.custom_mask, rows, nodes)
            # seq_lens does not count the draft here
            self.plan = make_plan(
                table, requests, forward_batch.seq_lens, forward_batch.out_cache_loc.view(rows, nodes), visible
            )
        elif mode.is_draft_extend_v2():
            nodes = forward_batch.out_cache_loc.shape[0] // rows
            # here it does
            text = forward_batch.seq_lens - nodes
            visible = tree_visible(None, rows, nodes)
            self.plan = make_plan(table, requests, text, forward_batch.out_cache_loc.view(rows, nodes), visible)

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
        for step, backend in enumerate(self.attn_backends):
            count = step + 1
            backend.plan = make_plan(
                table,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                drafts[:, :, :count].reshape(rows, -1),
                branch_visible(self.topk, count),
            )


def create_backend(model_runner) -> TorchNativeAttnBackend:
    """What ``--attention-backend torch_native`` is on this server: SGLang's own unless it speculates on CPU."""
    if model_runner.device == "cpu" and model_runner.server_args.speculative_algorithm:
        return TreeAttnBackend(model_runner)
    return TorchNativeAttnBackend(model_runner)
