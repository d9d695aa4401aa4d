"""One decoder for every supported architecture; its config says which features are on.

Shape suffixes: T new tokens of all rows, D model width, H heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from torpor.model.attention.interface import AttentionContext, AttentionSpec
from torpor.model.attention.kv_fp8 import FP8, KVScales
from torpor.model.config.config import ModelConfig
from torpor.model.config.shard import shard_config
from torpor.model.layers.attention import Attention
from torpor.model.layers.derived import Derived
from torpor.model.layers.kv_scales import add_kv_scales, kv_scales_of, scale_slices
from torpor.model.layers.latent import LatentAttention
from torpor.model.layers.layers import (
    Embedding,
    Head,
    RMSNorm,
    RopeTables,
    RotaryEmbedding,
    empty_parameter,
)
from torpor.model.layers.mlp import MLP
from torpor.model.layers.moe import SparseMoE
from torpor.model.layers.ops import OpsModule
from torpor.model.layers.sinks import StaticSinkAttention
from torpor.model.layers.slices import slice_table
from torpor.sleep.shards import ALONE, TensorParallel
from torpor.sleep.source import SliceTable


class DecoderLayer(OpsModule):
    """Attention and MLP or experts, each behind a norm and around a residual.

    With ``sandwich_norm`` (Pangu Ultra, Yin et al. 2025, section 3.2) what each adds to the stream
    is normed as well, and the norm before the MLP has a name of its own.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps, features = config.hidden_size, config.rms_norm_eps, config.features
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.self_attn: Attention | LatentAttention
        if features.mla is None:
            self.self_attn = Attention(config, layer, dtype)
        else:
            self.self_attn = LatentAttention(config, features.mla, layer, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.pre_mlp_layernorm: RMSNorm | None = None
        self.post_mlp_layernorm: RMSNorm | None = None
        if features.sandwich_norm:
            self.pre_mlp_layernorm = RMSNorm(width, eps, dtype=dtype)
            self.post_mlp_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.mlp: MLP | SparseMoE
        if features.moe is not None and layer in features.moe.layers:
            self.mlp = SparseMoE(width, features.moe, dtype)
        else:
            self.mlp = MLP(
                width,
                config.intermediate_size,
                bias=features.mlp_bias,
                dtype=dtype,
                down_bias=features.mlp_bias and features.row_parallel_bias,
            )

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rope: RopeTables,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer on the residual stream, whose last addition is left to the next norm.

        Args:
            x_TD: what the layer before added, [T, D].
            residual_TD: the stream before that, [T, D], overwritten; None in the first layer.
            rope: see `RotaryEmbedding`.
            attn: takes keys and values.
            rows_R: int64, the rows wanted of the result; None for all.

        Returns:
            What this layer adds last, and the stream before that.
        """
        if residual_TD is None:
            residual_TD, x_TD = x_TD, self.input_layernorm(x_TD)
        else:
            x_TD, residual_TD = self.input_layernorm.add(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, rope, attn, rows_R)
        if rows_R is not None:
            residual_TD = self.ops.take_rows(residual_TD, rows_R)
        if self.pre_mlp_layernorm is None or self.post_mlp_layernorm is None:
            x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
            return self.mlp(x_TD), residual_TD
        x_TD = self.post_attention_layernorm(x_TD)
        x_TD, residual_TD = self.pre_mlp_layernorm.add(x_TD, residual_TD)
        return self.post_mlp_layernorm(self.mlp(x_TD)), residual_TD


class Decoder(OpsModule):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.rotary_emb = RotaryEmbedding(
            config.rope_dim, config.rope, interleaved=config.features.rope_interleaved
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 ids and positions [T] to hidden states [T, D], or [R, D] of those rows."""
        x_TD = self.embed_tokens(ids_T)
        cos, sin = self.rotary_emb(positions_T, x_TD.dtype)
        rows = () if rows_R is None else (rows_R,)
        return self.ops.run_pass(self._compute_layers, attn, x_TD, cos, sin, *rows)

    def _compute_layers(
        self,
        attn: AttentionContext,
        x_TD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        residual_TD: torch.Tensor | None = None
        last = self.layers[-1]
        for layer in self.layers:
            # What the last layer computes after its keys and values is of use to its rows alone.
            wanted = rows_R if layer is last else None
            x_TD, residual_TD = layer(x_TD, residual_TD, (cos, sin), attn, wanted)
        assert residual_TD is not None, "a model has at least one layer"
        return self.norm.add(x_TD, residual_TD)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder with its language-model head; parameters on meta, buffers real."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Build the modules; no weight has memory yet.

        Args:
            config: the sizes and features of the whole model.
            dtype: dtype of all parameters.
            tp: the rank whose part of the modules this is. The parts of several ranks hold what
                belongs to each; nothing here exchanges results between them.
            kv_dtype: of the KV cache; each layer has the scales that float8_e4m3fn needs.

        Raises:
            ConfigError: the ranks do not divide a size.
        """
        super().__init__()
        self.config, self.tp = config, tp
        self._has_kv_scales = kv_dtype == FP8
        config = shard_config(config, tp)
        self.model = Decoder(config, dtype)
        if config.tie_word_embeddings:
            head_weight = self.model.embed_tokens.weight
        else:
            head_weight = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.lm_head = Head(head_weight)
        if self._has_kv_scales:
            for layer in self._decoder_layers():
                add_kv_scales(layer.self_attn)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the new tokens of one step: whole prompts, parts of them, decoded tokens, mixed.

        Args:
            input_ids_T: int64 token ids [T], T >= 1, row after row.
            positions_T: int64 position of each token in its row [T], from 0.
            attn: knows which tokens belong to which row; holds the keys and values of earlier
                tokens and takes the new ones.
            rows_R: int64 [R], the tokens whose hidden states are wanted; None for all.

        Returns:
            Hidden states [T, hidden_size], or [R, hidden_size], after the final norm, in the
            model's dtype.
        """
        hidden_TD: torch.Tensor = self.model(input_ids_T, positions_T, attn, rows_R)
        return hidden_TD

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., hidden_size] to float32 logits [..., vocab_size]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """What each layer asks of attention, in layer order."""
        return tuple(layer.self_attn.spec for layer in self._decoder_layers())

    def static_sinks(self) -> tuple[StaticSinkAttention, ...]:
        """The sinks of every layer that has some, in layer order."""
        found = (layer.self_attn.sink_attn for layer in self._decoder_layers())
        return tuple(sinks for sinks in found if sinks is not None)

    def kv_scales(self) -> dict[int, KVScales]:
        """Each layer's scales by its index; none without an fp8 KV cache."""
        if not self._has_kv_scales:
            return {}
        layers = enumerate(self._decoder_layers())
        return {index: kv_scales_of(layer.self_attn) for index, layer in layers}

    def slice_table(self, held: Collection[str] | None = None) -> SliceTable:
        """Every Hugging Face checkpoint name and the parameter rows it fills, in layer order, by
        its shard rule where there are several ranks.

        Args:
            held: every name of the checkpoint, which say how it spells the scales of an fp8 KV
                cache if it has any; None for a table of parameters alone.

        Raises:
            CheckpointError: the checkpoint holds some of the scales and not all.
        """
        if held is None or not self._has_kv_scales:
            return slice_table(self.config).for_rank(self.tp)
        scales = scale_slices(self.config.num_hidden_layers, held)
        return slice_table(self.config, scales).for_rank(self.tp)

    def derived(self) -> Iterator[Derived]:
        """What the layers compute from weights, in layer order."""
        for index, layer in enumerate(self._decoder_layers()):
            yield from layer.self_attn.derived(f"model.layers.{index}.self_attn.")

    def post_weight_load(self) -> None:
        """Compute what is derived from the weights, for a model whose memory nobody owns; a
        `Sleeper` that was told of `derived` does so by itself."""
        for layer in self._decoder_layers():
            layer.self_attn.post_weight_load()

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer), "a layer of another kind"
            yield layer
