"""The layers of a decoder: parameters on meta, buffers computed for real.

A parameter has no memory until its owner gives it some, so that building a model costs nothing and
its weights are written once, straight where they will live. A buffer is small and not in any
checkpoint, so it must be right from the start.

Shape suffixes: T tokens, D model width or head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from torpor.model.config.rope_config import RopeConfig
from torpor.model.layers.one_thread import cos_sin, take_rows
from torpor.model.layers.ops import OpsModule, normalise

RopeTables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and signed sines, see `RotaryEmbedding`."""


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the given shape on the meta device: no memory, no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(OpsModule):
    """``x @ weight.T + bias`` with weight [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row of weight [num_embeddings, width] for each id."""

    def __init__(self, num_embeddings: int, width: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, width, dtype=dtype)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 ids [T] to [T, width]."""
        return take_rows(self.weight, ids_T)


class Head(OpsModule):
    """Projects hidden states on the vocabulary; a tied head shares the embedding's parameter."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Project with `weight`, [vocab_size, width], which may belong to another module too."""
        super().__init__()
        self.weight = weight

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """[..., width] to float32 logits [..., vocab_size]."""
        return self.ops.logits(hidden_TD, self.weight)


class RMSNorm(OpsModule):
    """Root-mean-square norm, see `LayerOps.rms_norm`."""

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x + residual``, and that sum; `residual` may be overwritten."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm over each head of queries and keys, which have a gain each."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, dtype: torch.dtype) -> None:
        """Norm `num_heads` query heads and all the key heads that follow them."""
        super().__init__()
        self.weight = empty_parameter(2 * head_dim, dtype=dtype)
        self.num_heads = num_heads
        self.eps = eps

    def forward(self, qk_THD: torch.Tensor) -> torch.Tensor:
        """[T, query and key heads, head_dim] to the same shape and dtype."""
        gain_q, gain_k = self.weight.chunk(2)
        out_THD = normalise(qk_THD, self.eps)
        out_THD[:, : self.num_heads].mul_(gain_q)
        out_THD[:, self.num_heads :].mul_(gain_k)
        return out_THD


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embedding (Su et al. 2021), with scaling."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, config: RopeConfig, *, interleaved: bool = False) -> None:
        """Rotate heads, or parts of heads, of `head_dim` elements.

        Args:
            head_dim: elements that are rotated.
            config: base and scaling.
            interleaved: pairs are neighbours (2i, 2i + 1), not (i, i + head_dim / 2).
        """
        super().__init__()
        self.interleaved = interleaved
        self.register_buffer("inv_freq", inverse_frequencies(head_dim, config), persistent=False)

    def forward(
        self, positions_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables for `rotate` at the given positions.

        Args:
            positions_T: int64 positions [T], from 0.
            dtype: dtype of the tables; they are computed in float32.

        Returns:
            Cosines and signed sines, each [T, 1, head_dim].
        """
        cos, sin = cos_sin(positions_T, self.inv_freq)
        # The sign of the rotation's upper half lives in the table: one operation fewer a layer.
        if self.interleaved:
            cos_TD = torch.stack((cos, cos), dim=-1).flatten(-2)
            sin_TD = torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos_TD, sin_TD = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos_TD.to(dtype)[:, None], sin_TD.to(dtype)[:, None]


def inverse_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Angle per position of each rotated pair: float32 [head_dim / 2] on the CPU, in radians.

    ``default`` is theta ** (-2i / head_dim); ``linear`` divides it by the factor; ``llama3``
    divides only what has wavelengths beyond the original context, and blends in between (as
    released with Llama 3.1).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(inv_freq, config)
    return inv_freq


def _llama3_frequencies(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    context = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / inv_freq
    # 0 where the wavelength exceeds context / low, 1 where it is below context / high.
    kept = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq
