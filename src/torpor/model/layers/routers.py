"""How a router's logits become the experts of each token and their weights.

Everything here is float32. Shape suffixes: T tokens, E experts, K experts of one token, G groups.
"""

from __future__ import annotations

import torch

Routed = tuple[torch.Tensor, torch.Tensor]
"""int64 experts [T, K], no expert twice for a token, and their weights [T, K]."""

_LEAST_SUM = 1e-20
"""Added to a sum of weights before it divides them, as the released models do."""


def route_by_softmax(logits_TE: torch.Tensor, num_experts_per_tok: int, *, norm: bool) -> Routed:
    """The likeliest experts, likeliest first, with their probabilities over all experts.

    Args:
        logits_TE: of any floating dtype.
        num_experts_per_tok: K.
        norm: whether a token's weights are divided by their sum.
    """
    probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
    weights_TK, experts_TK = probs_TE.topk(num_experts_per_tok, dim=-1)
    if norm:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return experts_TK, weights_TK


def route_by_groups(
    logits_TE: torch.Tensor, num_experts_per_tok: int, scale_E: torch.Tensor
) -> Routed:
    """The likeliest expert of each of K equal groups of neighbours (Tang et al. 2025, section 2).

    So every token loads every group, and a device that holds a group, equally.

    Args:
        logits_TE: of any floating dtype; E is a multiple of K.
        num_experts_per_tok: K, the number of groups.
        scale_E: factor on each expert's probability.
    """
    probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
    probs_TGE = probs_TE.unflatten(-1, (num_experts_per_tok, -1))
    weights_TK, within_TK = probs_TGE.max(dim=-1)
    size = probs_TGE.shape[-1]
    experts_TK = within_TK + torch.arange(num_experts_per_tok, device=within_TK.device) * size
    return experts_TK, weights_TK * scale_E.float()[experts_TK]


def route_by_sigmoid(
    logits_TE: torch.Tensor,
    num_experts_per_tok: int,
    bias_E: torch.Tensor | None,
    *,
    norm: bool,
) -> Routed:
    """The experts with the highest score, each score by itself (DeepSeek-V3, equations 15 and 16).

    Args:
        logits_TE: float32.
        num_experts_per_tok: K.
        bias_E: added to the scores for the choice; the weights do not know it.
        norm: whether a token's weights are divided by their sum.
    """
    # torch's own sigmoid rounds differently where a vector register is not filled.
    scores_TE = 1 / (1 + torch.exp(-logits_TE.float()))
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
    experts_TK = choice_TE.topk(num_experts_per_tok, dim=-1).indices
    weights_TK = scores_TE.gather(-1, experts_TK)
    if norm:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _LEAST_SUM)
    return experts_TK, weights_TK
