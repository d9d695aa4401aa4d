"""Tiny random openPangu models, written as the published ones are: names, fusions and dtypes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

COMMON: Config = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 16000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
EMBEDDED: Config = {
    **COMMON,
    "architectures": ["PanguEmbeddedForCausalLM"],
    "model_type": "PanguEmbedded",
    "num_key_value_heads": 2,
    "bias": True,
}
PRO_MOE: Config = {
    **COMMON,
    "architectures": ["PanguProMoEForCausalLM"],
    "model_type": "PanguProMoE",
    "num_key_value_heads": 2,
    "bias": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
_SIGMOID: Config = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sandwich_norm": True,
    "num_nextn_predict_layers": 1,
}
PRO_MOE_V2: Config = {
    **COMMON,
    **_SIGMOID,
    "architectures": ["PanguProMoEV2ForCausalLM"],
    "model_type": "PanguProMoE",
    "num_key_value_heads": 2,
    "qk_nope_dim": 16,
    "qk_rope_dim": 8,
    "v_channels": 16,
    "param_sink_number": 16,
    "param_sink_with_value": True,
    "router_enable_expert_bias": True,
    "rope_theta": 10000.0,
}
ULTRA: Config = {
    **COMMON,
    **_SIGMOID,
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "num_key_value_heads": 8,
    "attention_q_lora_dim": 20,
    "attention_kv_lora_dim": 24,
    "attention_qk_dim": 12,
    "attention_qk_rope_dim": 8,
    "attention_v_dim": 16,
    "rope_theta": 25600000.0,
}
ULTRA_SINKS: Config = {**ULTRA, "param_sink_number": 16, "param_sink_with_value": True}
ZERO_VALUES: Config = {"param_sink_with_value": False}

MODELS: Mapping[str, Config] = {
    "embedded": EMBEDDED,
    "embedded, tied": {**EMBEDDED, "tie_word_embeddings": True},
    "embedded, windows": {**EMBEDDED, "interleaved_sliding_window": [5, 9]},
    "pro moe": PRO_MOE,
    "pro moe v2": PRO_MOE_V2,
    "pro moe v2, zero values": {**PRO_MOE_V2, **ZERO_VALUES},
    "pro moe v2, windows": {**PRO_MOE_V2, "interleaved_sliding_window": [5, 9]},
    "pro moe v2, 128 sinks": {**PRO_MOE_V2, "param_sink_number": 128},
    "ultra": ULTRA,
    "ultra, direct queries": {**ULTRA, "attention_q_lora_dim": None},
    "ultra, sinks": ULTRA_SINKS,
    "ultra, zero latents": {**ULTRA_SINKS, **ZERO_VALUES},
}
"""By what is said of them in test ids."""

FLOAT32 = ("e_score_correction_bias", "inv_freq")
"""Endings of names that are stored in float32; everything else is bfloat16."""


def names_of_today(config: Config) -> Config:
    """The config as the reference reads it."""
    renamed = {
        "attention_q_lora_dim": "q_lora_rank",
        "attention_kv_lora_dim": "kv_lora_rank",
        "attention_qk_dim": "qk_nope_head_dim",
        "attention_qk_rope_dim": "qk_rope_head_dim",
        "attention_v_dim": "v_head_dim",
    }
    return {renamed.get(name, name): value for name, value in config.items()}


def shapes(config: Config) -> Shapes:
    """Every tensor of a published checkpoint, those that are to be skipped included."""
    c = names_of_today(config)
    vocab, width, layers = c["vocab_size"], c["hidden_size"], c["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocab, width)
    for layer in range(layers + c.get("num_nextn_predict_layers", 0)):
        p = f"model.layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        if c.get("sandwich_norm"):
            norms += ["pre_mlp_layernorm", "post_mlp_layernorm"]
        for name in norms:
            yield f"{p}{name}.weight", (width,)
        yield from _attention(c, f"{p}self_attn.")
        experts = c.get("n_routed_experts") or c.get("num_experts")
        if experts and layer >= c.get("first_k_dense_replace", 0):
            yield from _experts(c, f"{p}mlp.", experts)
        else:
            yield from _mlp(f"{p}mlp.", width, c["intermediate_size"])
        if layer >= layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{p}{name}.weight", (width,)
            yield f"{p}eh_proj.weight", (width, 2 * width)
            for name in ("embed_tokens", "shared_head.head"):
                yield f"{p}{name}.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, width)


def _attention(c: Config, p: str) -> Shapes:
    if c.get("kv_lora_rank"):
        yield from _latent(c, p)
        return
    width, heads, groups = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    if sinks := c.get("param_sink_number"):
        k_dim, v_dim = c["qk_nope_dim"] + c["qk_rope_dim"], c["v_channels"]
        yield f"{p}qkv_proj.weight", (heads * k_dim + groups * (k_dim + v_dim), width)
        yield f"{p}k_layernorm.weight", (k_dim,)
        yield f"{p}param_sink_key", (sinks, groups, k_dim)
        if c["param_sink_with_value"]:
            yield f"{p}param_sink_value", (sinks, groups, v_dim)
        yield f"{p}o_proj.weight", (width, heads * v_dim)
        return
    dim = width // heads
    for name, rows in (("q_proj", heads * dim), ("k_proj", groups * dim), ("v_proj", groups * dim)):
        yield f"{p}{name}.weight", (rows, width)
        yield f"{p}{name}.bias", (rows,)
    yield f"{p}o_proj.weight", (width, heads * dim)
    yield f"{p}o_proj.bias", (width,)
    yield f"{p}rotary_emb.inv_freq", (dim // 2,)


def _latent(c: Config, p: str) -> Shapes:
    width, heads, rank, rope = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["kv_lora_rank"],
        c["qk_rope_head_dim"],
    )
    q_width = heads * (c["qk_nope_head_dim"] + rope)
    if q_rank := c.get("q_lora_rank"):
        yield f"{p}q_a_proj.weight", (q_rank, width)
        yield f"{p}q_a_layernorm.weight", (q_rank,)
        yield f"{p}q_b_proj.weight", (q_width, q_rank)
    else:
        yield f"{p}q_proj.weight", (q_width, width)
    yield f"{p}kv_a_proj_with_mqa.weight", (rank + rope, width)
    yield f"{p}kv_a_layernorm.weight", (rank,)
    yield f"{p}kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
    if sinks := c.get("param_sink_number"):
        if c["param_sink_with_value"]:
            yield f"{p}param_sink_compressed_kv", (sinks, rank)
        yield f"{p}param_sink_k_pe", (sinks, rope)
    yield f"{p}o_proj.weight", (width, heads * c["v_head_dim"])


def _mlp(p: str, width: int, inner: int) -> Shapes:
    yield f"{p}gate_proj.weight", (inner, width)
    yield f"{p}up_proj.weight", (inner, width)
    yield f"{p}down_proj.weight", (width, inner)


def _experts(c: Config, p: str, experts: int) -> Shapes:
    width, inner = c["hidden_size"], c["moe_intermediate_size"]
    yield f"{p}gate.weight", (experts, width)
    for expert in range(experts):
        yield from _mlp(f"{p}experts.{expert}.", width, inner)
    if c["architectures"] == ["PanguProMoEForCausalLM"]:
        yield f"{p}router_scale", (1, experts)
        yield from _mlp(f"{p}shared_expert.", width, c["shared_expert_intermediate_size"])
        return
    if c.get("router_enable_expert_bias"):
        yield f"{p}e_score_correction_bias", (experts,)
    yield from _mlp(f"{p}shared_experts.", width, c["n_shared_experts"] * inner)


def tensors(config: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights. Large enough that every part of the model counts in the logits."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(config):
        values = torch.randn(shape, generator=random)
        if "norm" in name or "router_scale" in name:
            values = 1 + 0.2 * values
        elif "param_sink" not in name:
            values = values * (0.5 if name.endswith("bias") else 1.5 * shape[-1] ** -0.5)
        dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
        made[name] = values.to(dtype)
    return made


def write_model(folder: Path, config: Config, seed: int = 0) -> Path:
    """A model folder with config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(config, seed), folder / "model.safetensors")
    return folder
