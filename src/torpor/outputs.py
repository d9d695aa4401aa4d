"""What a generation request answers: names and fields as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
"""``stop``: an end token or a stop string; ``length``: ``max_tokens`` or the context is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token at one position, and how likely the model held it."""

    logprob: float
    """Natural logarithm of the probability, before temperature, filters and penalties."""
    rank: int
    """1 for the likeliest token of the vocabulary; equal ones rank by token id."""
    decoded_token: str
    """The token's own text; part of a character reads as U+FFFD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt, finished or so far."""

    index: int
    """Which of the request's ``n`` completions this is."""
    text: str
    token_ids: tuple[int, ...]
    """The generated ids; an end token and the tokens of a stop string are among them."""
    cumulative_logprob: float | None = None
    """Sum over the generated tokens; None unless log probabilities were asked for."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per generated token: id to log probability, the generated one first, then by rank."""
    finish_reason: FinishReason | None = None
    """None while unfinished."""
    stop_reason: int | str | None = None
    """The stop string or the id from ``stop_token_ids``; None for the model's own end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """The prompt's text, None when it came as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """One per completion, by index."""
    finished: bool
    weights_epoch: int
    """The sleeper's ``weights_epoch`` that every token was computed with."""
    weights_version: str | None = None
    """The name given to those weights by ``update_weights``, if any."""
