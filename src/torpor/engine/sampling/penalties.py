"""What changes single logits: masks, biases and penalties.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torpor.params import SamplingParams


def forbid(scores_V: NDArray[np.float64], token_ids: Collection[int]) -> None:
    """Give some ids no chance, in place."""
    if token_ids:
        scores_V[list(token_ids)] = -np.inf


def forbid_others(scores_V: NDArray[np.float64], token_ids: Sequence[int]) -> None:
    """Give every id but these no chance, in place."""
    allowed = scores_V[list(token_ids)]
    scores_V.fill(-np.inf)
    scores_V[list(token_ids)] = allowed


def add_bias(scores_V: NDArray[np.float64], biases: Sequence[tuple[int, float]]) -> None:
    """Add to the logits of some ids, each named once, in place."""
    for token_id, bias in biases:
        scores_V[token_id] += bias


def penalise(
    scores_V: NDArray[np.float64],
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    """Repetition (Keskar et al. 2019), then frequency and presence penalties, in place.

    The order is that of vLLM. Repetition looks at the prompt and the output, the others at the
    output alone.
    """
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        seen = list({*prompt_token_ids, *output_token_ids})
        scores = scores_V[seen]
        scores_V[seen] = np.where(scores > 0, scores / factor, scores * factor)
    if output_token_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        ids, counts = np.unique(np.asarray(output_token_ids), return_counts=True)
        scores_V[ids] -= params.frequency_penalty * counts
        scores_V[ids] -= params.presence_penalty
