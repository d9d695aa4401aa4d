"""Sampling as a pure function of (logits, parameters, seed, position).

There is no generator state: the noise for vocabulary index i at position p is a hash of (seed, p,
i). So nothing has to be saved across sleep, and a repeated step repeats its token. A token is drawn
by the Gumbel-max rule (Gumbel 1954): argmax over i of ``logit_i + g_i`` with independent standard
Gumbel g_i is distributed as softmax(logit).

Shape letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.errors import RequestError

if TYPE_CHECKING:
    from torpor.params import SamplingParams

# The increment and multipliers of splitmix64 (Steele, Lea, Flood 2014; mixer 13 of D. Stafford).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token id with its log probability and its rank (1 is the likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What one step draws."""

    token_id: int
    logprobs: tuple[RankedToken, ...] | None
    """The sampled token first, then the likeliest ones; None unless asked for."""


def sample(
    logits_V: torch.Tensor,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    forbidden: Collection[int] = (),
) -> SampledToken:
    """Draw the token at ``position`` from one row of logits.

    Args:
        logits_V: any floating dtype; not changed.
        seed: any integer; taken modulo 2**64.
        position: index in the sequence, prompt included, that the token will take.
        prompt_token_ids: what ``repetition_penalty`` looks at, with the output.
        output_token_ids: tokens generated so far, for the penalties.
        forbidden: ids that cannot be drawn. Log probabilities still speak of the raw logits.

    Raises:
        RequestError: the logits hold NaN or +inf, or every token is forbidden.
    """
    _check_finite(logits_V, position)
    scores_V = logits_V.to(torch.float64, copy=True)
    if forbidden:
        scores_V[list(forbidden)] = -torch.inf
        _check_any_allowed(scores_V, position)
    scores_V = _penalised(scores_V, params, prompt_token_ids, output_token_ids)
    if not params.greedy:
        scores_V = _filtered(scores_V / params.temperature, params)
        scores_V = scores_V + gumbel_noise(seed, position, len(scores_V), scores_V.device)
    # argmax answers the first of equal maxima, so ties go to the lowest id.
    token_id = int(scores_V.argmax())
    if params.logprobs is None:
        return SampledToken(token_id, None)
    return SampledToken(token_id, _ranked(logits_V, token_id, params.logprobs))


def child_seed(seed: int, index: int) -> int:
    """The seed of a request's completion ``index``; completion 0 keeps the request's own."""
    return seed & _MASK if index == 0 else _mix(_mix(seed) + index * _GAMMA)


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | None = None
) -> torch.Tensor:
    """Standard Gumbel noise [V], float64, a pure function of (seed, position, index)."""
    return -torch.log(-torch.log(uniform_noise(seed, position, vocab_size, device)))


def uniform_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | None = None
) -> torch.Tensor:
    """Uniform noise [V] in the open interval (0, 1), float64, from the top 52 bits of a hash."""
    key = _mix(_mix(seed) + (position + 1) * _GAMMA)
    state = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    state = state * _signed(_GAMMA) + _signed(key)
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_2)
    bits = _shifted(state ^ _shifted(state, 31), 12)
    # Half a step off the grid keeps 0 and 1 out; with 52 bits the sum is exact in float64.
    return (bits.double() + 0.5) * 2.0**-52


def _check_finite(logits_V: torch.Tensor, position: int) -> None:
    # max propagates NaN, so one reduction finds every value that softmax cannot take.
    if torch.isfinite(logits_V.max()):
        return
    num_bad = int((torch.isnan(logits_V) | (logits_V == torch.inf)).sum())
    if num_bad == 0:
        raise RequestError(f"every logit at position {position} is -inf; check the weights")
    raise RequestError(
        f"{num_bad} of {len(logits_V)} logits at position {position} are NaN or inf; "
        "verify() the weights, or load them with dtype='float32' if the dtype overflows"
    )


def _check_any_allowed(scores_V: torch.Tensor, position: int) -> None:
    if scores_V.max() == -torch.inf:
        raise RequestError(
            f"min_tokens forbids every token that is left at position {position}; "
            "lower min_tokens or give fewer stop_token_ids"
        )


def _penalised(
    scores_V: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> torch.Tensor:
    """Repetition (Keskar et al. 2019), then frequency and presence penalties, as vLLM orders."""
    if params.repetition_penalty != 1.0:
        seen_V = _counts(scores_V, [*prompt_token_ids, *output_token_ids]) > 0
        factor = params.repetition_penalty
        weaker_V = torch.where(scores_V > 0, scores_V / factor, scores_V * factor)
        scores_V = torch.where(seen_V, weaker_V, scores_V)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts_V = _counts(scores_V, output_token_ids)
        scores_V = scores_V - params.frequency_penalty * counts_V
        scores_V = scores_V - params.presence_penalty * (counts_V > 0)
    return scores_V


def _counts(scores_V: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor(token_ids, dtype=torch.int64, device=scores_V.device)
    return torch.bincount(ids, minlength=len(scores_V))


def _filtered(scores_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set every token that min_p, top_k or top_p drops to -inf; the likeliest always stays."""
    if params.min_p > 0.0:
        probabilities_V = scores_V.softmax(dim=0)
        too_small = probabilities_V < params.min_p * probabilities_V.max()
        scores_V = scores_V.masked_fill(too_small, -torch.inf)
    limit = params.top_k if 0 < params.top_k < len(scores_V) else len(scores_V)
    if limit == len(scores_V) and params.top_p == 1.0:
        return scores_V
    # Stable, so that equal scores at the edge are kept by id and exactly top_k stay.
    ordered_V, ids_V = scores_V.sort(descending=True, stable=True)
    ordered_V[limit:] = -torch.inf
    if params.top_p < 1.0:
        probabilities_V = ordered_V.softmax(dim=0)
        before_V = probabilities_V.cumsum(dim=0) - probabilities_V
        ordered_V[1:].masked_fill_(before_V[1:] >= params.top_p, -torch.inf)
    return torch.empty_like(scores_V).scatter_(0, ids_V, ordered_V)


def _ranked(logits_V: torch.Tensor, token_id: int, count: int) -> tuple[RankedToken, ...]:
    logprobs_V = logits_V.float().log_softmax(dim=0)
    own = logprobs_V[token_id]
    ahead = (logprobs_V > own).sum() + (logprobs_V[:token_id] == own).sum()
    tokens = [RankedToken(token_id, float(own), int(ahead) + 1)]
    if count > 0:
        ordered, ids = logprobs_V.sort(descending=True, stable=True)
        top = zip(ids[:count].tolist(), ordered[:count].tolist(), strict=True)
        tokens += [
            RankedToken(top_id, logprob, rank)
            for rank, (top_id, logprob) in enumerate(top, start=1)
            if top_id != token_id
        ]
    return tuple(tokens)


def _mix(value: int) -> int:
    """The output function of splitmix64 on one integer modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch computes modulo 2**64 in int64."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(state: torch.Tensor, num_bits: int) -> torch.Tensor:
    # >> on int64 copies the sign bit; the mask makes it the shift of an unsigned integer.
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)
