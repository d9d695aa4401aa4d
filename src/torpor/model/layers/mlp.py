"""The feed-forward part of a decoder layer."""

from __future__ import annotations

import torch

from torpor.model.layers.layers import Linear
from torpor.model.layers.ops import OpsModule


class MLP(OpsModule):
    """Gated feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        down_bias: bool | None = None,
    ) -> None:
        """Three projections, two in one parameter.

        Args:
            width: of what comes in and goes out.
            inner: width in between.
            bias: whether the projections have biases.
            dtype: of the parameters.
            down_bias: the same of ``down_proj``; None as the others.
        """
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * inner, bias=bias, dtype=dtype)
        down_bias = bias if down_bias is None else down_bias
        self.down_proj = Linear(inner, width, bias=down_bias, dtype=dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D]."""
        gate_up = self.gate_up_proj
        inner_TI = self.ops.linear_gated(x_TD, gate_up.weight, gate_up.bias)
        out: torch.Tensor = self.down_proj(inner_TI)
        return out
