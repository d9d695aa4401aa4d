"""Keys and values in eight bits: how they are rounded into the cache, and read back.

What is stored is ``x / scale`` in float8_e4m3fn, which has no infinity and reaches to 448; a layer
has one scale for its keys and one for its values. What exceeds the range is stored as its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number that the format holds."""
FP8_NAN_BYTE = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """One layer's scales, float32 [1] each, by whoever owns them; read anew at each use."""

    k_scale: torch.Tensor
    v_scale: torch.Tensor


def to_cache(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Keys or values as the cache stores them.

    Args:
        x: any shape, floating point.
        dtype: of the cache.
        scale: float32 [1], for float8_e4m3fn; None for other dtypes.

    Returns:
        The same shape in `dtype`. Under a scale finite numbers saturate; what is not finite did not
        come from rounding, and becomes NaN, so that its row fails as it would with any cache.
    """
    if scale is None:
        return x.to(dtype)
    scaled = (x.to(torch.float32) / scale).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.masked_fill_(x.isinf(), torch.nan).to(dtype)


def from_cache(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """What was stored, in `dtype`; under a scale, float32 times the scale first."""
    if scale is None:
        return x.to(dtype)
    return x.to(torch.float32).mul_(scale).to(dtype)


def as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """The same memory with elements that torch can move and fill: bytes, where they are fp8."""
    return kv.view(torch.uint8) if kv.dtype == FP8 else kv
