"""Dimensions: the built-in sets against what is published of them, and config.json files in all their forms."""

import json

import pytest

from treewy_sglang.planner import BUILT_IN, PlanError, from_config, load
from treewy_sglang.planner.models import REQUIRED, aliases, size

CONFIG = {
    "model_type": "qwen3_next", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
    "full_attention_interval": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
    "mamba_ssm_dtype": "float32", "torch_dtype": "bfloat16", "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize("model", BUILT_IN.values(), ids=lambda m: m.name)
def test_a_built_in_set_adds_up_to_the_size_in_its_name(model):
    total = int(size(model.name).partition("B")[0])
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.015)
    assert model.source.startswith("https://huggingface.co/Qwen/" + model.name)
    assert (model.key_heads, model.key_dim, model.value_dim, model.conv_width) == (16, 128, 128, 4)
    assert model.linear_layers == 3 * model.attention_layers


@pytest.mark.parametrize("model", [m for m in BUILT_IN.values() if m.experts], ids=lambda m: m.name)
def test_active_parameters_are_those_in_the_name(model):
    active = int(size(model.name).rpartition("-A")[2][:-1])
    picked = {256: 8, 512: 10}[model.experts]
    idle = model.layers * (model.experts - picked) * 3 * model.hidden * model.expert_width
    # Whether a name counts embedding and head differs by series.
    assert (model.parameters - idle - model.embeddings) / 1e9 < active * 1.1
    assert (model.parameters - idle) / 1e9 > active * 0.9


def test_names_are_found_whatever_their_case():
    for alias, name in aliases().items():
        assert load(alias.upper()).name == load(alias).name == name
    assert len(set(aliases())) == 4 * len(BUILT_IN) - 1  # 27B has no active part, so its two sizes are one
    assert load("397B-A17B").name == load("397b").name == load("Qwen/Qwen3.5-397B-A17B").name == "Qwen3.5-397B-A17B"


def test_transformers_defaults_are_the_next_80b():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig().to_dict()
    found, known = from_config({**config, "full_attention_interval": 4}), BUILT_IN["Qwen3-Next-80B-A3B"]
    for field in known.__dataclass_fields__:
        if field not in ("name", "source", "mlp_width", "context_length", "dtype"):
            assert getattr(found, field) == getattr(known, field), field


def test_file_directory_and_nested_text_config_are_the_same_model(tmp_path):
    flat = from_config(CONFIG)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": CONFIG}))
    for where in (tmp_path, tmp_path / "config.json"):
        found = load(str(where))
        assert {**vars(found), "name": "", "source": ""} == {**vars(flat), "name": "", "source": ""}
    assert (flat.linear_layers, flat.attention_layers, flat.conv_channels) == (6, 2, 1024)


def test_layer_types_stand_in_for_an_interval():
    types = ["linear_attention"] * 5 + ["full_attention"] * 3
    config = {k: v for k, v in CONFIG.items() if k != "full_attention_interval"}
    assert from_config({**config, "layer_types": types}).attention_layers == 3


def test_dense_layers_among_experts():
    assert from_config({**CONFIG, "mlp_only_layers": [0, 7]}).dense_layers == 2
    assert from_config({**CONFIG, "decoder_sparse_step": 2}).dense_layers == 4
    more = from_config({**CONFIG, "mlp_only_layers": [0]}).parameters - from_config(CONFIG).parameters
    assert more == 3 * 128 * 256 - (4 * (3 * 128 * 64 + 128) + 3 * 128 * 64 + 128)


def test_parameters_of_the_demo_checkpoint_are_counted_exactly():
    pytest.importorskip("torch")
    from treewy_sglang.demo.checkpoint import make_weights, model_config

    config = model_config()
    model, weights = from_config(config), make_weights(config, seed=0)
    counts = {name: weight.numel() for name, weight in weights.items()}
    counts.setdefault("lm_head.weight", config["vocab_size"] * config["hidden_size"])
    mtp = sum(count for name, count in counts.items() if name.startswith("mtp."))
    assert model.mtp_parameters == mtp
    assert model.parameters == sum(counts.values()) - mtp


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    with pytest.raises(PlanError, match=f"{key} missing"):
        from_config({k: v for k, v in CONFIG.items() if k != key})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": "128"}, "hidden_size is '128'; allowed: an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed"),
        ({"num_experts": -1}, "num_experts is -1; allowed"),
        ({"full_attention_interval": None}, "full_attention_interval is None and layer_types None; allowed"),
        ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype is 'int8'; allowed: float32"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'; allowed: float32"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size missing"),
        ({"num_experts": 0, "intermediate_size": None}, "intermediate_size missing"),
        ({"text_config": 3}, "text_config is 3; allowed"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(changes, words):
    with pytest.raises(PlanError) as refused:
        from_config({**CONFIG, **changes})
    assert words in str(refused.value)


def test_files_that_are_no_config(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, words in (("broken.json", "cannot be read"), ("list.json", "a list"), ("none", "35B-A3B")):
        with pytest.raises(PlanError, match=words):
            load(str(tmp_path / name))
