"""Causal attention of one sequence, and what it needs from a KV cache.

Shape suffixes: T new tokens, S tokens so far (the new ones included), H heads, D head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class KVCache(Protocol):
    """Keys and values of one sequence, kept by the engine."""

    def append(
        self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of one layer and return all keys and values so far.

        Args:
            layer: index of the layer, from 0.
            k_THD: rotated keys, [T, num_key_value_heads, head_dim], in the model's dtype.
            v_THD: values of the same shape and dtype.

        Returns:
            Keys and values [S, num_key_value_heads, head_dim], oldest first, the new ones last.
            Any strides will do as long as the last dimension is contiguous.
        """
        ...


def attend(q_THD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor) -> torch.Tensor:
    """Causal scaled dot-product attention; new token t sees the S - T tokens before and t + 1 new.

    Args:
        q_THD: rotated queries [T, num_attention_heads, head_dim].
        k_SHD: keys [S, num_key_value_heads, head_dim], S >= T; each serves a group of query heads.
        v_SHD: values of the same shape.

    Returns:
        [T, num_attention_heads, head_dim].
    """
    num_new, num_total = q_THD.shape[0], k_SHD.shape[0]
    mask = None
    if 1 < num_new < num_total:
        # torch's own causal flag aligns the mask to the first key, which is wrong after a prefix.
        ones = torch.ones(num_new, num_total, dtype=torch.bool, device=q_THD.device)
        mask = ones.tril(num_total - num_new)
    out_HTD = functional.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_SHD.transpose(0, 1)[None],
        v_SHD.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=1 < num_new == num_total,
        enable_gqa=True,
    )[0]
    return out_HTD.transpose(0, 1)
