"""What a caller may ask of one generation request: names and defaults as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from torpor.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy decoding, as in vLLM."""

MAX_LOGPROBS = 20
"""The most alternatives per token that a request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    The filters act in this order: penalties, temperature, ``min_p``, ``top_k``, ``top_p``.
    Sequences given as lists are kept as tuples, so that an instance can be shared and hashed.

    Raises:
        RequestError: a value has the wrong type or lies outside its range.
    """

    n: int = 1
    """Number of completions of the prompt."""
    temperature: float = 1.0
    """Divides the logits; below 1e-5 the likeliest token is taken (greedy)."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one."""
    seed: int | None = None
    """Seed of this request; None (or -1) derives one from the engine's seed and the request id."""
    stop: Sequence[str] | None = None
    """A string or several that end the completion when they appear in its text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool = False
    """Go on after the model's own end token."""
    max_tokens: int | None = 16
    """The most tokens to generate; None means as many as the context holds."""
    min_tokens: int = 0
    """Before this many tokens neither an end token nor a stop string ends the completion."""
    logprobs: int | None = None
    """Log probabilities per token: 0 for the sampled one, k for the k likeliest and that one."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Weakens (> 1) tokens seen in the prompt or the completion: divides a positive logit,
    multiplies a negative one."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""

    def __post_init__(self) -> None:
        for name, limit in _NUMBERS.items():
            self._set(name, _number(name, getattr(self, name), limit))
        for name, limit in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            self._set(name, _integer(name, value, limit))
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.seed == -1:
            self._set("seed", None)
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def _set(self, name: str, value: object) -> None:
        # The only writes to a frozen instance: plain ints, floats and tuples for what was given.
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.greedy and self.n > 1:
            raise RequestError(
                f"n is {self.n} with temperature {self.temperature}: greedy completions would all "
                "be the same; set n=1 or raise the temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )


@dataclass(frozen=True, slots=True)
class _Limit:
    """A range, and the words for it."""

    low: float
    high: float = math.inf
    above: bool = False
    """Whether ``low`` itself is excluded."""

    def holds(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'of at least'} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and at most {self.high:g}"


_NUMBERS = {
    "temperature": _Limit(0),
    "top_p": _Limit(0, 1, above=True),
    "min_p": _Limit(0, 1),
    "presence_penalty": _Limit(-2, 2),
    "frequency_penalty": _Limit(-2, 2),
    "repetition_penalty": _Limit(0, above=True),
}
_INTEGERS = {
    "n": _Limit(1),
    "top_k": _Limit(-1),
    "seed": _Limit(-(2**63), 2**64 - 1),
    "max_tokens": _Limit(1),
    "min_tokens": _Limit(0),
    "logprobs": _Limit(0, MAX_LOGPROBS),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs"})
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


def _number(name: str, value: object, limit: _Limit) -> float:
    # bool is an int to Python, but True as a temperature is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} is {value!r}; give a number {limit}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not limit.holds(number):
        raise RequestError(f"{name} is {value!r}; give a number {limit}")
    return number


def _integer(name: str, value: object, limit: _Limit) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not limit.holds(int(value)):
        also = ", or None" if name in _OPTIONAL else ""
        raise RequestError(f"{name} is {value!r}; give a whole number {limit}{also}")
    return int(value)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; give True or False")


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"stop is {value!r}; give a string or a list of strings")
    if "" in strings:
        raise RequestError(f"stop is {value!r}: an empty string ends every text at once; remove it")
    return tuple(strings)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = () if value is None else value
    if not isinstance(ids, list | tuple) or not all(map(_is_token_id, ids)):
        raise RequestError(f"stop_token_ids is {value!r}; give a list of token ids from 0 up")
    return tuple(map(int, ids))


def _is_token_id(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0
