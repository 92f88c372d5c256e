"""The dimensions that a model's memory depends on: built in for five public checkpoints, or read from a config.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

from .errors import PlanError, refuse

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """Whole-model numbers, before tensor parallelism. Widths are in channels."""

    name: str
    source: str  # where the numbers are from
    linear_layers: int  # Gated DeltaNet
    attention_layers: int
    hidden: int
    vocabulary: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    key_heads: int  # H
    value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    conv_width: int
    experts: int  # 0: dense MLP everywhere
    expert_width: int
    shared_expert_width: int
    mlp_width: int  # of dense layers
    dense_layers: int  # layers without experts, when there are experts
    mtp_layers: int
    output_gate: bool = True  # the attention's query projection also makes its output gate
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    state_dtype: str = "float32"  # SGLang's default where the checkpoint says nothing
    weights_dtype: Optional[str] = None  # None: as dtype
    context_length: int = 262144

    @property
    def layers(self) -> int:
        return self.linear_layers + self.attention_layers

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def _delta_net(self) -> int:
        values = self.value_heads * self.value_dim
        projections = self.hidden * (self.conv_channels + values + 2 * self.value_heads)  # q k v, z, and b a
        return (
            projections
            + self.conv_channels * self.conv_width
            + 2 * self.value_heads
            + self.value_dim
            + values * self.hidden
        )

    def _attention(self) -> int:
        heads, kv = self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (heads * (3 if self.output_gate else 2) + 2 * kv) + 2 * self.head_dim

    def _mlp(self, sparse: bool) -> int:
        if not sparse:
            return 3 * self.hidden * self.mlp_width
        shared = 3 * self.hidden * self.shared_expert_width + self.hidden if self.shared_expert_width else 0
        return self.experts * (3 * self.hidden * self.expert_width + self.hidden) + shared

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding and of the head."""
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Of the language model, without vision tower and without MTP layers."""
        dense = self.dense_layers if self.experts else self.layers
        mlp = dense * self._mlp(False) + (self.layers - dense) * self._mlp(True)
        norms = (2 * self.layers + 1) * self.hidden
        mixers = self.linear_layers * self._delta_net() + self.attention_layers * self._attention()
        return self.embeddings + mixers + mlp + norms

    @property
    def mtp_parameters(self) -> int:
        """Of the MTP layers, without the embedding and head that they share with the target."""
        if not self.mtp_layers:
            return 0
        layer = self._attention() + self._mlp(bool(self.experts)) + 2 * self.hidden
        return self.mtp_layers * layer + 2 * self.hidden * self.hidden + 3 * self.hidden


def _qwen(name: str, layers: int, **dimensions: Any) -> Model:
    """Three Gated DeltaNet layers, then one of gated attention; heads of 256 there, of 128 in the linear layers."""
    known = dict(
        source=f"https://huggingface.co/Qwen/{name}/blob/main/config.json",
        linear_layers=layers - layers // 4, attention_layers=layers // 4, vocabulary=248320, kv_heads=2, head_dim=256,
        key_heads=16, key_dim=128, value_dim=128, conv_width=4, mlp_width=0, dense_layers=0, mtp_layers=1,
    )  # fmt: skip
    return Model(name=name, **{**known, **dimensions})


# Each set is the (text) config of the checkpoint that `source` names. All of them were read from public files that quote
# that config, and agree with the published sizes: total parameters (tests), and states of 90 MiB and 30 MiB in bfloat16.
BUILT_IN = {
    model.name: model
    for model in (
        _qwen("Qwen3.5-35B-A3B", 40, hidden=2048, attention_heads=16, value_heads=32,
              experts=256, expert_width=512, shared_expert_width=512),
        _qwen("Qwen3.5-122B-A10B", 48, hidden=3072, attention_heads=32, value_heads=64,
              experts=256, expert_width=1024, shared_expert_width=1024),
        _qwen("Qwen3.5-397B-A17B", 60, hidden=4096, attention_heads=32, value_heads=64,
              experts=512, expert_width=1024, shared_expert_width=1024),
        # Also the defaults of transformers' Qwen3NextConfig, which says that they are this checkpoint's.
        _qwen("Qwen3-Next-80B-A3B", 48, hidden=2048, attention_heads=16, value_heads=32, vocabulary=151936,
              experts=512, expert_width=512, shared_expert_width=512,
              source="https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json"),
        _qwen("Qwen3.6-27B", 64, hidden=5120, attention_heads=24, value_heads=48, kv_heads=4,
              experts=0, expert_width=0, shared_expert_width=0, mlp_width=17408),
    )
}  # fmt: skip


def size(name: str) -> str:
    """The part of a name that says how many parameters there are, and how many of them are active."""
    return re.search(r"\d+B(-A\d+B)?$", name).group()


def aliases() -> dict[str, str]:
    """Lower-case name -> built-in set: its full name, with the organisation, its size, its size without active part."""
    return {
        alias.lower(): name
        for name in BUILT_IN
        for alias in (name, "Qwen/" + name, size(name), size(name).partition("-")[0])
    }


def load(what: str) -> Model:
    """A built-in set by name (any case), a config.json, or a directory that holds one."""
    name = aliases().get(what.lower())
    if name is not None:
        return BUILT_IN[name]
    path = Path(what).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        known = ", ".join(f"{name} ({size(name)})" for name in BUILT_IN)
        raise refuse("--model", repr(what), f"a config.json, a directory with one, or one of {known}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"--model is {str(path)!r}, which cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"--model is {str(path)!r}, whose JSON is a {type(config).__name__}; allowed: an object")
    return from_config(config, str(path))


REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
OPTIONAL = (
    "num_key_value_heads", "head_dim", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
    "intermediate_size", "full_attention_interval", "decoder_sparse_step", "mtp_num_hidden_layers",
    "num_nextn_predict_layers", "max_position_embeddings",
)  # fmt: skip
# What a config says of its quantisation -> bytes of a weight. Other methods need --weights-dtype.
QUANTISED = {"fp8": "fp8", "compressed-tensors": None, "awq": "int4", "gptq": None}


def from_config(config: Mapping[str, Any], where: str = "config.json") -> Model:
    """A model from the object of a config.json (Qwen3-Next, or Qwen3.5 with its nested text_config)."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise PlanError(f"--model {where}: text_config is {text!r}; allowed: an object")
    missing = [key for key in REQUIRED if text.get(key) is None]
    if missing:
        raise PlanError(
            f"--model {where}: {', '.join(missing)} missing; allowed: the config.json of a Gated DeltaNet hybrid "
            "(Qwen3-Next, Qwen3.5), which holds them"
        )
    for key in (*REQUIRED, *OPTIONAL):
        value, least = text.get(key), 1 if key in REQUIRED else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise PlanError(f"--model {where}: {key} is {value!r}; allowed: an integer from {least}")

    layers = text["num_hidden_layers"]
    interval, types = text.get("full_attention_interval"), text.get("layer_types")
    if interval:
        attention = layers // interval
    elif isinstance(types, list) and len(types) == layers:
        attention = sum(kind == "full_attention" for kind in types)
    else:
        raise PlanError(
            f"--model {where}: full_attention_interval is {interval!r} and layer_types {types!r}; allowed: an interval "
            f"from 1, or a list of {layers} types"
        )
    experts = text.get("num_experts") or 0
    if experts and not text.get("moe_intermediate_size"):
        raise PlanError(f"--model {where}: moe_intermediate_size missing beside num_experts {experts}")
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
    dense_layers = sum(i in dense or (i + 1) % step != 0 for i in range(layers)) if experts else 0
    if (dense_layers or not experts) and not text.get("intermediate_size"):
        raise PlanError(f"--model {where}: intermediate_size missing, and not every layer has experts")

    dtype = (
        text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    )
    if dtype not in STATE_DTYPES:
        raise PlanError(f"--model {where}: torch_dtype is {dtype!r}; allowed: {', '.join(STATE_DTYPES)}")
    state_dtype = text.get("mamba_ssm_dtype") or "float32"
    if state_dtype not in STATE_DTYPES:
        raise PlanError(f"--model {where}: mamba_ssm_dtype is {state_dtype!r}; allowed: {', '.join(STATE_DTYPES)}")
    quantisation = config.get("quantization_config") or text.get("quantization_config")
    weights_dtype = None
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        weights_dtype = QUANTISED.get(method) or "unknown"
    mtp = text.get("mtp_num_hidden_layers", text.get("num_nextn_predict_layers"))
    return Model(
        name=where,
        source=where,
        linear_layers=layers - attention,
        attention_layers=attention,
        hidden=text["hidden_size"],
        vocabulary=text["vocab_size"],
        attention_heads=text["num_attention_heads"],
        kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        head_dim=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        key_heads=text["linear_num_key_heads"],
        value_heads=text["linear_num_value_heads"],
        key_dim=text["linear_key_head_dim"],
        value_dim=text["linear_value_head_dim"],
        conv_width=text["linear_conv_kernel_dim"],
        experts=experts,
        expert_width=text.get("moe_intermediate_size") or 0,
        shared_expert_width=text.get("shared_expert_intermediate_size") or 0 if experts else 0,
        mlp_width=text.get("intermediate_size") or 0,
        dense_layers=dense_layers,
        mtp_layers=1 if mtp is None else mtp,  # SGLang reads one when the config does not count them
        output_gate=bool(text.get("attn_output_gate", True)),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        dtype=dtype,
        state_dtype=state_dtype,
        weights_dtype=weights_dtype,
        context_length=text.get("max_position_embeddings") or 262144,
    )
