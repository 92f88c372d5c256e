"""The attention backend of a server with --enable-treewy: target verify and commit go through the operators.

Under CUDA graphs the Python below runs once, at capture. Everything that changes from step to step is therefore read
from buffers that the replay refreshes in place: state indices and tree links (upstream's), and the parents, which are
derived from the links inside the captured region, once per forward.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

from treewy_sglang import ops
from treewy_sglang.sglang import status


def parents_of(links: Tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> torch.Tensor:
    """Fill parents [N, T] from the links [n, T] of the first n <= N rows; padding rows become a forest of roots."""
    next_token, next_sibling = links
    rows = next_token.shape[0]
    if rows < parents.shape[0]:
        parents[rows:].fill_(-1)
    ops.parents_from_links(next_token, next_sibling, parents[:rows])
    return parents


class TreeWYGDNAttnBackend(GDNAttnBackend):
    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        # A trie with one child per node still fans out at the root: NGRAM drafts are trees whatever their breadth.
        if model_runner.spec_algorithm.is_ngram():
            self.topk = max(self.topk, 2)
        self._nodes = 0  # of the batch just verified; adaptive speculation changes it

    # Metadata. `retrieve_parent_token` is scratch of upstream's convolution kernel; here it holds the parents.

    def init_forward_metadata(self, forward_batch: Any):
        super().init_forward_metadata(forward_batch)
        self._note(forward_batch)
        metadata = self.forward_metadata
        if not forward_batch.forward_mode.is_target_verify() or metadata.retrieve_next_token is None:
            return
        shape = (metadata.mamba_cache_indices.shape[0], metadata.retrieve_next_token.shape[1])
        parents = torch.empty(shape, dtype=torch.int32, device=metadata.retrieve_next_token.device)
        metadata.retrieve_parent_token = parents_of(
            (metadata.retrieve_next_token, metadata.retrieve_next_sibling), parents
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        # Upstream starts them at zero, which is a link from the root to itself; -1 is "no link". Rows beyond the
        # batch keep the links of an earlier, larger batch, which are valid ones.
        for links in (self.retrieve_next_token_list, self.retrieve_next_sibling_list):
            for buffer in links:
                buffer.fill_(-1)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False):
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if not in_capture:
            self._note(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any):
        super().init_forward_metadata_in_graph(forward_batch)
        metadata = self.forward_metadata
        if forward_batch.forward_mode.is_target_verify() and metadata.retrieve_parent_token is not None:
            parents_of((metadata.retrieve_next_token, metadata.retrieve_next_sibling), metadata.retrieve_parent_token)

    def _note(self, forward_batch: Any):
        if forward_batch.forward_mode.is_target_verify():
            status.count_verify()
            self._nodes = forward_batch.spec_info.draft_token_num

    # Verify

    def forward_extend(self, layer, forward_batch, mixed_qkv, a, b, **kwargs):
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        return self.target_verify(layer, forward_batch.spec_info.draft_token_num, mixed_qkv, a, b)

    def target_verify(self, layer: Any, nodes: int, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
        """Outputs [1, N*T, HV, V] of a layer for N drafts of T nodes; leaves what commit needs in the stash."""
        pool = self.req_to_token_pool
        index = pool.mamba2_layer_index(layer.layer_id)
        cache = pool.mamba_pool.mamba_cache
        metadata = self.forward_metadata
        rows = mixed_qkv.shape[0] // nodes
        parents = metadata.retrieve_parent_token
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        ops.tree_conv_verify(
            mixed_qkv,
            layer.conv_weights,
            layer.bias,
            cache.conv[0][index],
            a,
            b,
            layer.A_log,
            layer.dt_bias,
            cache.temporal[index],
            metadata.mamba_cache_indices[:rows],
            None if parents is None else parents[:rows],
            out,
            pool.mamba_pool.stash_layers[index],
        )
        return out.unsqueeze(0)

    # Commit

    def commit(
        self, accepted: torch.Tensor, track_indices: Optional[torch.Tensor], track_nodes: Optional[torch.Tensor]
    ) -> None:
        """Move the first N state slots of the batch just verified to the accepted nodes, all layers at once."""
        pool = self.req_to_token_pool.mamba_pool
        metadata = self.forward_metadata
        rows = accepted.shape[0]
        parents = metadata.retrieve_parent_token
        track = track_indices is not None
        ops.commit(
            pool.stash,
            None if parents is None else parents[:rows],
            accepted,
            metadata.mamba_cache_indices[:rows],
            pool.mamba_cache.temporal,
            conv_state=pool.mamba_cache.conv[0],
            track_indices=track_indices[:rows] if track else None,
            track_nodes=track_nodes[:rows] if track else None,
            nodes=self._nodes or None,
        )
        status.count_commit(rows, rows * self._nodes)


class TreeWYHybridLinearAttnBackend(HybridLinearAttnBackend):
    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: Optional[torch.Tensor],
        mamba_steps_to_track: Optional[torch.Tensor],
        model: Any,
        req_pool_indices: Optional[torch.Tensor] = None,
    ):
        # A step index is the number of the node in the draft tree, not a count of accepted tokens.
        self.linear_attn_backend.commit(last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)


def backend_classes() -> tuple:
    """(linear, hybrid) backend classes for the seam in SGLang's attention registry."""
    return TreeWYGDNAttnBackend, TreeWYHybridLinearAttnBackend
