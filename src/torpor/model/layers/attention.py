"""Grouped-query attention with rotary positions, and with static sinks where a config has them.

Shape suffixes: T new tokens of all rows, D model width, H heads, S sinks. Query, key and value
projections are one parameter: fewer and larger products, which small batches need.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torpor.model.attention.interface import AttentionContext, AttentionSpec
from torpor.model.config.config import ModelConfig
from torpor.model.config.features import SinkConfig
from torpor.model.layers.derived import Derived
from torpor.model.layers.layers import HeadNorm, Linear, RMSNorm, RopeTables, empty_parameter
from torpor.model.layers.ops import OpsModule
from torpor.model.layers.sinks import StaticSinkAttention


class Attention(OpsModule):
    """Queries, keys and values of each head; attention; the output projection."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads, kv_heads, features = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.features,
        )
        k_dim, v_dim, hidden_size = config.head_dim, config.v_head_dim, config.hidden_size
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            scale=k_dim**-0.5,
            window=features.windows[layer],
        )
        self.rope_dim, self.rope_interleaved = config.rope_dim, features.rope_interleaved
        width = (heads + kv_heads) * k_dim + kv_heads * v_dim
        self.qkv_proj = Linear(hidden_size, width, bias=features.qkv_bias, dtype=dtype)
        eps = config.rms_norm_eps
        self.qk_norm: HeadNorm | None = None
        if features.qk_norm:
            self.qk_norm = HeadNorm(heads, k_dim, eps, dtype=dtype)
        self.k_layernorm: RMSNorm | None = None
        if features.k_norm:
            self.k_layernorm = RMSNorm(k_dim, eps, dtype=dtype)
        self.sink_attn: StaticSinkAttention | None = None
        if features.sinks is not None:
            self._add_sinks(features.sinks, dtype)
        o_bias = features.o_bias and features.row_parallel_bias
        self.o_proj = Linear(heads * v_dim, hidden_size, bias=o_bias, dtype=dtype)

    def _add_sinks(self, sinks: SinkConfig, dtype: torch.dtype) -> None:
        spec = self.spec
        shape = sinks.count, spec.num_kv_heads
        self.param_sink_key = empty_parameter(*shape, spec.k_dim, dtype=dtype)
        if sinks.with_value:
            self.param_sink_value = empty_parameter(*shape, spec.v_dim, dtype=dtype)
        else:
            # A buffer, so that it has an owner and comes back; no checkpoint holds it.
            zeros = torch.zeros(*shape, spec.v_dim, dtype=dtype, device="cpu")
            self.register_buffer("param_sink_value", zeros, persistent=False)
        self.sink_attn = StaticSinkAttention(spec, sinks.count, dtype=dtype)

    def forward(
        self,
        x_TD: torch.Tensor,
        rope: RopeTables,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, D] to [T, D], or [R, D] of those rows; hands all T keys and values to `attn`."""
        spec = self.spec
        qkv_TO = self.qkv_proj(x_TD)
        rotated = (spec.num_heads + spec.num_kv_heads) * spec.k_dim
        qk_THD = qkv_TO[:, :rotated].unflatten(1, (-1, spec.k_dim))
        v_THD = qkv_TO[:, rotated:].unflatten(1, (-1, spec.v_dim))
        if self.qk_norm is not None:
            qk_THD = self.qk_norm(qk_THD)
        if self.k_layernorm is not None:
            qk_THD[:, spec.num_heads :] = self.k_layernorm(qk_THD[:, spec.num_heads :])
        qk_THD = self._rotate(qk_THD, rope)
        q_THD, k_THD = qk_THD[:, : spec.num_heads], qk_THD[:, spec.num_heads :]
        if self.sink_attn is None:
            out_THD = attn.attend(spec, q_THD, k_THD, v_THD)
        else:
            out_THD = self.sink_attn(q_THD, k_THD, v_THD, attn)
        if rows_R is not None:
            out_THD = self.ops.take_rows(out_THD, rows_R)
        out: torch.Tensor = self.o_proj(out_THD.flatten(1))
        return out

    def _rotate(self, qk_THD: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        if self.rope_dim == self.spec.k_dim and not self.rope_interleaved:
            return self.ops.rotate(qk_THD, *rope)
        part_THD = qk_THD[..., : self.rope_dim]
        part_THD.copy_(self.ops.rotate(part_THD, *rope, interleaved=self.rope_interleaved))
        return qk_THD

    def derived(self, prefix: str) -> Iterator[Derived]:
        """The sinks: normed keys, since context keys are normed too, and the values."""
        if self.sink_attn is None:
            return
        yield Derived(
            name=f"{prefix}sink_attn.sink_key",
            tensor=self.sink_attn.sink_key,
            sources=(f"{prefix}param_sink_key", f"{prefix}k_layernorm.weight"),
            rebuild=self.compute_sink_key,
        )
        yield Derived(
            name=f"{prefix}sink_attn.sink_value",
            tensor=self.sink_attn.sink_value,
            sources=(f"{prefix}param_sink_value",),
            rebuild=lambda: self.param_sink_value,
        )

    def compute_sink_key(self) -> torch.Tensor:
        """The learned keys through the norm of keys: [S, KV heads, k_dim]."""
        assert self.k_layernorm is not None, "sinks without a norm of keys"
        key: torch.Tensor = self.k_layernorm(self.param_sink_key)
        return key

    def post_weight_load(self) -> None:
        """Compute the sinks from the weights, for a module whose memory nobody owns."""
        if self.sink_attn is not None:
            self.sink_attn.update_sink_kv(self.compute_sink_key(), self.param_sink_value)
