"""A checkpoint without weights: config.json and tokenizer of given dimensions, for `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path

from treewy_sglang.demo.checkpoint import SPECIAL, byte_alphabet, model_config, write_tokenizer
from treewy_sglang.planner import Model, load


def dummy_config(model: Model, layers: int | None = None) -> dict:
    """config.json of a text-only model with these dimensions: Qwen3-Next with experts, Qwen3.5 where every layer is dense.
    layers: fewer than the model has, in fours."""
    interval = model.layers // model.attention_layers
    config = {
        **model_config(),
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp_width or 4 * model.hidden,
        "num_hidden_layers": layers or model.layers,
        "full_attention_interval": interval,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "linear_conv_kernel_dim": model.conv_width,
        "linear_key_head_dim": model.key_dim,
        "linear_value_head_dim": model.value_dim,
        "linear_num_key_heads": model.key_heads,
        "linear_num_value_heads": model.value_heads,
        "max_position_embeddings": model.context_length,
        "mamba_ssm_dtype": model.state_dtype,
        "torch_dtype": model.dtype,
    }
    if model.experts:
        config.update(
            num_experts=model.experts,
            num_experts_per_tok={512: 10}.get(model.experts, 8),
            moe_intermediate_size=model.expert_width,
            shared_expert_intermediate_size=model.shared_expert_width,
        )
    else:
        # SGLang's Qwen3-Next has experts in every layer; its text-only Qwen3.5 takes dense ones.
        for key in [
            k
            for k in config
            if "expert" in k
            or k.startswith(("moe_", "router_"))
            or k in ("mlp_only_layers", "decoder_sparse_step", "output_router_logits", "norm_topk_prob")
        ]:
            del config[key]
        config.update(
            architectures=["Qwen3_5ForCausalLM"],
            model_type="qwen3_5_text",
            attn_output_gate=True,
            mtp_num_hidden_layers=1,
        )
        config["layer_types"] = [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(config["num_hidden_layers"])
        ]
        config["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": 0.25,
        }
    return config


def write_dummy(path: Path, dims: str, layers: int | None = None) -> Path:
    """Write the folder unless it is there; the tokenizer has the model's whole vocabulary, so that random prompts differ."""
    model = load(dims)
    config = dummy_config(model, layers)
    done = path / "config.json"
    if done.is_file() and json.loads(done.read_text()) == config:
        return path
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    # Ids of bytes and special tokens stay; every other id gets a word of its own.
    vocabulary = {c: i for i, c in enumerate(byte_alphabet())}
    special = set(SPECIAL.values())
    vocabulary.update({f"w{i:x}": i for i in range(256, model.vocabulary) if i not in special})
    tokenizer["model"]["vocab"] = vocabulary
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    done.write_text(json.dumps(config, indent=1))  # last: it says that the folder is whole
    return path
