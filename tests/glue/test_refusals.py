"""Everything --enable-treewy refuses, each provoked: the sentence names the value and ends with the way out."""

from types import SimpleNamespace

import pytest
import torch

from treewy_sglang.sglang import config
from treewy_sglang.sglang.config import GDNShape, TreeWYRefused, refusal_of_settings, refusal_of_shape

QWEN = GDNShape(
    layers=36, key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4, activation="silu"
)  # Qwen3-Next


def settings(**changes):
    values = dict(
        enable_linear_replayssm=False,
        enable_linear_replayssm_spec=False,
        speculative_algorithm="EAGLE",
        max_speculative_num_draft_tokens=16,
        disaggregation_mode="null",
        enable_unified_memory=False,
        enable_page_major_kv_layout=False,
        pp_size=1,
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        device="cpu",
        enable_torch_compile=False,
        speculative_adaptive=False,
        speculative_num_draft_tokens=16,
        disable_cuda_graph=False,
        speculative_num_steps=5,
        speculative_eagle_topk=8,
        mamba_ssm_dtype=None,
        tp_size=1,
    )
    assert set(changes) <= set(values)
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("nodes", [1, 4, 128])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_settings_that_are_served(algorithm, device, nodes, dtype):
    args = settings(
        speculative_algorithm=algorithm,
        device=device,
        max_speculative_num_draft_tokens=nodes,
        mamba_ssm_dtype=dtype,
    )
    assert refusal_of_settings(args) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(enable_linear_replayssm=True), ("--enable-linear-replayssm ", "drop")),
        (dict(enable_linear_replayssm_spec=True), ("--enable-linear-replayssm-spec", "drop")),
        (dict(speculative_algorithm=None), ("no", "--speculative-algorithm NEXTN")),
        *(
            (dict(speculative_algorithm=name), (name, "use --speculative-algorithm EAGLE"))
            for name in ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK", "FROZEN_KV_MTP")
        ),
        (dict(max_speculative_num_draft_tokens=129), ("129", "128", "--speculative-num-draft-tokens")),
        (dict(max_speculative_num_draft_tokens=201, speculative_num_steps=200, speculative_eagle_topk=1), ("201", "--speculative-num-steps")),
        (dict(max_speculative_num_draft_tokens=0, speculative_num_steps=-1, speculative_eagle_topk=1), ("-1 draft steps",)),
        (dict(max_speculative_num_draft_tokens=0), ("0 nodes", "1 to 128")),
        (dict(max_speculative_num_draft_tokens=-3), ("-3 nodes", "1 to 128")),
        (dict(speculative_num_steps=0), ("0 draft steps", "--speculative-num-steps 1")),
        (dict(speculative_num_steps=None), ("--speculative-num-steps 1",)),
        (dict(speculative_eagle_topk=0), ("--speculative-eagle-topk is 0", "1 for a chain")),
        (dict(speculative_eagle_topk=2, speculative_num_steps=3, max_speculative_num_draft_tokens=12), ("propose 10", "12 nodes", "to 11")),
        (dict(speculative_eagle_topk=1, speculative_num_steps=3, max_speculative_num_draft_tokens=5), ("propose 3", "to 4")),
        (dict(tp_size=2), ("--tp-size 2", "drop")),
        (dict(disaggregation_mode="prefill"), ("--disaggregation-mode prefill", "one server")),
        (dict(disaggregation_mode="decode"), ("--disaggregation-mode decode", "one server")),
        (dict(enable_unified_memory=True), ("--enable-unified-memory", "drop")),
        (dict(enable_page_major_kv_layout=True), ("--enable-page-major-kv-layout", "drop")),
        (dict(pp_size=2), ("--pp-size 2", "--tp-size")),
        (dict(enable_two_batch_overlap=True), ("--enable-two-batch-overlap", "drop")),
        (dict(enable_pdmux=True), ("--enable-pdmux", "drop")),
        *((dict(device=name), (name, "--device cuda")) for name in ("npu", "xpu", "hpu", "musa")),
        (dict(speculative_adaptive=True), ("--speculative-adaptive", "drop")),
        (dict(enable_torch_compile=True), ("--enable-torch-compile", "drop")),
        (dict(mamba_ssm_dtype="float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")),
    ],
)
def test_settings_that_are_refused(changes, words):
    reason = refusal_of_settings(settings(**changes))
    assert reason is not None
    for word in words:
        assert word in reason, reason
    assert reason.endswith(".") and reason.count(". ") == 0, f"one sentence: {reason}"


@pytest.mark.parametrize("topk, steps, nodes", [(1, 3, 4), (2, 3, 11), (8, 1, 9), (4, 3, 16)])
def test_drafts_as_wide_as_their_candidates_are_served(topk, steps, nodes):
    given = dict(speculative_eagle_topk=topk, speculative_num_steps=steps, max_speculative_num_draft_tokens=nodes)
    assert refusal_of_settings(settings(**given)) is None


def test_ngram_needs_no_steps():
    args = settings(speculative_algorithm="NGRAM", speculative_num_steps=None, speculative_eagle_topk=None)
    assert refusal_of_settings(args) is None


