"""One decoder for every supported architecture; its config says which features are on.

Shape suffixes: T new tokens of all rows, D model width, H heads. Query, key and value projections
are one parameter, and so are gate and up: fewer and larger products, which small batches need.
"""

from __future__ import annotations

import torch
from torch import nn

from torpor.model.attention.interface import AttentionContext, AttentionSpec
from torpor.model.config.config import ModelConfig
from torpor.model.layers.layers import (
    Embedding,
    Head,
    HeadNorm,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    empty_parameter,
)
from torpor.model.layers.moe import SparseMoE
from torpor.model.layers.ops import OpsModule
from torpor.model.layers.slices import slice_table
from torpor.sleep.source import SliceTable

RopeTables = tuple[torch.Tensor, torch.Tensor]


class Attention(OpsModule):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden_size, head_dim = config.hidden_size, config.head_dim
        width = heads * head_dim
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            k_dim=head_dim,
            v_dim=head_dim,
            scale=head_dim**-0.5,
            window=config.windows[layer],
        )
        self.qkv_proj = Linear(
            hidden_size, width + 2 * kv_heads * head_dim, bias=config.qkv_bias, dtype=dtype
        )
        self.qk_norm: HeadNorm | None = None
        if config.qk_norm:
            self.qk_norm = HeadNorm(heads, head_dim, config.rms_norm_eps, dtype=dtype)
        self.o_proj = Linear(width, hidden_size, bias=config.o_bias, dtype=dtype)

    def forward(
        self,
        x_TD: torch.Tensor,
        rope: RopeTables,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, D] to [T, D], or [R, D] of those rows; hands all T keys and values to `attn`."""
        spec = self.spec
        rotated = spec.num_heads + spec.num_kv_heads
        qkv_THD = self.qkv_proj(x_TD).view(len(x_TD), -1, spec.k_dim)
        qk_THD = qkv_THD[:, :rotated]
        if self.qk_norm is not None:
            qk_THD = self.qk_norm(qk_THD)
        qk_THD = self.ops.rotate(qk_THD, *rope)
        q_THD, k_THD = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :]
        out_THD = attn.attend(spec, q_THD, k_THD, qkv_THD[:, rotated:])
        if rows_R is not None:
            out_THD = out_THD[rows_R]
        out: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out


class MLP(OpsModule):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(width, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, width, bias=bias, dtype=dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]."""
        gate_up = self.gate_up_proj
        inner_TI = self.ops.linear_gated(x_TD, gate_up.weight, gate_up.bias)
        out: torch.Tensor = self.down_proj(inner_TI)
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP or experts, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps, moe = config.hidden_size, config.rms_norm_eps, config.moe
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.mlp: MLP | SparseMoE
        if moe is not None and layer in moe.layers:
            self.mlp = SparseMoE(width, moe, dtype)
        else:
            self.mlp = MLP(config, dtype)

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
            residual_TD = residual_TD[rows_R]
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class Decoder(OpsModule):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.rotary_emb = RotaryEmbedding(config.head_dim, config.rope)
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
        if rows_R is None:
            return self.ops.run_pass(self._compute_layers, attn, x_TD, cos, sin)
        return self.ops.run_pass(self._compute_layers, attn, x_TD, cos, sin, rows_R, repeats=False)

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

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Build the modules; no weight has memory yet.

        Args:
            config: the sizes and features.
            dtype: dtype of all parameters.
        """
        super().__init__()
        self.config = config
        self.model = Decoder(config, dtype)
        if config.tie_word_embeddings:
            head_weight = self.model.embed_tokens.weight
        else:
            head_weight = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.lm_head = Head(head_weight)

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
        attentions = (part for part in self.modules() if isinstance(part, Attention))
        return tuple(attention.spec for attention in attentions)

    def slice_table(self) -> SliceTable:
        """Every Hugging Face checkpoint name and the parameter rows it fills, in layer order."""
        return slice_table(self.config)
