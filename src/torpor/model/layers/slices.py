"""Which checkpoint name fills which rows of which parameter.

Checkpoints hold one tensor for each projection and each expert; torpor holds fewer and larger
parameters, whose rows are those tensors one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torpor.model.config.config import ModelConfig
from torpor.model.config.features import MoEConfig
from torpor.sleep.source import SliceTable, WeightSlice


def slice_table(config: ModelConfig) -> SliceTable:
    """Every Hugging Face checkpoint name of a model, in layer order."""
    features = config.features
    slices = [_whole("model.embed_tokens.weight")]
    ignored = ["model.rotary_emb.inv_freq"]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        slices.append(_whole(f"{prefix}input_layernorm.weight"))
        attention = _attention if features.mla is None else _latent_attention
        slices.extend(attention(config, f"{prefix}self_attn."))
        slices.append(_whole(f"{prefix}post_attention_layernorm.weight"))
        if features.sandwich_norm:
            slices.append(_whole(f"{prefix}pre_mlp_layernorm.weight"))
        if features.moe is not None and layer in features.moe.layers:
            slices.extend(_experts(features.moe, config.hidden_size, f"{prefix}mlp."))
        else:
            inner, bias = config.intermediate_size, features.mlp_bias
            slices.extend(_mlp(f"{prefix}mlp.", f"{prefix}mlp.", inner, bias=bias))
        if features.sandwich_norm:
            slices.append(_whole(f"{prefix}post_mlp_layernorm.weight"))
        ignored.append(f"{prefix}self_attn.rotary_emb.inv_freq")
    slices.append(_whole("model.norm.weight"))
    if config.tie_word_embeddings:
        ignored.append("lm_head.weight")
    else:
        slices.append(_whole("lm_head.weight"))
    first = config.num_hidden_layers
    further = range(first, first + features.num_nextn_predict_layers)
    return SliceTable(slices, ignored, [f"model.layers.{layer}." for layer in further])


def _attention(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    features, k_dim = config.features, config.head_dim
    width, kv_heads = config.num_attention_heads * k_dim, config.num_key_value_heads
    for kind in _kinds(features.qkv_bias):
        if features.fused_qkv:
            yield _whole(f"{prefix}qkv_proj.{kind}")
            continue
        rows = width, kv_heads * k_dim, kv_heads * config.v_head_dim
        names = (f"{prefix}{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj"))
        yield from _fused(f"{prefix}qkv_proj.{kind}", zip(names, rows, strict=True))
    if features.qk_norm:
        parts = ((f"{prefix}{name}.weight", k_dim) for name in ("q_norm", "k_norm"))
        yield from _fused(f"{prefix}qk_norm.weight", parts)
    if features.k_norm:
        yield _whole(f"{prefix}k_layernorm.weight")
    if features.sinks is not None:
        yield _whole(f"{prefix}param_sink_key")
        if features.sinks.with_value:
            yield _whole(f"{prefix}param_sink_value")
    for kind in _kinds(features.o_bias):
        yield _whole(f"{prefix}o_proj.{kind}")


def _latent_attention(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    mla, sinks = config.features.mla, config.features.sinks
    assert mla is not None, "latent attention without its sizes"
    last = ("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        first = ("q_proj", config.num_attention_heads * config.head_dim)
    else:
        first = ("q_a_proj", mla.q_lora_rank)
    parts = ((f"{prefix}{name}.weight", rows) for name, rows in (first, last))
    yield from _fused(f"{prefix}fused_qkv_a_proj.weight", parts)
    own = [] if mla.q_lora_rank is None else ["q_a_layernorm.weight", "q_b_proj.weight"]
    own += ["kv_a_layernorm.weight", "kv_b_proj.weight"]
    if sinks is not None:
        own += ["param_sink_compressed_kv"] if sinks.with_value else []
        own += ["param_sink_k_pe"]
    for name in (*own, "o_proj.weight"):
        yield _whole(f"{prefix}{name}")


def _mlp(prefix: str, parameters: str, inner: int, *, bias: bool) -> Iterator[WeightSlice]:
    """Names with one prefix; their parameters may have another."""
    for kind in _kinds(bias):
        parts = ((f"{prefix}{name}.{kind}", inner) for name in ("gate_proj", "up_proj"))
        yield from _fused(f"{parameters}gate_up_proj.{kind}", parts)
        name = f"down_proj.{kind}"
        yield WeightSlice(name=f"{prefix}{name}", parameter=f"{parameters}{name}")


def _experts(moe: MoEConfig, width: int, prefix: str) -> Iterator[WeightSlice]:
    yield _whole(f"{prefix}gate.weight")
    if moe.router_scale:
        yield _whole(f"{prefix}router_scale")
    if moe.correction_bias:
        yield _whole(f"{prefix}e_score_correction_bias")
    if moe.shared_intermediate_size:
        shared, parameters = f"{prefix}{moe.shared_name}.", f"{prefix}shared_experts."
        yield from _mlp(shared, parameters, moe.shared_intermediate_size, bias=False)
    names = [f"{prefix}experts.{expert}." for expert in range(moe.num_experts)]
    gate_up = (
        (f"{name}{kind}.weight", moe.intermediate_size)
        for name in names
        for kind in ("gate_proj", "up_proj")
    )
    yield from _fused(f"{prefix}experts.gate_up_proj", gate_up)
    down = ((f"{name}down_proj.weight", width) for name in names)
    yield from _fused(f"{prefix}experts.down_proj", down)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _whole(name: str) -> WeightSlice:
    return WeightSlice(name=name, parameter=name)


def _fused(parameter: str, parts: Iterable[tuple[str, int]]) -> Iterator[WeightSlice]:
    """Checkpoint names with their numbers of rows, one after the other in a parameter."""
    start = 0
    for name, length in parts:
        yield WeightSlice(name=name, parameter=parameter, start=start, length=length)
        start += length
