"""The hybrid in torch, for training: Gated DeltaNet layers in chunked form, gated attention, experts, the MTP layer.

Weight names and meaning are those of transformers' and SGLang's Qwen3-Next, which load what :func:`save` writes; a test
compares the logits. Letters: B batch, T tokens, D hidden, H key heads, HV value heads, K and V their widths, C tokens in
a chunk. Needs torch and numpy alone.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treewy_sglang.demo.checkpoint import CHAT_TEMPLATE, SPECIAL, model_config, write_tokenizer  # noqa: F401

PRESETS = {
    # What the repository holds: 5.3 million parameters.
    "demo": dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, linear_num_key_heads=1, linear_num_value_heads=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=128,
    ),
    # For tests and for a first look on a CPU.
    "small": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=64,
    ),
    "tiny": dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=64, linear_value_head_dim=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
}  # fmt: skip


def config_of(preset: str) -> dict:
    """config.json of a preset. All experts are active: with a router that chooses, rounding can swap one expert for another,
    and the answers with and without drafts could then differ by more than a near tie."""
    return {**model_config(), **PRESETS[preset], "num_experts": 4, "num_experts_per_tok": 4, "torch_dtype": "bfloat16"}


# --- Gated DeltaNet ---------------------------------------------------------------------------------------------------


def delta_sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None):
    """The recurrence, one token at a time: S = e^g S + u k^T with u = beta (v - e^g S k), o = S q.

    q, k [B, T, HV, K] normalised and q scaled; v [B, T, HV, V]; g, beta [B, T, HV]; state [B, HV, V, K], zero if None.
    Returns o [B, T, HV, V] and the last state. The yardstick of :func:`delta_chunked`.
    """
    B, T, HV, K = k.shape
    S = v.new_zeros(B, HV, v.shape[-1], K) if state is None else state
    out = []
    for t in range(T):
        S = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + u[..., :, None] * k[:, t, :, None, :]
        out.append(torch.einsum("bhvk,bhk->bhv", S, q[:, t]))
    return torch.stack(out, dim=1), S


def delta_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, chunk: int = 64):
    """The same, C tokens at a time; arguments and results as in :func:`delta_sequential`.

    Within a chunk that starts from S0, with G the running sum of g, the u of all tokens solve one triangular system,
        (I + L) U = beta V - beta e^G K S0^T,    L_tj = beta_t e^{G_t - G_j} (k_j . k_t) for j < t,
    so that U = X - Y S0^T with X and Y known for every chunk before any state is. What is left to do in order is
        O = e^G Q S0^T + A U,   A_tj = e^{G_t - G_j} (k_j . q_t) for j <= t,    S = e^{G_C} S0 + U^T (e^{G_C - G} K).
    """
    B, T, HV, K = k.shape
    V = v.shape[-1]
    C = min(chunk, T)
    N = -(-T // C)
    missing = N * C - T

    def chunks(x):  # [B, T, HV, ...] -> [B, HV, N, C, ...]; padding has beta = g = 0 and changes nothing
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
        return x.reshape(B, N, C, *x.shape[2:]).movedim(3, 1)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)
    G = g.cumsum(-1)
    lower = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, -math.inf).exp()
    L = ((k * beta[..., None]) @ k.mT * decay).tril(-1)
    right = torch.cat((v, k * G.exp()[..., None]), dim=-1) * beta[..., None]
    system = L + torch.eye(C, dtype=L.dtype, device=L.device)
    X, Y = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split((V, K), dim=-1)
    A = (q @ k.mT) * decay
    q = q * G.exp()[..., None]
    last = G[..., -1:]
    k = k * (last - G).exp()[..., None]
    last = last.exp()[..., None]
    S = v.new_zeros(B, HV, K, V) if state is None else state.mT  # transposed: every product below is then plain
    out = []
    for n in range(N):
        U = X[:, :, n] - Y[:, :, n] @ S
        out.append(q[:, :, n] @ S + A[:, :, n] @ U)
        S = S * last[:, :, n] + k[:, :, n].mT @ U
    o = torch.stack(out, dim=2).movedim(1, 3).reshape(B, N * C, HV, V)
    return o[:, :T], S.mT


class Norm(nn.Module):
    """Root-mean-square norm, times (1 + weight)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight, self.eps)


