"""Refuses at start what TreeWY cannot serve: every reason is one sentence that ends with the way out.

`validate` runs at the end of SGLang's argument resolution, before any weight is loaded, so a wrong shape is never
found at the first request.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Mapping, Optional

import torch

from treewy_sglang.sglang import float32
from treewy_sglang.sizes import CONV_WIDTHS, HEAD_DIMS, MAX_NODES

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ALGORITHMS = ("EAGLE", "NGRAM")  # NEXTN is resolved to EAGLE by SGLang


@dataclass(frozen=True)
class GDNShape:
    """What a model's Gated DeltaNet layers look like, before tensor parallelism."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    activation: str


class TreeWYRefused(ValueError):
    """--enable-treewy was given with something it cannot serve."""


def refusal_of_settings(args: Any) -> Optional[str]:
    """The first reason, found in the server arguments alone, not to start; None when there is none."""
    if args.enable_linear_replayssm or args.enable_linear_replayssm_spec:
        flag = "--enable-linear-replayssm-spec" if args.enable_linear_replayssm_spec else "--enable-linear-replayssm"
        return f"both keep what a draft leaves behind, so drop {flag} or --enable-treewy."
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return "it verifies drafts and there are none: add --speculative-algorithm NEXTN or NGRAM, or drop the flag."
    if algorithm not in ALGORITHMS:
        return f"it does not verify drafts of {algorithm} yet: use --speculative-algorithm EAGLE, NEXTN or NGRAM."
    nodes = args.max_speculative_num_draft_tokens
    if algorithm == "EAGLE" and not args.speculative_adaptive:
        steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
        if steps is None or steps < 1:
            return f"{steps} draft steps draft nothing: give --speculative-num-steps 1 or more."
        if topk is None or topk < 1:
            return f"--speculative-eagle-topk is {topk}: give 1 for a chain, more for a tree."
    if nodes is not None and nodes < 1:
        return f"a draft of {nodes} nodes holds not even its root: give --speculative-num-draft-tokens 1 to {MAX_NODES}."
    if nodes is not None and nodes > MAX_NODES:
        # Of a chain SGLang takes the number of steps and overwrites the number of nodes.
        chain = algorithm == "EAGLE" and args.speculative_eagle_topk == 1
        knob = "--speculative-num-steps" if chain else "--speculative-num-draft-tokens"
        return f"a draft of {nodes} nodes is above its {MAX_NODES}: lower {knob}."
    if algorithm == "EAGLE" and not args.speculative_adaptive:
        # The first step proposes topk tokens, every further one topk for each of the topk best so far.
        proposed = topk + (steps - 1) * topk**2
        if nodes is not None and nodes - 1 > proposed:
            return (
                f"{steps} steps with topk {topk} propose {proposed} tokens, too few for a draft of {nodes} nodes: lower "
                f"--speculative-num-draft-tokens to {proposed + 1} or raise --speculative-num-steps."
            )
    if args.disaggregation_mode != "null":
        return (
            f"--disaggregation-mode {args.disaggregation_mode} builds pools of its own: serve prefill and decode from "
            "one server (drop the mode)."
        )
    if args.enable_unified_memory:
        return "--enable-unified-memory moves state slots while drafts are in flight: drop it."
    if args.enable_page_major_kv_layout:
        return "--enable-page-major-kv-layout lays the state pool out by page: drop it."
    if args.pp_size > 1:
        return f"speculation does not run with --pp-size {args.pp_size}: use --tp-size instead."
    if args.enable_two_batch_overlap:
        return "the two halves of --enable-two-batch-overlap would share stash rows: drop it."
    if args.enable_pdmux:
        return "--enable-pdmux verifies on several attention backends at once: drop it."
    device = str(args.device).split(":")[0]
    if device not in ("cuda", "cpu") or (device == "cuda" and torch.version.hip is not None):
        name = "hip" if device == "cuda" else device
        return f"it has no operators for {name}: use --device cuda on an NVIDIA GPU, or --device cpu."
    if device == "cpu" and args.tp_size > 1:
        return f"its CPU operators serve one process and not --tp-size {args.tp_size}: drop it."
    if device == "cpu" and args.enable_torch_compile:
        return "the compiled CPU graphs have no buffers for draft trees: drop --enable-torch-compile."
    if device == "cpu" and args.speculative_adaptive:
        return "adaptive step counts keep a CUDA graph each: drop --speculative-adaptive on --device cpu."
    first = args.speculative_num_draft_tokens
    if args.speculative_adaptive and not args.disable_cuda_graph and None not in (first, nodes) and first < nodes:
        # SGLang sizes the logits that its graphs share for the first number of steps, and asserts when it captures more.
        return (
            f"with --speculative-adaptive drafts grow to {nodes} nodes, and SGLang's CUDA graphs have room for the {first} it "
            f"starts with: start with --speculative-num-steps {nodes - 1} --speculative-num-draft-tokens {nodes}."
        )
    if args.mamba_ssm_dtype is not None and args.mamba_ssm_dtype not in DTYPES.values():
        return (
            f"--mamba-ssm-dtype {args.mamba_ssm_dtype} is not a state dtype it knows: use float32, bfloat16 or float16."
        )
    return None


