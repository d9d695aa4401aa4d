"""What this machine's processor does in hardware; asked of torch, never timed."""

from __future__ import annotations

import torch


def cpu_has_bfloat16_products() -> bool:
    """Whether bfloat16 products have instructions of their own (AVX512-BF16 or AMX)."""
    return _supported("_is_avx512_bf16_supported") or _supported("_is_amx_tile_supported")


def _supported(question: str) -> bool:
    # Private in torch, and absent from builds for other processors.
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())
