"""Configs of both styles are understood; anything that could change the logits is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.model.helpers import MISTRAL, QWEN2, QWEN3, QWEN3_MOE, TINY

from torpor.errors import ConfigError
from torpor.model.config.config import ModelConfig, RopeConfig, load_config, parse_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def parsed(**overrides: Any) -> ModelConfig:
    return parse_config({**TINY, **overrides}, {}, where="config.json")


def test_sizes_and_defaults() -> None:
    config = parsed(num_key_value_heads=None)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 4, 8)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "float32")
    assert config.rope == RopeConfig(theta=10000.0)
    features = config.features
    assert not any((features.qkv_bias, features.o_bias, features.mlp_bias, features.qk_norm))
    assert features.windows == (None, None)
    assert features.moe is None


def test_head_dim_may_differ_from_the_even_split() -> None:
    assert parsed(head_dim=10).head_dim == 10
    assert parsed(hidden_size=33, head_dim=10).hidden_size == 33


@pytest.mark.parametrize(
    ("style", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": None}, RopeConfig(theta=10000.0)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=10000.0, kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
            RopeConfig(theta=10000.0, kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=10000.0, kind="llama3", **LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
            RopeConfig(theta=10000.0, kind="llama3", **LLAMA3),
        ),
    ],
)
def test_rope_of_both_styles(style: dict[str, Any], rope: RopeConfig) -> None:
    assert parsed(**style).rope == rope


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {name} is missing"):
        parsed(**{name: None})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is unknown.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": []}, r"architectures is \[\]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"hidden_size": 30}, "hidden_size is 30; it must be a multiple of 4"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "type is 'mrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default"}}, "the same as type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor is 1.0; it must be above 1.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale = 1.0"),
        (
            {"rope_theta": 10.0, "rope_parameters": {"rope_theta": 20.0}},
            "rope_theta is 20.0; it must be the same as the config's rope_theta, 10.0",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling is .* absent",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_value(
    overrides: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(**overrides)


SLIDING = {"use_sliding_window": True, "sliding_window": 8}
FULL = "full_attention"
SLIDE = "sliding_attention"


@pytest.mark.parametrize("family", [MISTRAL, QWEN2, QWEN3, QWEN3_MOE])
@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; it must be '(mistral|qwen2|qwen3)"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type is 'dynamic'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": "8"}, "sliding_window is '8'"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ],
)
def test_every_family_names_what_it_cannot_use(
    family: Mapping[str, Any], overrides: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(**{**family, **overrides})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({**MISTRAL, "attention_bias": True}, "attention_bias = True"),
        ({**MISTRAL, "use_sliding_window": True}, "use_sliding_window = True"),
        ({**MISTRAL, "layer_types": [FULL, SLIDE]}, "layer_types = "),
        ({**QWEN2, "attention_bias": True}, "attention_bias = True"),
        ({**QWEN2, "use_sliding_window": 1}, "use_sliding_window is 1"),
        ({**QWEN2, **SLIDING, "layer_types": [SLIDE]}, "one entry for each of 2"),
        ({**QWEN2, **SLIDING, "layer_types": SLIDE}, "one entry for each of 2"),
        ({**QWEN2, **SLIDING, "layer_types": [SLIDE, "linear"]}, "layer_types is .*'linear'"),
        ({**QWEN2, "layer_types": [SLIDE, FULL]}, "layer_types is .* unless use_sliding_window"),
        ({**QWEN3, "head_dim": 9}, "head_dim is 9; it must be even"),
        ({**QWEN3, "attention_bias": "no"}, "attention_bias is 'no'"),
        ({**QWEN3, "num_experts": 4}, "num_experts = 4"),
        ({**QWEN3, "max_window_layers": -1}, "max_window_layers is -1"),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts is missing"),
        ({**QWEN3_MOE, "num_local_experts": 8}, "num_local_experts is 8; .* num_experts, 4"),
        ({**QWEN3_MOE, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; .* from 1 to 4"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({**QWEN3_MOE, "mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]; .* from 0 to 1"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob is 1"),
        (
            {**QWEN3_MOE, "shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size = 8",
        ),
        (
            {**QWEN3_MOE, **SLIDING, "max_window_layers": 1},
            "max_window_layers is 1; .* absent or 0",
        ),
        ({**QWEN3_MOE, **SLIDING, "layer_types": [FULL, SLIDE]}, "layer_types = "),
    ],
)
def test_what_one_family_cannot_use_is_named(overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(**overrides)


@pytest.mark.parametrize("family", [MISTRAL, QWEN2, QWEN3, QWEN3_MOE])
def test_key_value_heads_must_be_stated_outside_llama(family: Mapping[str, Any]) -> None:
    assert parsed(**{**family, "num_key_value_heads": None}).num_key_value_heads == 4
    values = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        parse_config({**values, **family}, {}, where="config.json")


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**QWEN2, "sliding_window": 8}, (None, None)),
        ({**QWEN2, **SLIDING}, (None, None)),
        ({**QWEN2, **SLIDING, "max_window_layers": 1}, (None, 8)),
        ({**QWEN2, **SLIDING, "max_window_layers": 0}, (8, 8)),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        ({**QWEN3, **SLIDING, "sliding_window": None, "max_window_layers": 0}, (None, None)),
        ({**QWEN3, **SLIDING, "layer_types": [SLIDE, FULL]}, (8, None)),
        ({**QWEN3, "layer_types": [FULL, FULL], "max_window_layers": 0}, (None, None)),
        ({**QWEN3_MOE, "sliding_window": 8, "max_window_layers": 1}, (None, None)),
        ({**QWEN3_MOE, **SLIDING}, (8, 8)),
    ],
)
def test_windows_of_each_layer(overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parsed(**overrides).features.windows == windows


def test_features_of_each_family() -> None:
    def features(**overrides: Any) -> tuple[bool, bool, bool, int]:
        config = parsed(**overrides)
        found = config.features
        return found.qkv_bias, found.o_bias, found.qk_norm, config.head_dim

    assert features(**MISTRAL) == (False, False, False, 8)
    assert features(**MISTRAL, head_dim=12) == (False, False, False, 12)
    assert features(**QWEN2) == (True, False, False, 8)
    assert features(**QWEN3) == (False, False, True, 128)
    assert features(**QWEN3, attention_bias=True, head_dim=12) == (True, True, True, 12)
    assert features(**QWEN3_MOE) == (False, False, True, 8)
    assert features(attention_bias=True) == (True, True, False, 8)


def test_experts_and_the_layers_that_have_them() -> None:
    def layers(**overrides: Any) -> set[int]:
        moe = parsed(**{**QWEN3_MOE, "num_hidden_layers": 6, **overrides}).features.moe
        assert moe is not None
        return set(moe.layers)

    moe = parsed(**QWEN3_MOE).features.moe
    assert moe is not None
    assert (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size) == (4, 2, 24)
    assert not moe.norm_topk_prob
    assert parsed(**{**QWEN3_MOE, "num_experts": None, "num_local_experts": 4}).features.moe == moe
    assert layers() == {0, 1, 2, 3, 4, 5}
    assert layers(decoder_sparse_step=2) == {1, 3, 5}
    assert layers(mlp_only_layers=[0, 5]) == {1, 2, 3, 4}
    assert layers(decoder_sparse_step=3, mlp_only_layers=[2]) == {5}
    assert (
        parsed(**QWEN3_MOE, output_router_logits=True, router_aux_loss_coef=0.001).features.moe
        == moe
    )


def test_switched_off_and_harmless_fields_are_accepted() -> None:
    config = parsed(
        rope_interleaved=False,
        sliding_window=None,
        pretraining_tp=1,
        use_cache=True,
        transformers_version="5.0.0",
        rope_scaling=None,
        partial_rotary_factor=1.0,
        _name_or_path="somewhere",
        temperature=0.7,
    )
    assert config == parsed()


def test_the_generation_config_decides_where_generation_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert load_config(tmp_path).eos_token_ids == (2,)
    generation = tmp_path / "generation_config.json"
    for value, expected in [(5, (5,)), ([7, 5, 7], (7, 5)), (None, (2,))]:
        generation.write_text(json.dumps({"eos_token_id": value, "temperature": 0.6}))
        assert load_config(tmp_path).eos_token_ids == expected
    generation.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json .*eos_token_id is '</s>'"):
        load_config(tmp_path)
    generation.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not UTF-8"):
        load_config(tmp_path)


def test_both_dtype_spellings_are_read() -> None:
    assert parsed(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parsed(dtype="float16", torch_dtype="float32").dtype == "float16"


def test_a_damaged_config_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\x80\x81")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 32')
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)
