"""SGLang's own kernels, called as SGLang 0.5.17 calls them (gdn_backend.py, spec_utils.py). No code of it is here.

The kernel modules are loaded from the installed package. `sglang/__init__.py` imports the whole engine (half a minute,
dozens of packages), so the parent packages are replaced by empty ones whose search path is the installed folder; only
the kernel modules themselves run. `load(full=True)` imports the package the ordinary way.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import torch

from . import cases as C
from .problem import ACT, Problem, empty

PINNED = "0.5.17"
MAX_FUSED_QKV_SPLIT_DIM = 8192  # gdn_backend.py: wider layers use views instead of the split kernel
INT32 = 2**31


class Kernels:
    version: str

    def __init__(self, modules, version):
        self.conv_update = modules["mamba.causal_conv1d_triton"].causal_conv1d_update
        self.split = modules["attention.triton_gdn_fused_proj"].fused_qkv_split_gdn_prefill
        self.verify = modules["attention.fla.fused_sigmoid_gating_recurrent"].fused_sigmoid_gating_delta_rule_update
        scatter = modules["mamba.mamba_state_scatter_triton"]
        self.state_scatter = scatter.fused_mamba_state_scatter_with_mask
        self.conv_scatter = scatter.fused_conv_window_scatter_with_mask
        fold = modules["attention.fla.gdn_replayssm_spec_fold"]
        self.fold = fold.commit_gdn_replayssm_fold_all_layers
        self.fold_after_verify = fold.commit_gdn_replayssm_fold_after_verify
        self.version = version


MODULES = (
    "mamba.causal_conv1d_triton",
    "mamba.mamba_state_scatter_triton",
    "attention.triton_gdn_fused_proj",
    "attention.fla.fused_sigmoid_gating_recurrent",
    "attention.fla.gdn_replayssm_spec_fold",
)


def _stub_parents(root: Path) -> None:
    names = ["", ".kernels", ".kernels.ops", ".kernels.ops.mamba", ".kernels.ops.attention", ".kernels.ops.attention.fla"]
    for name in names + [".kernels.jit"]:
        package = types.ModuleType("sglang" + name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules["sglang" + name] = package
    utils = types.ModuleType("sglang.kernels.jit.utils")
    # The rule of sglang/kernels/jit/utils/arch.py, without the machinery around it.
    utils.is_arch_support_pdl = lambda: not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9
    sys.modules[utils.__name__] = utils


_loaded: Kernels | None = None


def load(full: bool = False) -> Kernels:
    """The kernels, loaded once. Raises ImportError when SGLang is not installed, RuntimeError when it is another version."""
    global _loaded
    if _loaded is not None:
        return _loaded
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed: its kernels cannot be timed")
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    if version != PINNED:
        raise RuntimeError(f"sglang {version} is installed, the peers are those of {PINNED}")
    if not full and "sglang" not in sys.modules:
        _stub_parents(Path(list(spec.submodule_search_locations)[0]))
    modules = {name: importlib.import_module("sglang.kernels.ops." + name) for name in MODULES}
    _loaded = Kernels(modules, version)
    return _loaded


def bytes_per_layer(case: C.Case, shape: C.Shape, slots: int) -> int:
    N, T = case.requests, case.nodes
    if case.mode == "snapshot":
        return (N + 1) * T * C.snapshot_bytes_per_node(shape, case.state_dtype)
    ring = slots * T * (shape.HV * shape.V * 2 + shape.H * shape.K * 2 + shape.HV * 8)
    return ring + (N + 1) * (T + 2) * shape.D * 2


def overflows(case: C.Case, shape: C.Shape) -> bool:
    """fused_mamba_state_scatter_with_mask multiplies the request's row by its stride in 32 bits when both fit them."""
    stride = case.nodes * shape.state_numel
    return case.mode == "snapshot" and stride < INT32 and (case.requests - 1) * stride >= INT32


