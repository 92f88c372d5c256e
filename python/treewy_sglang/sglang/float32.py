"""A float32 hybrid on CUDA, slowly: ``TREEWY_FLOAT32=1``, for comparing answers token for token.

SGLang v0.5.17 serves its hybrids on CUDA in half precision only. What stops ``--dtype float32``, or rounds to half precision
without saying so, is listed here and replaced, with and without --enable-treewy alike, so that a server with drafts is
compared with one that differs in its drafts alone:

=========================================  ===========================================================  =====================
where in sglang/                           what it does with float32                                    what is done instead
=========================================  ===========================================================  =====================
srt/layers/layernorm.py:893, :897          sgl_kernel's gemma_rmsnorm has half types only               SGLang's forward_native
srt/layers/layernorm.py:484, :486          so have rmsnorm and fused_add_rmsnorm                        SGLang's forward_native
kernels/ops/attention/fla/chunk.py:210     GDN prefill asserts another dtype                            delta_prefill, in torch
srt/layers/moe/moe_runner/triton_utils/
fused_moe.py:488                           results of the experts' products are rounded to float16      SGLang's fused_moe_native
srt/layers/rotary_embedding/base.py:378    a kernel compiled per dtype, never seen with float32         SGLang's forward_native
kernels/ops/attention/{decode,extend}_     tl.dot takes float32 as TF32, 10 bits of mantissa            TRITON_F32_DEFAULT=ieee
attention.py
srt/environ.py SGLANG_MAMBA_CONV_DTYPE     convolution states are bfloat16                              float32
=========================================  ===========================================================  =====================

The replacements can be captured in CUDA graphs, but for the prefill. Nothing is imported here before SGLang imports it.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Mapping, MutableMapping, Optional

from treewy_sglang.sglang import after_import

SWITCH = "TREEWY_FLOAT32"
#: classes of SGLang's MultiPlatformOp whose own torch implementation is taken
NATIVE = ("GemmaRMSNorm", "RMSNorm", "RotaryEmbedding")
EXPERTS = "UnquantizedFusedMoEMethod"


def wanted(environ: Mapping[str, str]) -> bool:
    return environ.get(SWITCH, "0") == "1"


def native_forward(module: ModuleType) -> None:
    """MultiPlatformOp chooses its forward when it is built."""
    original = module.MultiPlatformOp.dispatch_forward

    @functools.wraps(original)
    def dispatch_forward(self):
        names = {c.__name__ for c in type(self).__mro__}
        if EXPERTS in names:
            from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

            return fused_moe_forward_native
        return self.forward_native if names & set(NATIVE) else original(self)

    module.MultiPlatformOp.dispatch_forward = dispatch_forward


def prefill_in_torch(module: ModuleType) -> None:
    """chunk_gated_delta_rule takes float32."""
    original = module.chunk_gated_delta_rule

    @functools.wraps(original)
    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, head_first=False,
        use_qk_l2norm_in_kernel=False,
    ):  # fmt: skip
        """q, k [1, n, H, K], v [1, n, HV, V], g, beta [1, n, HV], initial_state [slots, HV, V, K] (written), indices [N],
        cu_seqlens [N+1]. Returns outputs [1, n, HV, V], None, states at the start of every 64 tokens [1, chunks, HV, V, K]."""
        import torch

        from treewy_sglang.sglang.cpu.gdn import delta_prefill

        if q.dtype != torch.float32:
            return original(
                q, k, v, g, beta, scale=scale, initial_state=initial_state, initial_state_indices=initial_state_indices,
                cu_seqlens=cu_seqlens, head_first=head_first, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )  # fmt: skip
        if head_first or cu_seqlens is None or initial_state_indices is None:
            raise ValueError(f"{SWITCH}=1 prefills packed sequences over a pool of states only")
        out, states = delta_prefill(
            q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices, cu_seqlens,
            normalize=use_qk_l2norm_in_kernel, scale=scale,
        )  # fmt: skip
        return out.unsqueeze(0), None, states.unsqueeze(0)

    module.chunk_gated_delta_rule = chunk_gated_delta_rule


CHANGES = {
    "sglang.srt.layers.utils.multi_platform": native_forward,
    "sglang.kernels.ops.attention.fla.chunk": prefill_in_torch,
}


def activate(environ: Optional[MutableMapping[str, str]] = None) -> bool:
    """If the environment asks for it, prepare this process and its children; before SGLang imports anything of its own."""
    environ = os.environ if environ is None else environ
    if not wanted(environ):
        return False
    environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    after_import.install(CHANGES)
    return True
