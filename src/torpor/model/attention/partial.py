"""Attention over keys at hand, with the log-sum-exp that merging partial results needs.

Where keys are seen in pieces, each piece's result is weighted by its share of the softmax's
denominator (Dao et al. 2022, section 3.1). Shape letters: T queries, S keys, H query heads, K KV
heads, G query heads per KV head, P pairs of row and KV head, D head size.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torpor.model.machine.onednn_switch import OneDnnSwitch

QUERY_ROWS = 32
"""Queries of a tile, over the heads of a KV head, where bits must not depend on how many there are:
products have one shape then."""

HIDDEN = -1e30
"""Added to a score that must not count. Finite, so that a query all of whose keys of one piece are
hidden gets a finite result, which its log-sum-exp then weights with exactly zero."""


def attend_pairs(
    q_PGD: torch.Tensor,
    k_PSD: torch.Tensor,
    v_PSD: torch.Tensor,
    scale: float,
    mask_P1S: torch.Tensor | None,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One query token per row, as batched products over (row, KV head).

    Up to twice as fast as the fused kernel on a CPU, which is made for many queries; the query
    heads of a KV head need no copies of it.

    Args:
        q_PGD: queries [P, G, k_dim].
        k_PSD: keys [P, S, k_dim].
        v_PSD: values [P, S, v_dim].
        scale: factor on the dot products.
        mask_P1S: added to the scores [P, 1, S]; None for nothing.
        with_lse: also return the log-sum-exp.

    Returns:
        [P, G, v_dim], and float32 [P, G] in natural logarithms or None.
    """
    scores_PGS = torch.bmm(q_PGD * scale, k_PSD.transpose(1, 2))
    if mask_P1S is not None:
        scores_PGS += mask_P1S
    lse_PG = torch.logsumexp(scores_PGS, dim=-1) if with_lse else None
    return torch.bmm(torch.softmax(scores_PGS, dim=-1), v_PSD), lse_PG


