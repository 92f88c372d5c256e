"""A small Qwen3.5 from the small Qwen3-Next: the same layers with the projections laid out as in the public checkpoints.

With experts it computes what the Qwen3-Next computes, so the answers are the same ones. The dense one has another function
per layer (the shared expert is its MLP) and gets a head of its own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Mapping

from treewy_sglang.demo import checkpoint as small

VISION_TOKENS = {"<|vision_start|>": 300, "<|vision_end|>": 301, "<|image_pad|>": 302, "<|video_pad|>": 303}


def text_config(moe: bool) -> dict[str, Any]:
    base = small.model_config()
    keep = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
        "max_position_embeddings linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads full_attention_interval attention_bias attention_dropout mamba_ssm_dtype tie_word_embeddings "
        "bos_token_id eos_token_id pad_token_id torch_dtype initializer_range use_cache"
    ).split()
    config = {name: base[name] for name in keep}
    rotary = int(base["head_dim"] * base["partial_rotary_factor"]) // 2
    config |= {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "attn_output_gate": True,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(base["num_hidden_layers"])],
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": base["partial_rotary_factor"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": base["rope_theta"], "partial_rotary_factor": base["partial_rotary_factor"],
            "mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3], "mrope_interleaved": True,
        },
    }  # fmt: skip
    if moe:
        config |= {n: base[n] for n in ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")}
    else:
        config["intermediate_size"] = base["shared_expert_intermediate_size"]
    return config


def full_config(moe: bool) -> dict[str, Any]:
    """With a vision tower that nothing uses, as the public models have."""
    text = text_config(moe)
    vision = {
        "model_type": "qwen3_5_moe" if moe else "qwen3_5", "depth": 1, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128,
        "out_hidden_size": text["hidden_size"], "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 64, "in_channels": 3, "deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    return {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 302, "video_token_id": 303, "vision_start_token_id": 300, "vision_end_token_id": 301,
        "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": text["eos_token_id"],
    }  # fmt: skip


def convert(weights: Mapping[str, Any], moe: bool) -> dict[str, Any]:
    """Names and layouts of Qwen3.5, text only (prefix "model."), from those of the small Qwen3-Next."""
    import torch

    config = small.model_config()
    H, HV = config["linear_num_key_heads"], config["linear_num_value_heads"]
    K, V, each = config["linear_key_head_dim"], config["linear_value_head_dim"], HV // H
    out: dict[str, Any] = {}
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    for name, w in weights.items():
        if name.endswith("in_proj_qkvz.weight"):  # by key head: q, k, its value heads, their gates
            prefix = name.removesuffix("in_proj_qkvz.weight")
            q, k, v, z = w.view(H, 2 * K + 2 * each * V, -1).split([K, K, each * V, each * V], dim=1)
            out[f"{prefix}in_proj_qkv.weight"] = torch.cat([x.reshape(-1, w.shape[1]) for x in (q, k, v)])
            out[f"{prefix}in_proj_z.weight"] = z.reshape(-1, w.shape[1])
        elif name.endswith("in_proj_ba.weight"):
            prefix = name.removesuffix("in_proj_ba.weight")
            b, a = w.view(H, 2 * each, -1).split([each, each], dim=1)
            out[f"{prefix}in_proj_b.weight"], out[f"{prefix}in_proj_a.weight"] = b.reshape(HV, -1), a.reshape(HV, -1)
        elif ".mlp.experts." in name:
            prefix, rest = name.split("experts.")
            number, matrix, _ = rest.split(".")
            experts.setdefault(prefix, {}).setdefault(int(number), {})[matrix] = w
        elif moe or ".mlp." not in name:
            out[name] = w
        elif ".mlp.shared_expert." in name:
            out[name.replace(".shared_expert.", ".")] = w
    for prefix, found in experts.items() if moe else ():
        ordered = [found[i] for i in sorted(found)]
        out[f"{prefix}experts.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered])
        out[f"{prefix}experts.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return {name: w.contiguous() for name, w in out.items()}


def write(where: Path, moe: bool, source: Path) -> Path:
    """Writes the checkpoint unless it is there; `source`: the small Qwen3-Next checkpoint."""
    from safetensors.torch import load_file, save_file

    if (where / "complete").exists():
        return where
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    weights = convert(load_file(source / "model.safetensors"), moe)
    if not moe:
        # transformers reads the text model alone to fit the head.
        (where / "config.json").write_text(json.dumps({**text_config(moe), "architectures": ["Qwen3_5ForCausalLM"]}))
        save_file({n: w for n, w in weights.items() if not n.startswith("mtp.")}, where / "model.safetensors", metadata={"format": "pt"})
        small.fit(where, weights, text_config(moe)["rms_norm_eps"])
    named = {n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: w for n, w in weights.items()}
    save_file(named, where / "model.safetensors", metadata={"format": "pt"})
    (where / "config.json").write_text(json.dumps(full_config(moe), indent=1))
    small.write_tokenizer(where)
    tokenizer = json.loads((where / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][0], "id": i, "content": s} for s, i in VISION_TOKENS.items()]
    (where / "tokenizer.json").write_text(json.dumps(tokenizer))
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": 16,
        "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (where / "preprocessor_config.json").write_text(json.dumps(images))
    (where / "video_preprocessor_config.json").write_text(json.dumps({**images, "video_processor_type": "Qwen3VLVideoProcessor"}))
    (where / "complete").write_text("\n")
    return where
