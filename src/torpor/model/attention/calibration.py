"""How large the keys and values of a sample are, from which the scales of an fp8 cache are taken.

Shape letters: T tokens, S keys, H heads, D head size.
"""

from __future__ import annotations

import torch

from torpor.model.attention.interface import AttentionSpec, LseAttention
from torpor.model.attention.partial import HIDDEN, attend_tokens


class SampleAttention(LseAttention):
    """Attention over one row from its first token, without a cache; notes how large keys and values
    are, in full precision."""

    def __init__(self) -> None:
        self.largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By layer: the largest magnitude of its keys and of its values so far."""

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Let the range of a layer include these."""
        largest = key.abs().amax().float(), value.abs().amax().float()
        old = self.largest.get(layer, largest)
        # maximum, unlike max, does not lose NaN.
        self.largest[layer] = (
            torch.maximum(old[0], largest[0]),
            torch.maximum(old[1], largest[1]),
        )

    def _attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        *,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.note(spec.layer, k_THD, v_THD)
        mask_TS = None
        if spec.window is not None:
            token_T = torch.arange(len(q_THD), device=q_THD.device)
            behind_TS = token_T[:, None] - token_T
            seen_TS = (behind_TS >= 0) & (behind_TS < spec.window)
            mask_TS = torch.where(seen_TS, 0.0, HIDDEN)
        q, k, v = (x.to(torch.float32) for x in (q_THD, k_THD, v_THD))
        out_THD, lse_TH = attend_tokens(
            q, k, v, spec.scale, mask_TS=mask_TS, causal=mask_TS is None
        )
        return out_THD.to(q_THD.dtype), lse_TH