class _Peer:
    """What both paths share: the convolution over the draft, with its windows, and the split of its output."""

    def __init__(self, kernels: Kernels, problem: Problem):
        self.k, self.p = kernels, problem
        shape, N, T, dev = problem.pool.shape, problem.N, problem.T, problem.device
        W = C.CONV_WIDTH
        if problem.case.draft == "chain":  # SGLang's deduplicated layout: one shared row of columns, windows overlap
            phys = empty((problem.layers, N + 1, shape.D, T + W - 2), ACT, dev)
            self.windows = phys.as_strided(
                (problem.layers, N + 1, T, shape.D, W - 1), (phys.stride(0), phys.stride(1), 1, phys.stride(2), 1)
            )
            self.tree = {}
        else:
            self.windows = empty((problem.layers, N + 1, T, shape.D, W - 1), ACT, dev)
            self.parent_token = empty((N, T), torch.int32, dev)  # written by the convolution, read by verify
            if dev != "meta":
                self.parent_token.copy_(problem.parents.clamp(min=0))
            self.tree = dict(
                retrieve_next_token=problem.links[0],
                retrieve_next_sibling=problem.links[1],
                retrieve_parent_token=self.parent_token,
            )
        self.rows = torch.arange(N, dtype=torch.int32).to(dev)
        self.start = (torch.arange(N + 1, dtype=torch.int32) * T).to(dev)
        self._splits = {}
        if dev != "cuda":
            self.windows = fake_cuda(self.windows)

    def conv(self, s: int, layer: int):
        """mixed_qkv -> q, k, v after convolution and SiLU; writes the windows."""
        p, shape = self.p, self.p.pool.shape
        mixed, _, _ = p.inputs(s, layer)
        x = mixed.view(p.N, p.T, -1).transpose(1, 2)
        y = self.k.conv_update(
            x,
            p.conv_state[layer],
            p.pool.conv_weight,
            None,
            "silu",
            conv_state_indices=p.slots[s],
            intermediate_conv_window=self.windows[layer],
            intermediate_state_indices=self.rows,
            **self.tree,
        )
        y = y.transpose(1, 2).view(p.N * p.T, -1)
        return self._split(y)

    def _split(self, y):
        shape, tokens = self.p.pool.shape, self.p.N * self.p.T
        if shape.D <= MAX_FUSED_QKV_SPLIT_DIM:
            return self.k.split(y, shape.H, shape.H, shape.HV, shape.K, shape.K, shape.V)
        q, k, v = torch.split(y, [shape.H * shape.K, shape.H * shape.K, shape.HV * shape.V], dim=-1)
        q, k = (x.view(1, tokens, shape.H, shape.K) for x in (q, k))
        return q, k, v.view(1, tokens, shape.HV, shape.V)

    def qkv(self, s: int, layer: int):
        """Inputs of verify, split once per copy: mixed_qkv stands for the convolution's output."""
        p = self.p
        i = (s * p.layers + layer) % len(p.mixed)
        if i not in self._splits:
            self._splits[i] = self._split(p.mixed[i])
        return self._splits[i]

    def _verify(self, s: int, layer: int, qkv=None, **extra):
        p = self.p
        q, k, v = qkv if qkv is not None else self.qkv(s, layer)
        _, a, b = p.inputs(s, layer)
        return self.k.verify(
            A_log=p.pool.gates.A_log,
            dt_bias=p.pool.gates.dt_bias,
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            initial_state_source=p.state[layer],
            initial_state_indices=p.slots[s],
            cu_seqlens=self.start,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            **extra,
        )

    def commit_conv(self, s: int):
        p = self.p
        conv_state = fake_cuda(p.conv_state) if p.device != "cuda" else p.conv_state
        self.k.conv_scatter(conv_state, self.windows, p.slots[s], p.accepted)


class Snapshot(_Peer):
    """A copy of the state for every draft node during verify; a scatter of the accepted one after it."""

    def __init__(self, kernels, problem):
        super().__init__(kernels, problem)
        shape, N, T = problem.pool.shape, problem.N, problem.T
        size = (problem.layers, N + 1, T, shape.HV, shape.V, shape.K)
        self.states = empty(size, problem.state.dtype, problem.device)

    def verify(self, s, layer, qkv=None):
        return self._verify(
            s,
            layer,
            qkv,
            intermediate_states_buffer=self.states[layer],
            intermediate_state_indices=self.rows,
            cache_steps=self.p.T,
            retrieve_parent_token=self.tree.get("retrieve_parent_token"),
        )

    def commit_state(self, s):
        p = self.p
        state, states = (fake_cuda(x) if p.device != "cuda" else x for x in (p.state, self.states))
        self.k.state_scatter(state, states, p.slots[s], p.accepted)

    def commit(self, s):
        self.commit_state(s)
        self.commit_conv(s)


class ReplaySSM(_Peer):
    """--enable-linear-replayssm-spec: verify stores raw inputs in a ring, commit folds the accepted ones. Chains only."""

    def __init__(self, kernels, problem):
        super().__init__(kernels, problem)
        shape, T, dev = problem.pool.shape, problem.T, problem.device
        L, slots = problem.layers, problem.pool.slots
        self.rawv = empty((L, slots, shape.HV, T, shape.V), ACT, dev)
        self.rawk = empty((L, slots, shape.H, T, shape.K), ACT, dev)
        self.g = empty((L, slots, shape.HV, T), torch.float32, dev)
        self.beta = empty((L, slots, shape.HV, T), torch.float32, dev)

    def verify(self, s, layer, qkv=None):
        return self._verify(
            s,
            layer,
            qkv,
            cache_ring=True,
            replayssm_rawv=self.rawv[layer],
            replayssm_rawk=self.rawk[layer],
            replayssm_g=self.g[layer],
            replayssm_beta=self.beta[layer],
        )

    def commit_state(self, s):
        p = self.p
        self.k.fold(
            checkpoint_state=p.state,
            rawv_cache=self.rawv,
            rawk_cache=self.rawk,
            g_cache=self.g,
            beta_cache=self.beta,
            ssm_state_indices=p.slots[s],
            accept_lens=p.accept_lens,
            max_cache_len=p.T,
            num_k_heads=p.pool.shape.H,
            null_block_id=-1,
        )

    def commit(self, s):
        p = self.p
        conv_state = fake_cuda(p.conv_state) if p.device != "cuda" else p.conv_state
        state = types.SimpleNamespace(
            temporal=p.state,
            replayssm_rawv=self.rawv,
            replayssm_rawk=self.rawk,
            replayssm_g=self.g,
            replayssm_beta=self.beta,
            conv=[conv_state],
            intermediate_conv_window=[self.windows],
        )
        self.k.fold_after_verify(
            spec_state=state,
            state_batch_indices=p.slots[s],
            accept_lens=p.accept_lens,
            last_correct_step_indices=p.accepted,
        )


PEERS = {"snapshot": Snapshot, "replayssm": ReplaySSM}


class _FakeCuda(torch.Tensor):
    """A tensor that says it is on a GPU, to compile or interpret without one: SGLang's wrappers ask before they launch."""

    is_cuda = property(lambda self: True)


def fake_cuda(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(_FakeCuda)
