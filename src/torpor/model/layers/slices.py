"""Which checkpoint name fills which rows of which parameter.

Checkpoints hold one tensor for each projection and each expert; torpor holds fewer and larger
parameters, whose rows are those tensors one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torpor.model.config.config import ModelConfig
from torpor.model.config.families import MoEConfig
from torpor.sleep.source import SliceTable, WeightSlice


def slice_table(config: ModelConfig) -> SliceTable:
    """Every Hugging Face checkpoint name of a model, in layer order."""
    slices = [_whole("model.embed_tokens.weight")]
    ignored = ["model.rotary_emb.inv_freq"]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        slices.append(_whole(f"{prefix}input_layernorm.weight"))
        slices.extend(_attention(config, f"{prefix}self_attn."))
        slices.append(_whole(f"{prefix}post_attention_layernorm.weight"))
        if config.moe is not None and layer in config.moe.layers:
            slices.extend(_experts(config.moe, config.hidden_size, f"{prefix}mlp."))
        else:
            slices.extend(_mlp(config, f"{prefix}mlp."))
        ignored.append(f"{prefix}self_attn.rotary_emb.inv_freq")
    slices.append(_whole("model.norm.weight"))
    if config.tie_word_embeddings:
        ignored.append("lm_head.weight")
    else:
        slices.append(_whole("lm_head.weight"))
    return SliceTable(slices, ignored)


def _attention(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    head_dim = config.head_dim
    width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    for kind in _kinds(config.qkv_bias):
        qkv = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
        parts = ((f"{prefix}{name}.{kind}", rows) for name, rows in qkv)
        yield from _fused(f"{prefix}qkv_proj.{kind}", parts)
    if config.qk_norm:
        parts = ((f"{prefix}{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
        yield from _fused(f"{prefix}qk_norm.weight", parts)
    for kind in _kinds(config.o_bias):
        yield _whole(f"{prefix}o_proj.{kind}")


def _mlp(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    for kind in _kinds(config.mlp_bias):
        names = (f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}")
        parts = ((name, config.intermediate_size) for name in names)
        yield from _fused(f"{prefix}gate_up_proj.{kind}", parts)
        yield _whole(f"{prefix}down_proj.{kind}")


def _experts(moe: MoEConfig, width: int, prefix: str) -> Iterator[WeightSlice]:
    yield _whole(f"{prefix}gate.weight")
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
