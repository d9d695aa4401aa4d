"""Sampling as a pure function of (logits, parameters, seed, position), for a batch of rows.

Every row's token has the same bits alone, in a batch and in any order: the work that is done for
all rows at once is exact (largest values and where they are), all else is done row by row. That
work is NumPy's, on the host and in float64: on one row its loops are faster than torch's, and no
thread of theirs waits for another.

Shape letters: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from torpor.engine.sampling.bad_words import TokenSequences, blocked_ids
from torpor.engine.sampling.filters import surviving_ids
from torpor.engine.sampling.logprobs import (
    LogprobsMode,
    RankedToken,
    prompt_logprobs,
    ranked_tokens,
)
from torpor.engine.sampling.noise import GAMMA, gumbel_argmax, mix
from torpor.engine.sampling.penalties import add_bias, forbid, forbid_others, penalise
from torpor.errors import RequestError

if TYPE_CHECKING:
    from torpor.params import SamplingParams

__all__ = [
    "LogprobsMode",
    "RankedToken",
    "SampledToken",
    "SamplingRow",
    "child_seed",
    "prompt_logprobs",
    "sample_rows",
]

_REMEDIES = {
    "allowed_token_ids": "allow more ids",
    "bad_words": "give fewer",
    "min_tokens": "lower min_tokens or give fewer stop_token_ids",
    "structured_outputs": "allow more texts",
}
"""What can forbid a token, in the order applied, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What the token of one row of logits depends on, besides the logits.

    All token ids lie in the vocabulary.
    """

    params: SamplingParams
    seed: int
    """Any integer; taken modulo 2**64."""
    position: int
    """Index in the sequence, prompt included, that the token will take."""
    prompt_token_ids: Sequence[int] = ()
    """What ``repetition_penalty`` looks at, with the output."""
    output_token_ids: Sequence[int] = ()
    """Tokens generated so far, for penalties and bad words."""
    forbidden: Collection[int] = ()
    """Ids that would end the completion before ``min_tokens``."""
    bad_words: TokenSequences = ()
    """``params.bad_words`` as ``bad_word_sequences`` gives them."""
    grammar_mask_V: torch.Tensor | None = None
    """bool, True where the grammar allows the token."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one step draws."""

    token_id: int
    logprobs: tuple[RankedToken, ...] | None
    """The sampled token first, then the likeliest ones; None unless asked for."""


def sample_rows(
    logits_RV: torch.Tensor,
    rows: Sequence[SamplingRow],
    *,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> list[SampledToken | RequestError]:
    """Draw one token for each row of logits.

    Args:
        logits_RV: any floating dtype; not changed.
        rows: one per row.
        logprobs_mode: what log probabilities speak of.

    Returns:
        Per row its token, or, for that row alone, the error: its logits hold NaN or +inf, or every
        token is forbidden.
    """
    assert len(logits_RV) == len(rows), f"{len(logits_RV)} rows of logits for {len(rows)} requests"
    if not rows:
        return []
    ids, tops = _largest(logits_RV)
    results: list[SampledToken | RequestError] = []
    for index, (row, top) in enumerate(zip(rows, tops, strict=True)):
        try:
            if not math.isfinite(top):
                raise _not_finite(logits_RV[index], row.position)
            token_id = ids[index] if _takes_argmax(row) else None
            results.append(_sample(logits_RV[index], row, token_id, logprobs_mode))
        except RequestError as error:
            results.append(error)
    return results


def child_seed(seed: int, index: int) -> int:
    """The seed of a request's completion ``index``; completion 0 keeps the request's own."""
    return seed % 2**64 if index == 0 else mix(mix(seed) + index * GAMMA)


def _sample(
    logits_V: torch.Tensor, row: SamplingRow, token_id: int | None, mode: LogprobsMode
) -> SampledToken:
    processed_V: NDArray[np.float64] | None = None
    if token_id is None:
        token_id, processed_V = _draw(logits_V, row)
    count = row.params.logprobs
    if count is None:
        return SampledToken(token_id, None)
    if processed_V is not None and mode == "processed_logprobs":
        logits_V = torch.from_numpy(processed_V)
    return SampledToken(token_id, ranked_tokens(logits_V, token_id, count))


def _draw(logits_V: torch.Tensor, row: SamplingRow) -> tuple[int, NDArray[np.float64]]:
    """The token, and the logits [V] it was drawn from, -inf where it could not be."""
    scores_V = _on_host(logits_V).astype(np.float64)
    _restrict(scores_V, row)
    biases = row.params.logit_bias or ()
    assert isinstance(biases, tuple), "SamplingParams keeps biases as pairs"
    add_bias(scores_V, biases)
    penalise(scores_V, row.params, row.prompt_token_ids, row.output_token_ids)
    if row.params.greedy:
        return int(scores_V.argmax()), scores_V
    scores_V /= row.params.temperature
    ids_C = surviving_ids(scores_V, row.params)
    if ids_C is None:
        return gumbel_argmax(scores_V, row.seed, row.position), scores_V
    scores_C = scores_V[ids_C]
    index = gumbel_argmax(scores_C, row.seed, row.position, ids_C)
    scores_V.fill(-np.inf)
    scores_V[ids_C] = scores_C
    return int(ids_C[index]), scores_V


def _restrict(scores_V: NDArray[np.float64], row: SamplingRow) -> None:
    """Take every chance from the tokens that may not be drawn, in place."""
    blocked = blocked_ids(row.bad_words, row.output_token_ids)
    if row.params.allowed_token_ids is not None:
        forbid_others(scores_V, row.params.allowed_token_ids)
    forbid(scores_V, blocked)
    forbid(scores_V, row.forbidden)
    if row.grammar_mask_V is not None:
        allowed_V = _on_host(row.grammar_mask_V)
        assert allowed_V.shape == scores_V.shape, "a mask of another vocabulary"
        scores_V[~allowed_V] = -np.inf
    active = {
        "allowed_token_ids": row.params.allowed_token_ids is not None,
        "bad_words": bool(blocked),
        "min_tokens": bool(row.forbidden),
        "structured_outputs": row.grammar_mask_V is not None,
    }
    names = [name for name in _REMEDIES if active[name]]
    if names and scores_V.max() == -math.inf:
        raise _all_forbidden(names, row.position)


def _all_forbidden(names: Sequence[str], position: int) -> RequestError:
    verb = "forbids" if len(names) == 1 else "together forbid"
    return RequestError(
        f"{' and '.join(names)} {verb} every token that is left at position {position}; "
        f"{', or '.join(_REMEDIES[name] for name in names)}"
    )


def _takes_argmax(row: SamplingRow) -> bool:
    """Whether the row's token is the likeliest one of the raw logits."""
    params = row.params
    return (
        params.greedy
        and not row.forbidden
        and not row.bad_words
        and not params.logit_bias
        and params.allowed_token_ids is None
        and row.grammar_mask_V is None
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == params.presence_penalty == 0.0
    )


def _largest(logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
    """The id of each row's largest logit, the lowest of equal ones on the CPU, and that logit.

    NaN counts as the largest: one reduction finds all that a softmax cannot take.
    """
    if not logits_RV.is_cpu:
        tops_R, ids_R = logits_RV.max(dim=1)
        return ids_R.tolist(), tops_R.tolist()
    # NumPy's argmax runs on vector units, torch's on the CPU does not.
    host_RV = _on_host(logits_RV)
    ids = host_RV.argmax(axis=1)
    return ids.tolist(), host_RV[np.arange(len(ids)), ids].tolist()


def _on_host(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def _not_finite(logits_V: torch.Tensor, position: int) -> RequestError:
    num_bad = int((torch.isnan(logits_V) | (logits_V == torch.inf)).sum())
    if num_bad == 0:
        return RequestError(f"every logit at position {position} is -inf; check the weights")
    return RequestError(
        f"{num_bad} of {len(logits_V)} logits at position {position} are NaN or inf; "
        "verify() the weights, or load them with dtype='float32' if the dtype overflows"
    )
