"""openPangu configs: spellings, what decides, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.openpangu.models import EMBEDDED, PRO_MOE, PRO_MOE_V2, ULTRA, ULTRA_SINKS, Config

from torpor.errors import ConfigError, OutOfMemoryError
from torpor.model.checkpoints.load import new_model
from torpor.model.config.config import ModelConfig, parse_config
from torpor.model.config.features import MLAConfig, SinkConfig


def parsed(config: Config, **overrides: Any) -> ModelConfig:
    return parse_config({**config, **overrides}, {}, where="config.json")


def test_the_dense_family_has_biases_everywhere_but_in_the_mlp() -> None:
    features = parsed(EMBEDDED).features
    assert (features.qkv_bias, features.o_bias, features.mlp_bias) == (True, True, False)
    assert parsed(EMBEDDED, bias=None, attention_bias=True).features == features
    only = parsed(EMBEDDED, bias=False, qkv_bias=True).features
    assert (only.qkv_bias, only.o_bias) == (True, False)


def test_sinks_decide_the_shape_of_heads() -> None:
    config = parsed(PRO_MOE_V2)
    assert (config.head_dim, config.v_head_dim, config.rope_dim) == (24, 16, 8)
    assert config.features.sinks == SinkConfig(count=16, with_value=True)
    assert config.features.rope_interleaved
    assert config.features.fused_qkv
    assert not parsed(PRO_MOE_V2, rope_interleave=False).features.rope_interleaved
    bare = parsed(PRO_MOE_V2, param_sink_with_value=None)
    assert bare.features.sinks == SinkConfig(count=16, with_value=False)
    assert parsed(PRO_MOE_V2, partial_rotary_factor=8 / 24) == config
    assert parsed(PRO_MOE_V2, head_dim=24) == config


def test_latent_attention_under_both_spellings() -> None:
    config = parsed(ULTRA)
    assert config.features.mla == MLAConfig(
        q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16
    )
    old = ("attention_q_lora_dim", "attention_kv_lora_dim", "attention_qk_dim")
    new = {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12}
    assert parsed(ULTRA, **dict.fromkeys(old), **new) == config
    assert parsed(ULTRA, head_dim=8) == config


def test_experts_under_all_spellings() -> None:
    config = parsed(PRO_MOE_V2)
    moe = config.features.moe
    assert moe is not None
    assert moe.layers == {1, 2}
    assert moe.shared_intermediate_size == 24
    old: dict[str, Any] = {
        "n_routed_experts": None,
        "num_experts": 8,
        "n_shared_experts": None,
        "shared_expert_intermediate_size": 24,
        "first_k_dense_replace": None,
        "mlp_only_layers": [0],
        "num_nextn_predict_layers": None,
        "num_mtp_layers": 1,
    }
    assert parsed(PRO_MOE_V2, **old) == config
    grouped = parsed(PRO_MOE).features.moe
    assert grouped is not None
    assert (grouped.routing, grouped.router_scale, grouped.layers) == ("grouped", True, {0, 1, 2})
    assert parsed(PRO_MOE, mlp_only_layers=[1]).features.moe != grouped


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (EMBEDDED, {"rope_theta": None}, "rope_theta is None; it must be stated"),
        (PRO_MOE, {"rope_theta": None}, "rope_theta"),
        (PRO_MOE_V2, {"rope_theta": None}, "rope_theta"),
        (ULTRA, {"rope_theta": None}, "rope_theta"),
        (EMBEDDED, {"is_causal": False}, "is_causal is False; .*causal attention"),
        (PRO_MOE_V2, {"is_causal": False}, "is_causal is False; .*param_sink_number"),
        (PRO_MOE_V2, {"param_sink_scalar": 4}, "param_sink_scalar is 4"),
        (PRO_MOE_V2, {"param_sink_of_head_num": True}, "param_sink_of_head_num is True"),
        (PRO_MOE_V2, {"param_sink_of_head_dim": True}, "param_sink_of_head_dim is True"),
        (ULTRA_SINKS, {"rope_theta": None}, "rope_theta is None; it must be stated"),
        (ULTRA_SINKS, {"is_causal": False}, "is_causal is False; .*param_sink_number"),
        (EMBEDDED, {"param_sink_scalar": 4}, "param_sink_scalar is 4"),
        (ULTRA, {"router_sliding_window": 3}, "router_sliding_window is 3"),
        (ULTRA, {"dsa_layers": [0]}, "dsa_layers is"),
        (ULTRA, {"swa_layers": [1]}, "swa_layers is"),
        (ULTRA, {"sliding_window_list": [128]}, "sliding_window_list is"),
        (ULTRA, {"block_post_layernorm_idx": [1]}, "block_post_layernorm_idx is"),
        (ULTRA, {"use_mhc": True}, "use_mhc is True"),
        (ULTRA, {"use_mome": True, "router_sliding_window": 3}, "use_mome is True"),
        (ULTRA, {"index_topk": 2048}, "index_topk is 2048"),
        (PRO_MOE_V2, {"qk_nope_dim": None}, "qk_nope_dim is missing"),
        (PRO_MOE_V2, {"qk_rope_dim": 7}, " qk_rope_dim is 7; it must be even"),
        (ULTRA, {"attention_qk_rope_dim": 7}, " attention_qk_rope_dim is 7; it must be even"),
        (PRO_MOE_V2, {"qkv_bias": True}, " qkv_bias is True; it must be false with sinks"),
        (ULTRA, {"qkv_bias": True}, " qkv_bias is True; it must be false with latent"),
        (ULTRA, {"attention_v_dim": None}, " attention_v_dim is missing"),
        (ULTRA_SINKS, {"attention_v_dim": None}, " attention_v_dim is missing"),
        (EMBEDDED, {"num_dense_layers": 1}, " num_dense_layers = 1 is a feature"),
        (PRO_MOE_V2, {"num_mtp_layers": True}, " num_mtp_layers is True"),
        (PRO_MOE_V2, {"num_dense_layers": 1.0}, " num_dense_layers is 1.0"),
        (PRO_MOE_V2, {"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]; .*first_k_dense"),
        (PRO_MOE_V2, {"n_routed_experts": 10**7}, "n_routed_experts is 10000000; .* to 4096"),
        (PRO_MOE, {"num_experts": 4097}, " num_experts is 4097; .* to 4096"),
        (EMBEDDED, {"num_mtp_layers": 2**31 - 1}, " num_mtp_layers is 2147483647; .* to 4096"),
        (PRO_MOE_V2, {"v_channels": None}, "v_channels is missing"),
        (PRO_MOE_V2, {"head_dim": 16}, "head_dim is 16; it must be .*24"),
        (PRO_MOE_V2, {"bias": True}, " bias is True"),
        (PRO_MOE_V2, {"attention_bias": True}, " attention_bias is True"),
        (PRO_MOE_V2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (ULTRA, {"bias": True}, " bias is True"),
        (PRO_MOE_V2, {"param_sink_number": 0}, "param_sink_number is 0; it must be above 0"),
        (PRO_MOE_V2, {"param_sink_number": None}, "param_sink_number is None; .*v_channels"),
        (PRO_MOE, {"num_experts": 0}, " num_experts is 0"),
        (PRO_MOE, {"num_experts": None}, " num_experts is missing"),
        (EMBEDDED, {"num_mtp_layers": "x"}, " num_mtp_layers is 'x'"),
        (ULTRA_SINKS, {"param_sink_with_value": None}, "param_sink_with_value is None"),
        (ULTRA, {"kv_lora_rank": 25}, "attention_kv_lora_dim is 24; .*kv_lora_rank, 25"),
        (PRO_MOE_V2, {"num_experts": 9}, "num_experts is 9; .*n_routed_experts, 8"),
        (PRO_MOE_V2, {"first_k_dense_replace": 4}, "first_k_dense_replace is 4"),
        (PRO_MOE_V2, {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
        (PRO_MOE_V2, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (PRO_MOE_V2, {"n_group": 4}, "n_group is 4"),
        (PRO_MOE_V2, {"shared_expert_intermediate_size": 25}, "shared_expert_intermediate_size"),
        (PRO_MOE, {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; .*divisor"),
        (EMBEDDED, {"interleaved_sliding_window": [4, 0]}, "interleaved_sliding_window"),
        (EMBEDDED, {"interleaved_sliding_window": "4"}, "interleaved_sliding_window"),
        (EMBEDDED, {"interleaved_sliding_window": 2**63}, "interleaved_sliding_window is 92"),
        (EMBEDDED, {"interleaved_sliding_window": [4, 2**31]}, "interleaved_sliding_window is"),
        (EMBEDDED, {"interleaved_sliding_window": True}, "interleaved_sliding_window is True"),
        (EMBEDDED, {"hidden_act": "gelu"}, "hidden_act"),
        (EMBEDDED, {"model_type": "llama"}, "model_type"),
    ],
)
def test_what_torpor_does_not_run_is_refused_by_name(
    config: Config, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(config, **overrides)


def test_the_mixture_of_2025_and_the_one_that_bears_its_name() -> None:
    alone = parsed(PRO_MOE).features.moe
    assert alone is not None
    assert alone.routing == "grouped"
    named = parsed(PRO_MOE_V2, architectures=["PanguProMoEForCausalLM"])
    assert named.features == parsed(PRO_MOE_V2).features


def test_two_fields_for_layers_without_experts_may_say_the_same() -> None:
    moe = parsed(PRO_MOE_V2).features.moe
    for same in ({"mlp_only_layers": [0]}, {"mlp_only_layers": []}):
        assert parsed(PRO_MOE_V2, **same).features.moe == moe
    assert parsed(PRO_MOE_V2, first_k_dense_replace=None, mlp_only_layers=[0]).features.moe == moe


@pytest.mark.parametrize("size", ["param_sink_number", "v_channels"])
def test_buffers_that_there_is_no_memory_for_are_refused(size: str) -> None:
    config = parsed(PRO_MOE_V2, **{size: 2**31 - 1, "param_sink_with_value": False})
    with pytest.raises(OutOfMemoryError, match=r"config\.json ask for buffers"):
        new_model(config, torch.float32)