def attend_pairs_fused(
    q_PGD: torch.Tensor,
    k_PSD: torch.Tensor,
    v_PSD: torch.Tensor,
    scale: float,
    mask_P1S: torch.Tensor | None,
    *,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `attend_pairs`, for half precision: keeps the scores in float32."""
    v_dim = v_PSD.shape[-1]
    q_PGD, k_PSD, v_PSD = equal_dims(q_PGD, k_PSD, v_PSD)
    mask = None if mask_P1S is None else mask_P1S[:, None]
    out, lse = fused(q_PGD[:, None], k_PSD[:, None], v_PSD[:, None], scale, mask)
    return out[:, 0, :, :v_dim], lse[:, 0] if with_lse else None


def attend_tokens(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    scale: float,
    *,
    mask_TS: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many query tokens of one row over the same keys.

    Args:
        q_THD: queries [T, H, k_dim].
        k_SKD: keys [S, K, k_dim]; any strides.
        v_SKD: values [S, K, v_dim]; any strides.
        scale: factor on the dot products.
        mask_TS: float32, added to the scores [T, S]; None for nothing.
        causal: token i sees keys 0..i; for T = S, without a mask.

    Returns:
        [T, H, v_dim] and float32 log-sum-exp [T, H] in natural logarithms.
    """
    tokens, heads, _ = q_THD.shape
    kv_heads, v_dim = v_SKD.shape[1:]
    group = heads // kv_heads
    q_THD, k_SKD, v_SKD = equal_dims(q_THD, k_SKD, v_SKD)
    # A KV head's query heads become the batch, over which the keys have stride 0.
    q_GKTD = q_THD.unflatten(1, (kv_heads, group)).permute(2, 1, 0, 3)
    k_GKSD = k_SKD.transpose(0, 1).expand(group, -1, -1, -1)
    v_GKSD = v_SKD.transpose(0, 1).expand(group, -1, -1, -1)
    mask = None if mask_TS is None else mask_TS[None, None]
    out_GKTD, lse_GKT = fused(q_GKTD, k_GKSD, v_GKSD, scale, mask, causal=causal)
    out_TKGD = out_GKTD[..., :v_dim].permute(2, 1, 0, 3)
    lse_TKG = lse_GKT.permute(2, 1, 0)
    return out_TKGD.reshape(tokens, heads, v_dim), lse_TKG.reshape(tokens, heads)


def equal_dims(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros at the end of the shorter of keys (with queries) and values; results keep theirs."""
    missing = v.shape[-1] - k.shape[-1]
    if missing > 0:
        return functional.pad(q, (0, missing)), functional.pad(k, (0, missing)), v
    if missing < 0:
        return q, k, functional.pad(v, (0, -missing))
    return q, k, v


def fused(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with scores in float32, whatever the dtype; head sizes must be equal.

    Returns:
        [B, H, T, D], and the float32 log-sum-exp [B, H, T]. `mask` (float32) broadcasts to
        [B, H, T, S].
    """
    # Other strides give wrong results there, without an error.
    q_BHTD, k_BHSD, v_BHSD = map(_rows_in_one_piece, (q_BHTD, k_BHSD, v_BHSD))
    if q_BHTD.device.type != "cpu":
        return _plain(q_BHTD, k_BHSD, v_BHSD, scale, mask, causal=causal)
    if q_BHTD.dtype == torch.float32:
        return _flash(q_BHTD, k_BHSD, v_BHSD, scale, mask, causal)
    with OneDnnSwitch.lock:
        return _flash(q_BHTD, k_BHSD, v_BHSD, scale, mask, causal)


def _rows_in_one_piece(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _flash(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # The public function hides the log-sum-exp; this is what it calls on a CPU.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTD, k_BHSD, v_BHSD, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def _plain(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (q_BHTD @ k_BHSD.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, HIDDEN)
    weights = torch.softmax(scores, dim=-1).to(v_BHSD.dtype)
    return weights @ v_BHSD, torch.logsumexp(scores, dim=-1)


def attend_with_sinks(
    q_THD: torch.Tensor,
    sink_key_SKD: torch.Tensor,
    sink_value_SKD: torch.Tensor,
    scale: float,
    context_THD: torch.Tensor,
    context_lse_TH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over sinks, which every query sees, and a context attended to before.

    A token's bits do not depend on the other tokens: queries come in tiles of one size.

    Args:
        q_THD: queries [T, H, k_dim].
        sink_key_SKD: [S, KV heads, k_dim].
        sink_value_SKD: [S, KV heads, v_dim].
        scale: factor on the dot products.
        context_THD: the context's result [T, H, v_dim].
        context_lse_TH: its float32 log-sum-exp [T, H].

    Returns:
        [T, H, v_dim] in the queries' dtype, and float32 [T, H].
    """
    tokens, heads, _ = q_THD.shape
    kv_heads = sink_key_SKD.shape[1]
    rows = tokens * heads // kv_heads
    q_KRD = q_THD.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    q_KRD = functional.pad(q_KRD, (0, 0, 0, -rows % QUERY_ROWS))
    keys, values = (
        each.to(q_THD.dtype).transpose(0, 1)[:, None] for each in (sink_key_SKD, sink_value_SKD)
    )
    sinks, lse = attend_tiles(q_KRD.unflatten(1, (-1, QUERY_ROWS)), keys, values, scale, None)
    sinks_THD, sinks_lse_TH = (
        each.flatten(1, 2)[:, :rows].unflatten(1, (tokens, -1)).transpose(0, 1).flatten(1, 2)
        for each in (sinks, lse)
    )
    out_THD, lse_TH = merge(sinks_THD, sinks_lse_TH, context_THD, context_lse_TH)
    return out_THD.to(q_THD.dtype), lse_TH


def attend_tiles(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `fused`, for head sizes that may differ, with bits that do not depend on B and H.

    Keys and values broadcast to the queries' B and H.
    """
    v_dim = v_BHSD.shape[-1]
    q_BHTD, k_BHSD, v_BHSD = equal_dims(q_BHTD, k_BHSD, v_BHSD)
    found, heads = q_BHTD.shape[:2]
    # A lone problem may be cut up among threads, which could change its sums: give it company.
    tiles = 2 if (found, heads) == (1, 1) else found
    q_BHTD, k_BHSD, v_BHSD = (
        each.expand(tiles, heads, -1, -1) for each in (q_BHTD, k_BHSD, v_BHSD)
    )
    out_BHTD, lse_BHT = fused(q_BHTD, k_BHSD, v_BHSD, scale, mask)
    return out_BHTD[:found, ..., :v_dim], lse_BHT[:found]


def merge(
    a_THD: torch.Tensor, a_lse_TH: torch.Tensor, b_THD: torch.Tensor, b_lse_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, from the parts' results and log-sum-exps.

    Only what rounds alike wherever it is computed: sums, products, maxima and quotients by
    themselves, and `exp`.

    Returns:
        float32 [T, H, v_dim] and float32 [T, H].
    """
    top_TH = torch.maximum(a_lse_TH, b_lse_TH)
    a_TH, b_TH = exp(a_lse_TH - top_TH), exp(b_lse_TH - top_TH)
    total_TH = a_TH + b_TH
    out_THD = (a_THD * a_TH[..., None]).add_(b_THD * b_TH[..., None]).div_(total_TH[..., None])
    return out_THD, top_TH + total_TH.double().log_().float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """In float64, whose last digit does not reach float32: the same bits at every place."""
    return x.double().exp_().float()
