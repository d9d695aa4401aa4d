"""What a generation request answers: names and fields as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torpor.errors import TorporError

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: an end token or a stop string; ``length``: ``max_tokens`` or the context is full;
``abort``: the caller ended it; ``error``: it failed, and the request says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token at one position, and how likely the model held it."""

    logprob: float
    """Natural logarithm of the probability; ``logprobs_mode`` says whether before masks, penalties,
    temperature and filters (raw) or after them (processed)."""
    rank: int
    """1 for the likeliest token of the vocabulary; equal ones rank by token id. Never None."""
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
class RequestMetrics:
    """When a request came, answered and ended: seconds on the monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    """None before the first token."""
    finished_s: float | None = None
    """None while unfinished."""
    num_preemptions: int = 0
    """How often its blocks were taken away, over all completions."""


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
    """The sleeper's ``weights_epoch`` that the newest token was computed with."""
    weights_version: str | None = None
    """The name given to those weights by ``update_weights``, if any."""
    error: TorporError | None = None
    """Why the request failed at run time; its completions then end with ``error``."""
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """Per token of the prompt, that token first, then by rank; None for the first, which nothing
    precedes. None unless asked for."""
    num_cached_tokens: int | None = None
    """How many tokens of the prompt came from the prefix cache; None before it was scheduled."""
    metrics: RequestMetrics | None = None
