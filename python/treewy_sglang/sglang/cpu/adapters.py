"""Replaces, in SGLang modules, the few names that lead to a Triton kernel even on CPU.

SGLang's CPU path was written for a CPU build of sgl_kernel on Intel AMX, and left some Triton launches on the way of a
hybrid model; they need a GPU. Each entry of :data:`TABLE` names a module, an attribute and what it becomes, and is
applied right after the module has run, before anyone imports from it. A server without patches needs the same
replacements to give the same answers, hence a table here and not a patch. Nothing happens unless the stand-in
``sgl_kernel`` is imported, that is, unless the server runs on CPU.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

from treewy_sglang.sglang import after_import


def _gdn(name: str) -> Callable[[], Callable]:
    def load() -> Callable:
        from . import gdn

        return getattr(gdn, name)

    return load


def _yes() -> bool:
    return True


#: module -> attribute -> function that returns the new value
TABLE: Dict[str, Dict[str, Callable[[], Any]]] = {
    # both switch to fused_rmsnorm_gated_cpu, which upstream reserves for AMX
    "sglang.kernels.ops.attention.fla.fused_norm_gate": {"_use_cpu": _yes},
    "sglang.kernels.ops.attention.fla.layernorm_gated": {"_use_cpu": _yes},
    # the gate of a shared expert
    "sglang.kernels.ops.elementwise.elementwise": {"fused_gate_sigmoid_mul_add": _gdn("gate_sigmoid_mul_add")},
    # states that the prefix cache keeps, copied after a step (mamba_radix_cache_strategy extra_buffer)
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton": {
        "track_mamba_states_if_needed": _gdn("track_states"),
        "track_mamba_states_all_layers": _gdn("track_states_all_layers"),
    },
}


def _apply(module) -> None:
    for name, value in TABLE[module.__name__].items():
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}: this is not the SGLang that TreeWY is written for")
        setattr(module, name, value())


_changes = {module: _apply for module in TABLE}


def install() -> None:
    """Idempotent. A module that was imported earlier is adapted at once."""
    after_import.install(_changes)
