"""The sizes of one of several tensor-parallel ranks.

Attention is divided by heads and every MLP, an expert too, by its inner width; the vocabulary by
rows, padded to equal numbers for each rank. Norms, routers and latents are on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from torpor.errors import ConfigError
from torpor.model.config.config import ModelConfig
from torpor.model.config.features import MoEConfig
from torpor.sleep.shards import Block, TensorParallel


def shard_config(config: ModelConfig, tp: TensorParallel) -> ModelConfig:
    """What a module of one rank is built from: the model's config with the rank's sizes.

    Args:
        config: of the whole model.
        tp: the rank.

    Raises:
        ConfigError: the ranks do not divide a size; KV heads may also divide the ranks, and are
            then on several. The message names the field.
    """
    if tp.size == 1:
        return config
    features = config.features
    dense = features.moe is None or len(features.moe.layers) < config.num_hidden_layers
    inner = config.intermediate_size
    return replace(
        config,
        num_attention_heads=_divided("num_attention_heads", config.num_attention_heads, tp),
        # Under latent attention all heads share one latent, which every rank has.
        num_key_value_heads=config.num_key_value_heads
        if features.mla is not None
        else _kv_heads(config.num_key_value_heads, tp),
        intermediate_size=_divided("intermediate_size", inner, tp) if dense else inner,
        vocab_size=sum(Block("token", config.vocab_size).share(tp)[1:]),
        features=replace(
            features,
            moe=None if features.moe is None else _experts(features.moe, tp),
            row_parallel_bias=tp.rank == 0,
        ),
    )


def _experts(moe: MoEConfig, tp: TensorParallel) -> MoEConfig:
    return replace(
        moe,
        intermediate_size=_divided("moe_intermediate_size", moe.intermediate_size, tp),
        shared_intermediate_size=_divided(
            "shared_expert_intermediate_size", moe.shared_intermediate_size, tp
        ),
    )


def _divided(name: str, size: int, tp: TensorParallel) -> int:
    if size % tp.size:
        raise ConfigError(
            f"{name} is {size}, which tensor_parallel_size {tp.size} does not divide; choose a "
            "number of ranks that does"
        )
    return size // tp.size


def _kv_heads(count: int, tp: TensorParallel) -> int:
    if count % tp.size and tp.size % count:
        raise ConfigError(
            f"num_key_value_heads is {count}, which tensor_parallel_size {tp.size} neither divides "
            "nor is a multiple of; choose a number of ranks of which one or the other is true"
        )
    return max(count // tp.size, 1)