@pytest.mark.parametrize(
    "device, given, kept", [("cpu", "xgrammar", "none"), ("cpu", "llguidance", "llguidance"), ("cuda", "xgrammar", "xgrammar")]
)
def test_grammar_backend(device, given, kept):
    """xgrammar pins its masks, so on CPU the first grammar request would end the server."""
    args = SimpleNamespace(device=device, grammar_backend=given)
    config.keep_grammars_off_cpu(args)
    assert args.grammar_backend == kept


def test_adaptive_step_counts_are_served_on_cuda():
    adaptive = dict(speculative_adaptive=True, device="cuda", max_speculative_num_draft_tokens=8)
    assert refusal_of_settings(settings(**adaptive, speculative_num_draft_tokens=8)) is None
    refusal = refusal_of_settings(settings(**adaptive, speculative_num_draft_tokens=4))
    assert "room for the 4" in refusal and "--speculative-num-steps 7 --speculative-num-draft-tokens 8" in refusal
    assert refusal_of_settings(settings(**adaptive, speculative_num_draft_tokens=4, disable_cuda_graph=True)) is None


def test_hip_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "hip" in refusal_of_settings(settings(device="cuda"))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_that_are_served(dim, dtype):
    shape = GDNShape(**{**vars(QWEN), "key_dim": dim, "value_dim": dim})
    assert refusal_of_shape(shape, dtype, attn_tp_size=4) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(layers=0), ("no Gated DeltaNet layers",)),
        (dict(key_dim=96, value_dim=96), ("K=96", "64, 128, 256")),
        (dict(key_dim=64), ("K=64", "V=128")),
        (dict(value_heads=24), ("24", "16", "multiple")),
        (dict(conv_width=5), ("width 5", "2..4")),
        (dict(conv_width=1), ("width 1", "2..4")),
        (dict(activation="gelu"), ("'gelu'", "silu")),
    ],
)
def test_shapes_that_are_refused(changes, words):
    reason = refusal_of_shape(GDNShape(**{**vars(QWEN), **changes}), torch.bfloat16)
    assert reason is not None
    for word in words:
        assert word in reason, reason
    assert "without --enable-treewy" in reason


def test_ranks_and_dtypes_that_are_refused():
    assert "5 ranks" in refusal_of_shape(QWEN, torch.bfloat16, attn_tp_size=5)
    assert "--tp-size" in refusal_of_shape(QWEN, torch.bfloat16, attn_tp_size=32)
    assert "--dtype" in refusal_of_shape(QWEN, torch.float64)


def test_attention_group_size():
    args = SimpleNamespace(tp_size=8, dp_size=4, enable_dp_attention=True, attn_cp_size=1)
    assert config.attn_tp_size(args) == 2
    args.enable_dp_attention = False
    assert config.attn_tp_size(args) == 8


def model_config(hf_config):
    return SimpleNamespace(hf_config=hf_config, linear_attn_registry_result=None, is_draft_model=False)


def test_model_without_gdn_layers_is_refused():
    from transformers import LlamaConfig

    with pytest.raises(TreeWYRefused, match="no linear layers and not Gated DeltaNet.*without --enable-treewy"):
        config.gdn_shape(model_config(LlamaConfig()))


def test_kda_and_mamba2_models_are_refused():
    from sglang.srt.configs import FalconH1Config, KimiLinearConfig

    with pytest.raises(TreeWYRefused, match="KDA"):
        config.gdn_shape(model_config(KimiLinearConfig()))
    falcon = FalconH1Config()
    falcon.architectures = ["FalconH1ForCausalLM"]
    with pytest.raises(TreeWYRefused, match="FalconH1ForCausalLM"):
        config.gdn_shape(model_config(falcon))


def test_qwen3_next_and_qwen3_5_shapes_are_read():
    from sglang.srt.configs import Qwen3_5Config, Qwen3NextConfig

    interval = dict(full_attention_interval=4)
    for hf_config in (Qwen3NextConfig(**interval), Qwen3_5Config(text_config=interval)):
        shape = config.gdn_shape(model_config(hf_config))
        assert refusal_of_shape(shape, torch.bfloat16) is None, shape
        assert shape.layers > 0 and shape.value_heads % shape.key_heads == 0


def test_conv_state_is_kept_in_the_model_dtype(monkeypatch):
    name = "SGLANG_MAMBA_CONV_DTYPE"
    monkeypatch.setenv(name, "bfloat16")
    reason = config.keep_conv_state_in_model_dtype(torch.float32)
    assert name in reason and "unset" in reason
    assert config.keep_conv_state_in_model_dtype(torch.bfloat16) is None
    monkeypatch.delenv(name)
    assert config.keep_conv_state_in_model_dtype(torch.float32) is None
    import os

    assert os.environ[name] == "float32"


def test_validate_asks_for_the_stamp_first(monkeypatch):
    def refuse():
        raise RuntimeError("not patched")

    monkeypatch.setattr(config, "require_stamp", refuse)
    with pytest.raises(RuntimeError, match="not patched"):
        config.validate(settings(speculative_algorithm=None))


def test_validate_refuses_with_the_flag_named(monkeypatch):
    monkeypatch.setattr(config, "require_stamp", lambda: None)
    with pytest.raises(TreeWYRefused, match="^--enable-treewy: .*129"):
        config.validate(settings(max_speculative_num_draft_tokens=129))