class DeltaNet(nn.Module):
    """A Gated DeltaNet layer. Its cache holds the last W - 1 inputs of the convolution and the state."""

    def __init__(self, c: dict):
        super().__init__()
        self.H, self.HV = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.K, self.V, self.W = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        self.eps = c["rms_norm_eps"]
        D, keys, values = c["hidden_size"], self.H * self.K, self.HV * self.V
        self.in_proj_qkvz = nn.Linear(D, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(D, 2 * self.HV, bias=False)
        self.conv = nn.Parameter(torch.randn(2 * keys + values, 1, self.W) * self.W**-0.5)
        # Half-lives of 4 to 128 tokens to begin with, spread over the heads; the decay is A softplus(a + dt_bias), A = 1.
        half_life = 4.0 * 32.0 ** torch.linspace(0.0, 1.0, self.HV)
        self.A_log = nn.Parameter(torch.zeros(self.HV))
        self.dt_bias = nn.Parameter(torch.expm1(math.log(2.0) / half_life).log())
        self.norm = nn.Parameter(torch.ones(self.V))
        self.out_proj = nn.Linear(values, D, bias=False)

    def forward(self, x: Tensor, positions: Tensor, cache: dict | None = None) -> Tensor:
        B, T, _ = x.shape
        H, HV, K, V = self.H, self.HV, self.K, self.V
        per_head = self.in_proj_qkvz(x).view(B, T, H, -1)
        q, k, v, z = per_head.split((K, K, HV // H * V, HV // H * V), dim=-1)
        b, a = self.in_proj_ba(x).float().view(B, T, H, -1).chunk(2, dim=-1)
        mixed = torch.cat([part.reshape(B, T, -1) for part in (q, k, v)], dim=-1)
        before = mixed.new_zeros(B, self.W - 1, mixed.shape[-1])
        if cache is not None:
            before = cache.get("conv", before)
        mixed = torch.cat((before, mixed), dim=1)
        if cache is not None:
            cache["conv"] = mixed[:, -(self.W - 1) :]
        weight = self.conv[:, 0].to(mixed.dtype)
        mixed = F.silu(sum(mixed[:, w : w + T] * weight[:, w] for w in range(self.W)))
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = mixed.float().split((H * K, H * K, HV * V), dim=-1)
            q, k = (y.view(B, T, H, K) for y in (q, k))
            q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            q, k = (y.repeat_interleave(HV // H, dim=2) for y in (q * K**-0.5, k))
            g = -self.A_log.float().exp() * F.softplus(a.reshape(B, T, HV) + self.dt_bias.float())
            beta = b.reshape(B, T, HV).sigmoid()
            state = None if cache is None else cache.get("state")
            o, state = delta_chunked(q, k, v.view(B, T, HV, V), g, beta, state)
            if cache is not None:
                cache["state"] = state
            o = F.rms_norm(o, (V,), self.norm.float(), self.eps) * F.silu(z.reshape(B, T, HV, V).float())
        return self.out_proj(o.reshape(B, T, -1).to(x.dtype))


# --- attention, experts, layers ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with normalised queries and keys, rotation of a quarter of each head, and an output gate."""

    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv_heads, self.width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        D = c["hidden_size"]
        self.q_proj = nn.Linear(D, self.heads * self.width * 2, bias=False)
        self.k_proj = nn.Linear(D, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(D, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, D, bias=False)
        self.q_norm, self.k_norm = Norm(self.width, c["rms_norm_eps"]), Norm(self.width, c["rms_norm_eps"])
        rotated = int(self.width * c["partial_rotary_factor"])
        frequencies = c["rope_theta"] ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., T, width], positions [T] or what broadcasts to x's axes before the last."""
        angle = positions[..., None].float() * self.frequencies
        cos, sin = angle.cos(), angle.sin()
        half = self.frequencies.shape[0]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [..., T, D] -> q [..., heads, T, width], k and v [..., heads, T, width] (repeated), gate [..., T, heads * width]."""
        lead = x.shape[:-1]
        q, gate = self.q_proj(x).view(*lead, self.heads, 2 * self.width).chunk(2, dim=-1)
        k = self.k_proj(x).view(*lead, self.kv_heads, self.width)
        v = self.v_proj(x).view(*lead, self.kv_heads, self.width)
        dtype = v.dtype
        q, k, v = self.q_norm(q).transpose(-3, -2), self.k_norm(k).transpose(-3, -2), v.transpose(-3, -2)
        q, k = self.rotate(q, positions).to(dtype), self.rotate(k, positions).to(dtype)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=-3) for y in (k, v))
        return q, k, v, gate.reshape(*lead, -1)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        """o [..., heads, T, width] -> [..., T, D]."""
        o = o.transpose(-3, -2)
        return self.o_proj(o.reshape(*o.shape[:-2], -1) * gate.sigmoid())

    def forward(self, x: Tensor, positions: Tensor, cache: dict | None = None) -> Tensor:
        q, k, v, gate = self.project(x, positions)
        if cache is not None:
            if "k" in cache:
                k, v = torch.cat((cache["k"], k), dim=-2), torch.cat((cache["v"], v), dim=-2)
            cache["k"], cache["v"] = k, v
        if q.shape[-2] == k.shape[-2]:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif q.shape[-2] == 1:
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            raise ValueError(f"{q.shape[-2]} tokens after {k.shape[-2] - q.shape[-2]} cached ones; allowed: 1")
        return self.finish(o, gate)


def draft_attention(q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], rows: Tensor) -> Tensor:
    """Attention of draft nodes: to the base keys up to where their draft began, and to the nodes of their own path.

    q [B, m, heads, R, width]: m nodes for each of R starts; k, v [B, heads, N, width]; own_k, own_v: one tensor shaped
    as q for every node of the path, the querying node included; rows [R]: the last base key that a start sees.
    """
    scale = q.shape[-1] ** -0.5
    base = q @ k[:, None].mT * scale
    hidden = torch.arange(k.shape[-2], device=q.device) > rows[:, None]
    base = base.masked_fill(hidden, -math.inf)
    own = torch.stack([(q * key).sum(-1) for key in own_k], dim=-1) * scale
    weight = torch.cat((base, own), dim=-1).float().softmax(-1).to(v.dtype)
    o = weight[..., : k.shape[-2]] @ v[:, None]
    for j, value in enumerate(own_v):
        o = o + weight[..., k.shape[-2] + j, None] * value
    return o


class Experts(nn.Module):
    """All experts are computed for every token, as one wide gated layer; those outside the top k get weight 0."""

    def __init__(self, c: dict):
        super().__init__()
        D, self.count, self.inner, self.top = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"], c["num_experts_per_tok"]
        shared = c["shared_expert_intermediate_size"]
        self.gate = nn.Linear(D, self.count, bias=False)
        self.gate_proj = nn.Linear(D, self.count * self.inner, bias=False)
        self.up_proj = nn.Linear(D, self.count * self.inner, bias=False)
        self.down_proj = nn.Linear(self.count * self.inner, D, bias=False)
        self.shared_gate_proj, self.shared_up_proj = nn.Linear(D, shared, bias=False), nn.Linear(D, shared, bias=False)
        self.shared_down_proj = nn.Linear(shared, D, bias=False)
        self.shared_expert_gate = nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).float().softmax(-1)
        if self.top < self.count:
            p = p.masked_fill(p < p.topk(self.top, dim=-1).values[..., -1:], 0.0)
        p = p / p.sum(-1, keepdim=True)
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        inner = inner * p.to(inner.dtype).repeat_interleave(self.inner, dim=-1)
        shared = self.shared_down_proj(F.silu(self.shared_gate_proj(x)) * self.shared_up_proj(x))
        return self.down_proj(inner) + self.shared_expert_gate(x).sigmoid() * shared


class Layer(nn.Module):
    def __init__(self, c: dict, attention: bool):
        super().__init__()
        self.input_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.mixer = Attention(c) if attention else DeltaNet(c)
        self.post_attention_layernorm = Norm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = Experts(c)

    def forward(self, x: Tensor, positions: Tensor, cache: dict | None = None) -> Tensor:
        return self.add_experts(x + self.mixer(self.input_layernorm(x), positions, cache))

    def add_experts(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Mtp(nn.Module):
    """The draft layer. A draft that starts at token i reads (embedding of token i+1, hidden state of token i) and gives the
    hidden state that predicts token i+2; the next node reads the embedding of that token and this hidden state, and so on."""

    def __init__(self, c: dict):
        super().__init__()
        D, eps = c["hidden_size"], c["rms_norm_eps"]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(D, eps), Norm(D, eps)
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layer = Layer(c, attention=True)
        self.norm = Norm(D, eps)

    def enter(self, embedding: Tensor, hidden: Tensor, positions: Tensor):
        """-> x [..., D] and what Attention.project makes of it."""
        both = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x = self.fc(both)
        return x, self.layer.mixer.project(self.layer.input_layernorm(x), positions)

    def leave(self, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
        return self.norm(self.layer.add_experts(x + self.layer.mixer.finish(o, gate)))


class Hybrid(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.config = c
        D, layers = c["hidden_size"], c["num_hidden_layers"]
        self.embed_tokens = nn.Embedding(c["vocab_size"], D)
        self.layers = nn.ModuleList(Layer(c, (i + 1) % c["full_attention_interval"] == 0) for i in range(layers))
        self.norm = Norm(D, c["rms_norm_eps"])
        self.lm_head = nn.Linear(D, c["vocab_size"], bias=False)
        self.mtp = Mtp(c)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What is added to the residual stream starts smaller the more layers add to it.
                last = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
                fan = parameter.shape[1]
                std = 0.5 * fan**-0.5 * ((2 * layers) ** -0.5 if last else 1.0)
                nn.init.normal_(parameter, std=0.5 if name.startswith("embed") else std)

    def forward(self, tokens: Tensor, caches: list[dict] | None = None, start: int = 0) -> Tensor:
        """tokens [B, T] -> hidden states after the final norm, [B, T, D]. With caches (one dict a layer, empty at first)
        `start` tokens were read before; then T is 1, or start is 0."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if caches is None else caches[i])
        return self.norm(x)

    def draft_hidden(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of chains of `steps` drafts from every token, fed with the tokens of the text.

        tokens [B, T], hidden [B, T, D] -> for each step k = 1.. a tensor [B, T - 1 - k, D] whose row i predicts token
        i + k + 1. Chain i sees the base keys up to i and its own.
        """
        T = tokens.shape[1]
        embedding = self.embed_tokens(tokens)
        device = tokens.device
        out, own_k, own_v, h = [], [], [], hidden
        for k in range(1, steps + 1):
            n = T - 1 - k
            positions = torch.arange(n, device=device) + (k - 1)
            x, (q, key, value, gate) = self.mtp.enter(embedding[:, k : k + n], h[:, :n], positions)
            if k == 1:
                base_k, base_v = key, value
                o = F.scaled_dot_product_attention(q, key, value, is_causal=True)
            else:
                own_k, own_v = [*own_k, key[:, None]], [*own_v, value[:, None]]
                cut = slice(None, n)
                o = draft_attention(
                    q[:, None], base_k[:, :, cut], base_v[:, :, cut], [y[..., cut, :] for y in own_k],
                    [y[..., cut, :] for y in own_v], torch.arange(n, device=device),
                )[:, 0]  # fmt: skip
            h = self.mtp.leave(x, o, gate)
            out.append(h)
        return out

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> tuple[Tensor, Tensor]:
        """Greedy: prompts [B, P] -> tokens [B, P + new] and the hidden state of each but the last, [B, P + new - 1, D]."""
        caches: list[dict] = [{} for _ in self.layers]
        hidden = [self(prompts, caches)]
        tokens = [prompts]
        for step in range(new):
            tokens.append(self.lm_head(hidden[-1][:, -1:]).argmax(-1))
            if step + 1 < new:
                hidden.append(self(tokens[-1], caches, prompts.shape[1] + step))
        return torch.cat(tokens, dim=1), torch.cat(hidden, dim=1)


# --- checkpoint files --------------------------------------------------------------------------------------------------


def exported(model: Hybrid) -> dict[str, Tensor]:
    """Name in the checkpoint -> the tensor itself (views, so that :func:`load` can write through them)."""
    out: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed_tokens.weight}

    def layer(prefix: str, l: Layer) -> None:
        out[f"{prefix}.input_layernorm.weight"] = l.input_layernorm.weight
        out[f"{prefix}.post_attention_layernorm.weight"] = l.post_attention_layernorm.weight
        m = l.mixer
        if isinstance(m, DeltaNet):
            p = f"{prefix}.linear_attn"
            out.update({f"{p}.{name}.weight": getattr(m, name).weight for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")})
            out.update({f"{p}.conv1d.weight": m.conv, f"{p}.norm.weight": m.norm})
            out.update({f"{p}.A_log": m.A_log, f"{p}.dt_bias": m.dt_bias})
        else:
            names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            out.update({f"{prefix}.self_attn.{name}.weight": getattr(m, name).weight for name in names})
        e, p = l.mlp, f"{prefix}.mlp"
        for i in range(e.count):
            cut = slice(i * e.inner, (i + 1) * e.inner)
            out[f"{p}.experts.{i}.gate_proj.weight"] = e.gate_proj.weight[cut]
            out[f"{p}.experts.{i}.up_proj.weight"] = e.up_proj.weight[cut]
            out[f"{p}.experts.{i}.down_proj.weight"] = e.down_proj.weight[:, cut]
        out[f"{p}.gate.weight"] = e.gate.weight
        out[f"{p}.shared_expert_gate.weight"] = e.shared_expert_gate.weight
        for name in ("gate_proj", "up_proj", "down_proj"):
            out[f"{p}.shared_expert.{name}.weight"] = getattr(e, f"shared_{name}").weight

    for i, l in enumerate(model.layers):
        layer(f"model.layers.{i}", l)
    out["model.norm.weight"] = model.norm.weight
    out["lm_head.weight"] = model.lm_head.weight
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"):
        out[f"mtp.{name}.weight"] = getattr(model.mtp, name).weight
    layer("mtp.layers.0", model.mtp.layer)
    return out


DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The safetensors format: length of the header, header in JSON, the tensors one after the other."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict = {"__metadata__": metadata}
    parts, at = [], 0
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """What :func:`write_safetensors` wrote; other dtypes than bfloat16 and float32 raise KeyError."""
    content = bytearray(Path(path).read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(content[first:last], dtype=torch.uint8).view(DTYPES[entry["dtype"]])
        out[name] = flat.reshape(entry["shape"])
    return out


def save(model: Hybrid, directory: Path, dtype: torch.dtype = torch.bfloat16, metadata: dict[str, str] | None = None) -> Path:
    """Write a directory that SGLang and transformers load: weights in `dtype`, config, tokenizer. Returns the weight file."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {**model.config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"do_sample": False, "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    write_tokenizer(directory)
    path = directory / "model.safetensors"
    write_safetensors(path, {n: t.to(dtype) for n, t in exported(model).items()}, {"format": "pt", **(metadata or {})})
    return path


def load(directory: Path, device: str = "cpu") -> Hybrid:
    """The model in `directory`, in float32. Raises ValueError where a tensor is missing, unknown or of another shape."""
    directory = Path(directory)
    model = Hybrid(json.loads((directory / "config.json").read_text()))
    tensors = read_safetensors(directory / "model.safetensors")
    wanted = exported(model)
    if wrong := sorted(set(wanted) ^ set(tensors)):
        raise ValueError(f"{directory}: tensors missing or unknown: {', '.join(wrong[:5])}")
    with torch.no_grad():
        for name, target in wanted.items():
            if target.shape != tensors[name].shape:
                raise ValueError(f"{directory}: {name} is {tuple(tensors[name].shape)}, wanted {tuple(target.shape)}")
            target.copy_(tensors[name])
    return model.to(device).eval()
