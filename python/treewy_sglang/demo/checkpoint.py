"""Make a small Qwen3-Next checkpoint from a seed: no download, no training run, some seconds.

The model is a real hybrid (Gated DeltaNet layers and one full-attention layer in four, sparse experts, an MTP layer,
float32 safetensors with the weight names of the public checkpoints) and is only small. Its layers are random and stay
so; what is fitted, in closed form or nearly, are two matrices that read them:

- the head, a logistic regression of the next byte of TEXT on the hidden states. The text it writes is a kind of
  English, does not fall into a short cycle and depends on the whole context, so a wrong state changes it at once;
- the MTP layer's fc, a least-squares map from the newest embedding and the hidden state before it to the next hidden
  state. Its drafts are often right and often wrong, so accepted paths of every length occur.

Run as a module: python -m treewy_sglang.demo.checkpoint DIRECTORY
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Mapping

# What the head is fitted to.
TEXT = """\
A draft is a guess at what comes next. The server reads many guesses at once and keeps the ones that the large model \
would have written by itself. If a guess is wrong, the work behind it is thrown away, and the text does not change. \
That is all there is to it: the answer is the same, and it comes sooner.
Most layers of a hybrid model do not look back at every token. They carry a small matrix from one step to the next, \
and each new token turns that matrix a little. Such a state is cheap to keep but hard to rewind. When ten branches of \
a tree are checked together, ten states would have to be stored, one for every branch, and the memory of the machine \
fills up with copies that nobody will read again.
There is a better way. The change that each token makes is one outer product, a key and a value. Write down the key, \
the value and the decay of each node, and solve one small triangular system for the whole tree. The output of every \
node follows from the state before the tree and from the few vectors on its own path. When the winner is known, its \
path is added to the state, once, and the rest of the notes are forgotten.
How far can this go? A wide tree costs a few more vectors, where it used to cost a few more matrices. So the drafts may \
be longer, the batch may be larger, or the same card may serve more people. The quick brown fox jumps over the lazy dog \
while five wizards mix a dozen liquid jugs of zinc; "why not," asks Dr. Jekyll, and (having 24 + 36 = 60 in hand, or \
7 * 8 = 56, or 1,905.) he leaves.
"""

SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def model_config(layers: int = 4, hidden: int = 128) -> dict:
    """config.json in the form of the public Qwen3-Next checkpoints; transformers and SGLang both read it."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 320,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": SPECIAL["<|endoftext|>"],
        "eos_token_id": SPECIAL["<|im_end|>"],
        "pad_token_id": SPECIAL["<|endoftext|>"],
        "mamba_ssm_dtype": "float32",
        "num_nextn_predict_layers": 1,
        "torch_dtype": "float32",
    }


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins that byte-level tokenizers use, in byte order."""
    keep = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, extra = {}, 0
    for byte in range(256):
        if byte in keep:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return [table[byte] for byte in range(256)]


def write_tokenizer(path: Path) -> None:
    """One token a byte: token id = byte value, so that any text goes in and comes out unchanged."""
    added = [
        {"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for s, i in SPECIAL.items()
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {c: i for i, c in enumerate(byte_alphabet())}, "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def make_weights(config: dict, seed: int = 0, context: float = 0.35, draft_noise: float = 0.1) -> dict:
    """All tensors of the checkpoint, the fitted ones still empty. `context` scales what the layers add to the embedding,
    `draft_noise` what the layer of the MTP adds to its fc."""
    import torch

    gen = torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0):
        return torch.randn(*shape, generator=gen, dtype=torch.float64) * std

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    H, HV = config["linear_num_key_heads"], config["linear_num_value_heads"]
    K, V, W = config["linear_key_head_dim"], config["linear_value_head_dim"], config["linear_conv_kernel_dim"]
    weights = {}

    weights["model.embed_tokens.weight"] = normal(vocab, hidden)
    weights["lm_head.weight"] = torch.zeros(vocab, hidden)

    def experts(prefix, scale):
        inner, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
        # A decided router: experts near a tie would turn rounding into a jump.
        weights[f"{prefix}.gate.weight"] = normal(config["num_experts"], hidden, std=4.0 / math.sqrt(hidden))
        for name, width in [(f"experts.{e}", inner) for e in range(config["num_experts"])] + [("shared_expert", shared)]:
            weights[f"{prefix}.{name}.gate_proj.weight"] = normal(width, hidden, std=1.5 / math.sqrt(hidden))
            weights[f"{prefix}.{name}.up_proj.weight"] = normal(width, hidden, std=1.5 / math.sqrt(hidden))
            weights[f"{prefix}.{name}.down_proj.weight"] = normal(hidden, width, std=scale / math.sqrt(width))
        weights[f"{prefix}.shared_expert_gate.weight"] = normal(1, hidden, std=1.0 / math.sqrt(hidden))

    def norms(prefix, *names):
        for name in names:
            weights[f"{prefix}.{name}.weight"] = normal(hidden, std=0.05)  # x * (1 + weight)

    def attention(prefix, scale):
        # queries come with their gate: twice the heads
        weights[f"{prefix}.q_proj.weight"] = normal(heads * head_dim * 2, hidden, std=1.0 / math.sqrt(hidden))
        weights[f"{prefix}.k_proj.weight"] = normal(kv_heads * head_dim, hidden, std=1.0 / math.sqrt(hidden))
        weights[f"{prefix}.v_proj.weight"] = normal(kv_heads * head_dim, hidden, std=1.0 / math.sqrt(hidden))
        weights[f"{prefix}.o_proj.weight"] = normal(hidden, heads * head_dim, std=scale / math.sqrt(heads * head_dim))
        weights[f"{prefix}.q_norm.weight"] = normal(head_dim, std=0.05)
        weights[f"{prefix}.k_norm.weight"] = normal(head_dim, std=0.05)

    def delta_net(prefix, scale):
        conv = 2 * H * K + HV * V
        weights[f"{prefix}.in_proj_qkvz.weight"] = normal(2 * (H * K + HV * V), hidden, std=1.5 / math.sqrt(hidden))
        weights[f"{prefix}.in_proj_ba.weight"] = normal(2 * HV, hidden, std=1.0 / math.sqrt(hidden))
        weights[f"{prefix}.conv1d.weight"] = normal(conv, 1, W, std=0.6)
        # Decays of real checkpoints: heads that forget within a few tokens beside heads that keep hundreds.
        weights[f"{prefix}.A_log"] = torch.linspace(-1.0, 2.5, HV, dtype=torch.float64) + normal(HV, std=0.1)
        weights[f"{prefix}.dt_bias"] = torch.linspace(-3.0, -6.0, HV, dtype=torch.float64) + normal(HV, std=0.1)
        weights[f"{prefix}.norm.weight"] = 1.0 + normal(V, std=0.05)
        weights[f"{prefix}.out_proj.weight"] = normal(hidden, HV * V, std=scale / math.sqrt(HV * V))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms(prefix, "input_layernorm", "post_attention_layernorm")
        if (layer + 1) % config["full_attention_interval"] == 0:
            attention(f"{prefix}.self_attn", context)
        else:
            delta_net(f"{prefix}.linear_attn", context)
        experts(f"{prefix}.mlp", 0.5 * context)
    weights["model.norm.weight"] = torch.zeros(hidden, dtype=torch.float64)

    # MTP: x = fc [norm(embedding of the newest token), norm(hidden of the one before)], one attention layer, norm.
    norms("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    weights["mtp.fc.weight"] = torch.zeros(hidden, 2 * hidden)
    norms("mtp.layers.0", "input_layernorm", "post_attention_layernorm")
    attention("mtp.layers.0.self_attn", draft_noise)
    experts("mtp.layers.0.mlp", draft_noise)
    weights["mtp.norm.weight"] = torch.zeros(hidden, dtype=torch.float64)
    return {name: tensor.to(torch.float32).contiguous() for name, tensor in weights.items()}


def fit(directory: Path, weights: dict, eps: float) -> None:
    """Fill in lm_head.weight and mtp.fc.weight from one pass of the random layers over TEXT."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(list(TEXT.encode())) % len(weights["lm_head.weight"])  # for vocabularies below a byte
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0].double()

    head = torch.zeros(weights["lm_head.weight"].shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([head], max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(hidden[:-1] @ head.T, tokens[1:])
        value = value + 1e-4 * head.square().sum(dim=0).mean()
        value.backward()
        return value

    optimizer.step(loss)
    weights["lm_head.weight"] = head.detach().float().contiguous()

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weights[f"mtp.{name}.weight"].double())

    embedding = norm(weights["model.embed_tokens.weight"].double()[tokens[1:]], "pre_fc_norm_embedding")
    x = torch.cat((embedding, norm(hidden[:-1], "pre_fc_norm_hidden")), dim=1)
    ridge = 1e-2 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    weights["mtp.fc.weight"] = torch.linalg.solve(x.T @ x + ridge, x.T @ hidden[1:]).T.float().contiguous()


def make_checkpoint(
    path: str | os.PathLike, seed: int = 0, layers: int = 4, changes: Mapping[str, Any] | None = None, **scales
) -> Path:
    """Write the checkpoint to `path` unless the same one is there already; a half-written one never stays. `changes`:
    other values for entries of config.json. With a vocabulary below 256 serve it with --skip-tokenizer-init."""
    from safetensors.torch import save_file

    path = Path(path)
    config = {**model_config(layers=layers), **(changes or {})}
    key = hashlib.sha256(Path(__file__).read_bytes() + json.dumps([config, seed, scales], sort_keys=True).encode())
    stamp = path / "made-by-treewy.txt"
    if stamp.exists() and stamp.read_text().strip() == key.hexdigest():
        return path
    if path.exists() and not stamp.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} exists and was not made by this tool; give an empty or a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        weights = make_weights(config, seed=seed, **scales)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        index = {"metadata": {"total_size": sum(t.numel() * 4 for t in weights.values())},
                 "weight_map": {name: "model.safetensors" for name in weights}}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (temporary / "config.json").write_text(json.dumps(config, indent=1))
        generation = {"do_sample": False, "eos_token_id": config["eos_token_id"],
                      "pad_token_id": config["pad_token_id"]}
        (temporary / "generation_config.json").write_text(json.dumps(generation, indent=1))
        write_tokenizer(temporary)
        fit(temporary, weights, config["rms_norm_eps"])
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / stamp.name).write_text(key.hexdigest() + "\n")
        temporary.chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def trained_checkpoint() -> Path | None:
    """The trained checkpoint beside this file, where this copy of the package holds one (bench/checkpoint makes it)."""
    path = Path(__file__).parent / "trained"
    return path if (path / "model.safetensors").exists() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a small seeded Qwen3-Next checkpoint.")
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4, help="multiple of 4; three in four are Gated DeltaNet layers")
    args = parser.parse_args(argv)
    if args.layers % 4 or args.layers < 4:
        parser.error(f"--layers is {args.layers}; allowed: 4, 8, 12, ...")
    path = make_checkpoint(args.directory, seed=args.seed, layers=args.layers)
    size = sum(f.stat().st_size for f in path.iterdir())
    print(f"{path}: {args.layers} layers, seed {args.seed}, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
