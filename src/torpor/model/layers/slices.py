"""Which checkpoint name fills which rows of which parameter, and how ranks divide it.

Checkpoints hold one tensor for each projection and each expert; torpor holds fewer and larger
parameters, whose rows are those tensors one after the other.

Of several tensor-parallel ranks, each holds some heads of the projections into attention and some
inner columns of those into an MLP, an expert's too (both split on the output dimension), the inputs
of what leads out of them (the input dimension), and some rows of the vocabulary. A KV head's query
heads are on the ranks that hold it, and so are its sinks. Whatever has no rule is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torpor.model.config.config import ModelConfig
from torpor.model.config.features import MLAConfig, MoEConfig, SinkConfig
from torpor.model.layers.kv_scales import spellings
from torpor.sleep.shards import FIRST_RANK_ONLY, REPLICATED, Block, ShardRule
from torpor.sleep.source import SliceTable, WeightSlice

_OUTPUT_DIM, _INPUT_DIM = 0, 1
_Part = tuple[str, int, ShardRule]
"""A checkpoint name, its number of rows, and its rule."""


def slice_table(config: ModelConfig, kv_scales: Sequence[WeightSlice] = ()) -> SliceTable:
    """Every Hugging Face checkpoint name of a model, in layer order.

    Args:
        config: of the model.
        kv_scales: those of the scales of its KV cache; of no use to a cache without.
    """
    features = config.features
    vocabulary = _by_output(Block("token", config.vocab_size))
    slices = [_whole("model.embed_tokens.weight", vocabulary)]
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
        if not kv_scales:
            ignored.extend(name for _, names in spellings(f"{prefix}self_attn.") for name in names)
    slices.extend(kv_scales)
    slices.append(_whole("model.norm.weight"))
    if config.tie_word_embeddings:
        ignored.append("lm_head.weight")
    else:
        slices.append(_whole("lm_head.weight", vocabulary))
    first = config.num_hidden_layers
    further = range(first, first + features.num_nextn_predict_layers)
    return SliceTable(slices, ignored, [f"model.layers.{layer}." for layer in further])


def _attention(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    features, k_dim, v_dim = config.features, config.head_dim, config.v_head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q = Block("head", heads, k_dim)
    k, v = (Block("kv_head", kv_heads, width) for width in (k_dim, v_dim))
    for kind in _kinds(features.qkv_bias):
        if features.fused_qkv:
            yield _whole(f"{prefix}qkv_proj.{kind}", _by_output(q, k, v))
            continue
        parts = (
            (f"{prefix}{name}.{kind}", block.count * block.width, _by_output(block))
            for name, block in (("q_proj", q), ("k_proj", k), ("v_proj", v))
        )
        yield from _fused(f"{prefix}qkv_proj.{kind}", parts)
    if features.qk_norm:
        norms = ((f"{prefix}{name}.weight", k_dim, REPLICATED) for name in ("q_norm", "k_norm"))
        yield from _fused(f"{prefix}qk_norm.weight", norms)
    if features.k_norm:
        yield _whole(f"{prefix}k_layernorm.weight")
    if features.sinks is not None:
        yield from _sinks(features.sinks, kv_heads, prefix)
    yield _whole(f"{prefix}o_proj.weight", _by_input(Block("head", heads, v_dim)))
    if features.o_bias:
        yield _whole(f"{prefix}o_proj.bias", FIRST_RANK_ONLY)


def _sinks(sinks: SinkConfig, kv_heads: int, prefix: str) -> Iterator[WeightSlice]:
    by_kv_head = ShardRule(dim=1, blocks=(Block("kv_head", kv_heads),))  # [S, kv heads, width]
    yield _whole(f"{prefix}param_sink_key", by_kv_head)
    if sinks.with_value:
        yield _whole(f"{prefix}param_sink_value", by_kv_head)


def _latent_attention(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    mla, sinks, heads = config.features.mla, config.features.sinks, config.num_attention_heads
    assert mla is not None, "latent attention without its sizes"
    yield from _latents(mla, heads, config.head_dim, prefix)
    if mla.q_lora_rank is not None:
        yield _whole(f"{prefix}q_a_layernorm.weight")
        q_heads = _by_output(Block("head", heads, config.head_dim))
        yield _whole(f"{prefix}q_b_proj.weight", q_heads)
    yield _whole(f"{prefix}kv_a_layernorm.weight")
    kv_heads = _by_output(Block("head", heads, mla.qk_nope_head_dim + mla.v_head_dim))
    yield _whole(f"{prefix}kv_b_proj.weight", kv_heads)
    if sinks is not None:
        # Of a latent, which has no heads: every rank holds them.
        if sinks.with_value:
            yield _whole(f"{prefix}param_sink_compressed_kv")
        yield _whole(f"{prefix}param_sink_k_pe")
    yield _whole(f"{prefix}o_proj.weight", _by_input(Block("head", heads, mla.v_head_dim)))


def _latents(mla: MLAConfig, heads: int, head_dim: int, prefix: str) -> Iterator[WeightSlice]:
    """The product that gives latents; those of the queries may be the queries themselves."""
    first: _Part
    if mla.q_lora_rank is None:
        rule = _by_output(Block("head", heads, head_dim))
        first = (f"{prefix}q_proj.weight", heads * head_dim, rule)
    else:
        first = (f"{prefix}q_a_proj.weight", mla.q_lora_rank, REPLICATED)
    rows = mla.kv_lora_rank + mla.qk_rope_head_dim
    last = (f"{prefix}kv_a_proj_with_mqa.weight", rows, REPLICATED)
    yield from _fused(f"{prefix}fused_qkv_a_proj.weight", (first, last))


def _mlp(prefix: str, parameters: str, inner: int, *, bias: bool) -> Iterator[WeightSlice]:
    """Names with one prefix; their parameters may have another."""
    columns = Block("column", inner)
    for kind in _kinds(bias):
        parts = (
            (f"{prefix}{name}.{kind}", inner, _by_output(columns))
            for name in ("gate_proj", "up_proj")
        )
        yield from _fused(f"{parameters}gate_up_proj.{kind}", parts)
        name, rule = (
            f"down_proj.{kind}",
            _by_input(columns) if kind == "weight" else FIRST_RANK_ONLY,
        )
        yield WeightSlice(name=f"{prefix}{name}", parameter=f"{parameters}{name}", rule=rule)


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
    columns = Block("column", moe.intermediate_size)
    gate_up = (
        (f"{name}{kind}.weight", moe.intermediate_size, _by_output(columns))
        for name in names
        for kind in ("gate_proj", "up_proj")
    )
    yield from _fused(f"{prefix}experts.gate_up_proj", gate_up)
    down = ((f"{name}down_proj.weight", width, _by_input(columns)) for name in names)
    yield from _fused(f"{prefix}experts.down_proj", down)


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _by_output(*blocks: Block) -> ShardRule:
    return ShardRule(dim=_OUTPUT_DIM, blocks=blocks)


def _by_input(*blocks: Block) -> ShardRule:
    return ShardRule(dim=_INPUT_DIM, blocks=blocks)


def _whole(name: str, rule: ShardRule = REPLICATED) -> WeightSlice:
    return WeightSlice(name=name, parameter=name, rule=rule)


def _fused(parameter: str, parts: Iterable[_Part]) -> Iterator[WeightSlice]:
    """Checkpoint names with their numbers of rows, one after the other in a parameter."""
    start = 0
    for name, length, rule in parts:
        yield WeightSlice(name=name, parameter=parameter, start=start, length=length, rule=rule)
        start += length
