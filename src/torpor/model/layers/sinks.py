"""Static attention sinks: learned keys and values that every query sees before its own context.

For a query q, a layer's sinks and its context::

    o = softmax(scale * q @ [sink_key ; K].T) @ [sink_value ; V]

Sinks stand at no position: they are not rotated, real tokens start at 0, and neither causality nor
a window hides them. They are a function of weights alone, so they live with the weights, and no
loss of the KV cache reaches them.

Shape suffixes: T tokens, H query heads, K KV heads, S sinks, D head size.
"""

from __future__ import annotations

import torch
from torch import nn

from torpor.model.attention.interface import AttentionContext, AttentionSpec
from torpor.model.attention.partial import attend_with_sinks


class StaticSinkAttention(nn.Module):
    """Attention over a layer's sinks and its context, by any backend that has log-sum-exps.

    ``sink_key`` [S, K, k_dim] and ``sink_value`` [S, K, v_dim] are derived: whoever owns them
    rebuilds them when a source changes. Zeros until then.
    """

    sink_key: torch.Tensor
    sink_value: torch.Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        sink_len: int,
        *,
        dtype: torch.dtype,
        attn_backend: AttentionContext | None = None,
    ) -> None:
        """Attend as `spec` says.

        Args:
            spec: the layer.
            sink_len: number of sinks, S.
            dtype: of the sinks.
            attn_backend: attends where `forward` is given none.
        """
        super().__init__()
        self.spec = spec
        self.sink_len = sink_len
        self.attn_backend = attn_backend
        for name, width in (("sink_key", spec.k_dim), ("sink_value", spec.v_dim)):
            zeros = torch.zeros(sink_len, spec.num_kv_heads, width, dtype=dtype, device="cpu")
            self.register_buffer(name, zeros, persistent=False)

    def update_sink_kv(self, sink_key_SKD: torch.Tensor, sink_value_SKD: torch.Tensor) -> None:
        """Write other sinks in place; their addresses stay."""
        with torch.no_grad():
            self.sink_key.copy_(sink_key_SKD)
            self.sink_value.copy_(sink_value_SKD)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        attn: AttentionContext | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values, and attend over sinks and context: [T, H, v_dim].

        Args:
            q_THD: rotated queries [T, H, k_dim].
            k_TKD: rotated keys [T, K, k_dim].
            v_TKD: values [T, K, v_dim].
            attn: attention of this step; None for the one given at construction.
        """
        return self.forward_native(q_THD, k_TKD, v_TKD, attn)

    def forward_native(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        attn: AttentionContext | None = None,
    ) -> torch.Tensor:
        """As `forward`, by torch's operations alone around the backend's."""
        backend = self.attn_backend if attn is None else attn
        assert backend is not None, "attention without a backend"
        if backend.holds_sinks:
            return backend.attend(self.spec, q_THD, k_TKD, v_TKD)
        context_THD, lse_TH = backend.attend_with_lse(self.spec, q_THD, k_TKD, v_TKD)
        scale = self.spec.scale
        return attend_with_sinks(q_THD, self.sink_key, self.sink_value, scale, context_THD, lse_TH)[
            0
        ]
