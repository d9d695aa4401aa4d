"""The Llama architecture for one sequence at a time.

Shape suffixes: T new tokens, D model width, H heads. Query, key and value projections are one
parameter, and so are gate and up: fewer and larger products, which decode at batch 1 needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from torpor.model.attention import KVCache, attend
from torpor.model.config import ModelConfig
from torpor.model.layers import (
    Embedding,
    Head,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    empty_parameter,
    rotate,
)
from torpor.sleep.source import SliceTable, WeightSlice

RopeTables = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(config.hidden_size, width + 2 * kv_width, bias=bias, dtype=dtype)
        self.o_proj = Linear(width, config.hidden_size, bias=bias, dtype=dtype)

    def forward(self, x_TD: torch.Tensor, rope: RopeTables, kv: KVCache) -> torch.Tensor:
        """[T, D] to [T, D]; appends T keys and values of this layer to `kv`."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_THD = self.qkv_proj(x_TD).view(len(x_TD), -1, self.head_dim)
        qk_THD = rotate(qkv_THD[:, :num_rotated], *rope)
        q_THD, k_THD = qk_THD[:, : self.num_heads], qk_THD[:, self.num_heads :]
        k_SHD, v_SHD = kv.append(self.layer, k_THD, qkv_THD[:, num_rotated:])
        out: torch.Tensor = self.o_proj(attend(q_THD, k_SHD, v_SHD).flatten(1))
        return out


class MLP(nn.Module):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(width, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, width, bias=bias, dtype=dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]."""
        gate, up = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x_TD: torch.Tensor, rope: RopeTables, kv: KVCache) -> torch.Tensor:
        """[T, D] to [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rope, kv)
        out: torch.Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, kv: KVCache) -> torch.Tensor:
        """int64 ids and positions [T] to hidden states [T, D]."""
        x_TD = self.embed_tokens(ids_T)
        rope = self.rotary_emb(positions_T, x_TD.dtype)
        for layer in self.layers:
            x_TD = layer(x_TD, rope, kv)
        out: torch.Tensor = self.norm(x_TD)
        return out


class LlamaForCausalLM(nn.Module):
    """A Llama with its language-model head; parameters on meta, buffers real."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Build the modules; no weight has memory yet.

        Args:
            config: the sizes and features.
            dtype: dtype of all parameters, float32 or bfloat16.
        """
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, dtype)
        if config.tie_word_embeddings:
            head_weight = self.model.embed_tokens.weight
        else:
            head_weight = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.lm_head = Head(head_weight)

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, kv: KVCache
    ) -> torch.Tensor:
        """Run T new tokens of one sequence, be it a prefill, a part of one, or one decode step.

        Args:
            input_ids_T: int64 token ids [T], T >= 1.
            positions_T: int64 positions [T]; the first token of a sequence is at 0.
            kv: holds the keys and values of earlier tokens and takes the new ones.

        Returns:
            Hidden states [T, hidden_size] after the final norm, in the model's dtype.
        """
        hidden_TD: torch.Tensor = self.model(input_ids_T, positions_T, kv)
        return hidden_TD

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., hidden_size] to float32 logits [..., vocab_size]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def slice_table(self) -> SliceTable:
        """Every Hugging Face checkpoint name and the parameter rows it fills, in layer order."""
        slices = [_whole("model.embed_tokens.weight")]
        ignored = ["model.rotary_emb.inv_freq"]
        for layer in range(self.config.num_hidden_layers):
            slices.extend(_layer_slices(self.config, f"model.layers.{layer}."))
            ignored.append(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
        slices.append(_whole("model.norm.weight"))
        if self.config.tie_word_embeddings:
            ignored.append("lm_head.weight")
        else:
            slices.append(_whole("lm_head.weight"))
        return SliceTable(slices, ignored)


def _whole(name: str) -> WeightSlice:
    return WeightSlice(name=name, parameter=name)


def _layer_slices(config: ModelConfig, prefix: str) -> Iterator[WeightSlice]:
    width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    qkv = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
    gate_up = (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size))
    yield _whole(f"{prefix}input_layernorm.weight")
    for kind in _kinds(config.attention_bias):
        yield from _fused(f"{prefix}self_attn.", "qkv_proj", kind, qkv)
        yield _whole(f"{prefix}self_attn.o_proj.{kind}")
    yield _whole(f"{prefix}post_attention_layernorm.weight")
    for kind in _kinds(config.mlp_bias):
        yield from _fused(f"{prefix}mlp.", "gate_up_proj", kind, gate_up)
        yield _whole(f"{prefix}mlp.down_proj.{kind}")


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


def _fused(
    prefix: str, fused: str, kind: str, parts: tuple[tuple[str, int], ...]
) -> Iterator[WeightSlice]:
    start = 0
    for part, length in parts:
        yield WeightSlice(
            name=f"{prefix}{part}.{kind}",
            parameter=f"{prefix}{fused}.{kind}",
            start=start,
            length=length,
        )
        start += length
