"""The state pool of a server with --enable-treewy: state slots as ever, and a stash instead of snapshots."""

from __future__ import annotations

import logging
from typing import Optional

from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import GB, HybridReqToTokenPool, MambaPool

from treewy_sglang import Stash
from treewy_sglang.sglang.sizing import stash_rows, stash_shape

logger = logging.getLogger(__name__)


class TreeWYMambaPool(MambaPool):
    """Row r of the stash belongs to row r of the batch that is being verified: it is written by the verify forward
    and read by the commit that follows it, so it needs a row per running request and none per cached prefix."""

    stash: Optional[Stash] = None
    stash_layers: tuple = ()

    def __init__(self, *, speculative_num_draft_tokens: Optional[int] = None, spec_state_size: int, **kwargs):
        # Without draft tokens upstream builds the plain State: no intermediate_ssm, no intermediate_conv_window.
        super().__init__(spec_state_size=spec_state_size, speculative_num_draft_tokens=None, **kwargs)
        if speculative_num_draft_tokens is None:
            return
        shape = stash_shape(kwargs["cache_params"], len(kwargs["mamba_layer_ids"]), speculative_num_draft_tokens)
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.stash = Stash.allocate(rows=stash_rows(spec_state_size), device=self.device, **shape)
        self.stash_layers = tuple(self.stash.layer(i) for i in range(shape["layers"]))
        self.mem_usage += self.stash.nbytes / GB
        logger.info("TreeWY stash is allocated: %.3f GB.", self.stash.nbytes / GB)

    def get_speculative_mamba2_params_all_layers(self):
        raise RuntimeError(
            "this server runs with --enable-treewy and keeps no per-draft states; the caller wants "
            "MambaPool.SpeculativeState."
        )


class TreeWYReqToTokenPool(HybridReqToTokenPool):
    mamba_pool_cls = TreeWYMambaPool
