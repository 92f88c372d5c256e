"""TREEWY_FLOAT32=1: what it replaces exists in SGLang, is replaced, and computes what it should."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from treewy_sglang.sglang import after_import, config, float32
from treewy_sglang.sglang.cpu import bootstrap

SERVER = ["-m", "sglang.launch_server", "--dtype", "float32"]


def test_only_the_environment_turns_it_on(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    environ = {}
    assert not bootstrap.activate(SERVER + ["--device", "cuda"], environ) and environ == {}
    environ = {"TREEWY_FLOAT32": "1", "TRITON_F32_DEFAULT": "tf32"}
    assert not bootstrap.activate(SERVER + ["--device", "cuda"], environ)
    assert environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32" and environ["TRITON_F32_DEFAULT"] == "tf32"
    float32.activate({"TREEWY_FLOAT32": "1"})
    assert sum(isinstance(f, after_import.Finder) and f.changes is float32.CHANGES for f in sys.meta_path) == 1


def test_a_cpu_server_needs_none_of_it(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    bootstrap.activate(SERVER + ["--device", "cpu"], {"TREEWY_FLOAT32": "1"})
    assert not any(isinstance(f, after_import.Finder) for f in sys.meta_path)


@pytest.mark.parametrize(
    "device, dtype, environ, served",
    [
        ("cuda", "float32", {}, False),
        ("cuda", "float32", {"TREEWY_FLOAT32": "1"}, True),
        ("cuda", "bfloat16", {}, True),
        ("cpu", "float32", {}, True),
    ],
)
def test_float32_on_cuda_is_refused_at_start(device, dtype, environ, served):
    """Without it the server would start, and end at its first request."""
    reason = config.refusal_of_float32(device, getattr(torch, dtype), environ)
    assert (reason is None) == served
    if reason:
        assert "--dtype bfloat16" in reason and "TREEWY_FLOAT32=1" in reason


def test_operators_take_their_torch_form():
    class MultiPlatformOp:
        def dispatch_forward(self):
            return "kernel"

        def forward_native(self):
            return None

    class GemmaRMSNorm(MultiPlatformOp):
        pass

    class RotaryEmbedding(MultiPlatformOp):
        pass

    class MRotaryEmbedding(RotaryEmbedding):
        pass

    class SiluAndMul(MultiPlatformOp):
        pass

    module = ModuleType("multi_platform")
    module.MultiPlatformOp = MultiPlatformOp
    float32.native_forward(module)
    for kind in (GemmaRMSNorm, RotaryEmbedding, MRotaryEmbedding):
        op = kind()
        assert op.dispatch_forward() == op.forward_native
    assert SiluAndMul().dispatch_forward() == "kernel"


def recurrence(q, k, v, g, beta, state):
    """One sequence, token by token, float64: q, k [n, H, K], v [n, HV, V]. Returns outputs and the state before every token."""
    repeat = v.shape[1] // k.shape[1]
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    unit = lambda x: (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeat, 1)  # noqa: E731
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    out, states = [], []
    for t in range(len(v)):
        states.append(state)
        state = state * g[t].exp()[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + torch.einsum("hv,hk->hvk", u, k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(out), [*states, state]


def test_prefill_is_the_recurrence(device):
    torch.manual_seed(0)
    H, HV, K, lengths, slots = 2, 4, 64, [70, 1, 128, 5], [3, 0, -1, 2]
    n = sum(lengths)
    q, k, v = (torch.randn(1, n, h, K) for h in (H, H, HV))
    g, beta = -torch.rand(1, n, HV) * 3, torch.rand(1, n, HV)
    pool = torch.randn(5, HV, K, K)
    starts = torch.tensor([0, *lengths]).cumsum(0)

    def refuse(*args, **kwargs):
        return "upstream's"

    module = ModuleType("chunk")
    module.chunk_gated_delta_rule = refuse
    float32.prefill_in_torch(module)
    rule = module.chunk_gated_delta_rule
    assert rule(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, cu_seqlens=starts) == "upstream's"
    with pytest.raises(ValueError, match="packed sequences"):
        rule(q, k, v, g, beta)

    state = pool.clone().to(device)
    arguments = [x.to(device) for x in (q, k, v, g, beta)]
    out, none, chunks = rule(
        *arguments, initial_state=state, initial_state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        cu_seqlens=starts.to(device), head_first=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert none is None and out.shape == v.shape and out.device.type == chunks.device.type == device
    out, chunks, state = out.cpu(), chunks.cpu(), state.cpu()
    at = 0
    for i, (length, slot) in enumerate(zip(lengths, slots)):
        count = -(-length // 64)
        if slot >= 0:
            part = slice(int(starts[i]), int(starts[i + 1]))
            right, states = recurrence(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], pool[slot])
            for got, expected in ((out[0, part], right), (state[slot], states[-1]), (chunks[0, at : at + count], torch.stack(states[::64][:count]))):
                assert (got.double() - expected).abs().max() <= 2e-5 * expected.abs().max()
        at += count
    assert at == chunks.shape[1]
    assert torch.equal(state[1], pool[1]) and torch.equal(state[4], pool[4])


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_has_what_is_replaced():
    """By source text, so that nothing of SGLang is imported."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])

    def text(*parts):
        return root.joinpath(*parts).read_text()

    layers = ("srt", "layers")
    assert "self._forward_method: Callable = self.dispatch_forward()" in text(*layers, "utils", "multi_platform.py")
    for name, file in {"GemmaRMSNorm": "layernorm.py", "RMSNorm": "layernorm.py", "RotaryEmbedding": "rotary_embedding/base.py"}.items():
        assert f"\nclass {name}(MultiPlatformOp):" in text(*layers, *file.split("/"))
    assert f"\nclass {float32.EXPERTS}(FusedMoEMethodBase, MultiPlatformOp):" in text(*layers, "quantization", "unquant.py")
    assert "\ndef fused_moe_forward_native(\n    layer: torch.nn.Module,\n    dispatch_output:" in text(*layers, "moe", "fused_moe_native.py")
    chunk = text("kernels", "ops", "attention", "fla", "chunk.py")
    assert "\ndef chunk_gated_delta_rule(" in chunk and "q.dtype != torch.float32" in chunk
    # The reason for the experts' replacement; when it is gone, so can that be.
    experts = text(*layers, "moe", "moe_runner", "triton_utils", "fused_moe.py")
    assert "tl.bfloat16 if hidden_states.dtype == torch.bfloat16 else tl.float16" in experts
