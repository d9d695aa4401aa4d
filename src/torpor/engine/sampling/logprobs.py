"""Log probabilities of a token and of the likeliest ones beside it.

Shape letters: T prompt tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from torpor.engine.sampling.filters import top_ids

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of the model's own logits, or of what is left to draw from after masks, biases, penalties,
temperature and filters."""

WHOLE_VOCABULARY = -1
"""As a count of log probabilities: all of them."""


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token id with its log probability and its rank (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


def ranked_tokens(logits_V: torch.Tensor, token_id: int, count: int) -> tuple[RankedToken, ...]:
    """One token first, then the likeliest ones by rank; equal ones rank by id.

    Args:
        logits_V: any floating dtype; computed in float32.
        token_id: always part of the answer.
        count: how many of the likeliest to add, -1 for all. Those of probability 0 are left out.
    """
    logprobs_V = logits_V.detach().float().log_softmax(dim=0).cpu().numpy()
    own = logprobs_V[token_id]
    ahead = np.count_nonzero(logprobs_V > own) + np.count_nonzero(logprobs_V[:token_id] == own)
    tokens = [RankedToken(token_id, float(own), int(ahead) + 1)]
    if count == WHOLE_VOCABULARY or count > len(logprobs_V):
        count = len(logprobs_V)
    if count > 0:
        ids = top_ids(logprobs_V, count)
        ids = ids[np.argsort(-logprobs_V[ids], kind="stable")]
        top = zip(ids.tolist(), logprobs_V[ids].tolist(), strict=True)
        tokens += [
            RankedToken(top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(top, start=1)
            if top_id != token_id and logprob > -math.inf
        ]
    return tuple(tokens)


def prompt_logprobs(
    logits_TV: torch.Tensor, next_token_ids: Sequence[int], count: int
) -> list[tuple[RankedToken, ...]]:
    """For each position of a prompt, what the model held likely as the token after it.

    Args:
        logits_TV: raw logits of the positions.
        next_token_ids: the prompt's tokens one position on, [T].
        count: as ``ranked_tokens``.

    Returns:
        Per position the next token first. Logits with NaN give that token alone, with a logprob of
        NaN and rank 1: sampling refuses such a request.
    """
    return [
        ranked_tokens(logits_V, token_id, count)
        for logits_V, token_id in zip(logits_TV, next_token_ids, strict=True)
    ]