def refusal_of_shape(shape: GDNShape, dtype: torch.dtype, attn_tp_size: int = 1) -> Optional[str]:
    """The first reason, found in the model's Gated DeltaNet layers, not to start; None when there is none."""
    out = "serve this model without --enable-treewy."
    if shape.layers == 0:
        return f"this model has no Gated DeltaNet layers: {out}"
    if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
        return (
            f"head dimensions K={shape.key_dim}, V={shape.value_dim} are not equal and one of 64, 128, 256: {out}"
        )
    if shape.value_heads % shape.key_heads:
        return f"{shape.value_heads} value heads are not a multiple of {shape.key_heads} key heads: {out}"
    if shape.key_heads % attn_tp_size:
        return (
            f"{shape.key_heads} key heads do not split over {attn_tp_size} ranks: choose --tp-size so that they do."
        )
    if shape.conv_width not in CONV_WIDTHS:
        return f"a convolution of width {shape.conv_width} is outside 2..4: {out}"
    if shape.activation not in ("silu", "swish"):
        return f"the convolution's activation is {shape.activation!r} and not silu: {out}"
    if dtype not in DTYPES:
        return f"activations in {dtype} are not supported: use --dtype float32, bfloat16 or float16."
    return None


def refusal_of_float32(device: str, dtype: torch.dtype, environ: Optional[Mapping[str, str]] = None) -> Optional[str]:
    """Why a server on `device` would start with float32 activations and end at its first request; None if it would not."""
    if device != "cuda" or dtype != torch.float32 or float32.wanted(os.environ if environ is None else environ):
        return None
    return (
        "SGLang's CUDA kernels for hybrids take no float32: use --dtype bfloat16 or float16 (TREEWY_FLOAT32=1 in the "
        "environment serves float32 slowly, to compare answers)."
    )


def gdn_shape(model_config: Any) -> GDNShape:
    """The Gated DeltaNet layers of an SGLang model config; refuses the model when it has none."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, kimi_linear_config, mambaish_config

    config = hybrid_gdn_config(model_config)
    if config is None or not hasattr(config, "linear_num_value_heads"):
        if kimi_linear_config(model_config) is not None:
            kind = "KDA layers, whose gate is one per channel"
        elif mambaish_config(model_config) is not None:
            kind = f"linear layers of {model_config.hf_config.architectures[0]}"
        else:
            kind = "no linear layers"
        raise TreeWYRefused(
            f"--enable-treewy: this model has {kind} and not Gated DeltaNet layers: serve it without --enable-treewy."
        )
    return GDNShape(
        layers=len(config.linear_layer_ids),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        activation=config.hidden_act,
    )


def attn_tp_size(args: Any) -> int:
    size = args.tp_size // max(getattr(args, "attn_cp_size", 1) or 1, 1)
    return size // args.dp_size if args.enable_dp_attention else size


def keep_conv_state_in_model_dtype(dtype: torch.dtype) -> Optional[str]:
    """A draft node's raw convolution input is stored as it was born, so the pool must keep it in that dtype too."""
    from sglang.srt.environ import envs

    field, name = envs.SGLANG_MAMBA_CONV_DTYPE, DTYPES[dtype]
    if field.is_set() and field.get() != name:
        return (
            f"SGLANG_MAMBA_CONV_DTYPE={field.get()} differs from the model's {name}: unset it (--enable-treewy then "
            f"keeps the convolution state in {name})."
        )
    field.set(name)
    return None


def require(reason: Optional[str]) -> None:
    if reason is not None:
        raise TreeWYRefused(f"--enable-treewy: {reason}")


def require_stamp() -> None:
    """The running SGLang carries this package's patches, whole and unmodified."""
    from pathlib import Path

    import sglang

    from treewy_sglang import patching

    patching.verify_installed(Path(sglang.__file__).resolve().parent)


def keep_grammars_off_cpu(server_args: Any) -> None:
    """SGLang's xgrammar backend pins its masks, which ends a server without a CUDA driver at the first grammar request.

    Without a backend such a request is answered with an error, and the server goes on.
    """
    if str(server_args.device).startswith("cpu") and server_args.grammar_backend == "xgrammar":
        server_args.grammar_backend = "none"
        logger.warning("Grammar-constrained output needs CUDA with xgrammar: --device cpu serves with --grammar-backend none.")


def validate(server_args: Any, view: Any = None) -> None:
    """Raise TreeWYRefused unless TreeWY can serve these arguments and this model. `view`: resolved arguments."""
    view = server_args if view is None else view
    require_stamp()
    require(refusal_of_settings(view))
    model_config = server_args.get_model_config()
    require(refusal_of_shape(gdn_shape(model_config), model_config.dtype, attn_tp_size(view)))
    require(refusal_of_float32(str(view.device).split(":")[0], model_config.dtype))
    require(keep_conv_state_in_model_dtype(model_config.dtype))
    keep_grammars_off_cpu(server_args)
    if view.linear_attn_verify_backend is not None:
        logger.warning(
            "--linear-attn-verify-backend %s has no effect with --enable-treewy.", view.linear_attn_verify_backend
        )
