"""Stand-in for the CUDA wheel of sgl_kernel on a machine without GPU.

Put the folder above this one in front of the wheel on the import path (SGLang patched by TreeWY does that itself for
``--device cpu``). Python files of the wheel stay reachable as submodules; its CUDA libraries are never loaded; the
``*_cpu`` operators come from ``treewy_sglang.sglang.cpu``.
"""

import os as _os
import sys as _sys

from treewy_sglang.sglang.cpu import adapters as _adapters
from treewy_sglang.sglang.cpu import bootstrap as _bootstrap
from treewy_sglang.sglang.cpu import operators as _operators  # noqa: F401  (registers torch.ops.sgl_kernel.*_cpu)
from treewy_sglang.sglang.cpu.sampling import top_k_renorm as top_k_renorm_prob
from treewy_sglang.sglang.cpu.sampling import top_p_renorm as top_p_renorm_prob
from treewy_sglang.sglang.cpu.sampling import tree_sample as tree_speculative_sampling_target_only

_bootstrap.set_defaults(_sys.argv, _os.environ)
_bootstrap.start_by_fork(_os.environ)
_adapters.install()
_wheel = _bootstrap.wheel_folder()
if _wheel is not None:
    __path__.append(str(_wheel))
    from sgl_kernel.version import __version__  # noqa: E402

from sgl_kernel.kvcacheio import copy_all_layer_kv_cache_cpu  # noqa: E402
from sgl_kernel.mamba import (  # noqa: E402
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
from sgl_kernel.speculative import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    reconstruct_indices_from_tree_mask,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)
