"""How one request is sampled and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torpor.errors import RequestError, shown
from torpor.params.checks import (
    ANY,
    SEED,
    Limit,
    flag,
    integer,
    is_token_id,
    number,
    refuse_unsupported,
    strings,
    token_ids,
)
from torpor.params.structured import StructuredOutputsParams

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy decoding."""

MIN_TEMPERATURE = 0.01
"""What a smaller temperature that is not greedy is raised to, as in vLLM."""

MAX_LOGIT_BIAS = 100.0
"""Biases are cut to plus or minus this, as in vLLM."""


_NUMBERS = {
    "temperature": Limit(0),
    "top_p": Limit(0, 1, above=True),
    "min_p": Limit(0, 1),
    "presence_penalty": Limit(-2, 2),
    "frequency_penalty": Limit(-2, 2),
    # Far outside, a logit times or over it is no float any more.
    "repetition_penalty": Limit(1e-30, 1e30),
}
_INTEGERS = {
    "n": Limit(1, 16384),
    "top_k": Limit(-1),
    "seed": SEED,
    "max_tokens": Limit(1),
    "min_tokens": Limit(0),
    "logprobs": Limit(-1),
    "prompt_logprobs": Limit(-1),
}
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
_FLAGS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
_UNSUPPORTED = {
    "spaces_between_special_tokens": "leave it True",
    "logprob_token_ids": "remove it and set logprobs=-1, with max_logprobs=-1 for the engine",
    "flat_logprobs": "remove it",
    "extra_args": "remove it",
    "thinking_token_budget": "remove it and set max_tokens",
    "repetition_detection": "remove it and set repetition_penalty or max_tokens",
    "trace_decode_token_ids": "remove it and give the tokens as a prompt with prompt_logprobs",
}


class RequestOutputKind(Enum):
    """What each output of a streamed request holds; values as in vLLM."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the last one."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Before a token is drawn the logits pass through, in this order: masks (``allowed_token_ids``,
    ``bad_words``, ``min_tokens``, ``structured_outputs``), ``logit_bias``, penalties,
    ``temperature``, ``min_p``, ``top_k``, ``top_p``. Sequences and mappings are kept as tuples, so
    that an instance can be shared and hashed. Greedy decoding resets ``top_p``, ``top_k`` and
    ``min_p``, which would change nothing.

    Raises:
        RequestError: a value has the wrong type or lies outside its range, or a parameter of vLLM
            is set that torpor does not follow.
    """

    n: int = 1
    """Number of completions of the prompt; at most 16384. They wait for ``max_num_seqs``, so
    a large number keeps an engine busy for long."""
    temperature: float = 1.0
    """Divides the logits; below 1e-5 the likeliest token is taken (greedy), and from there to 0.01
    it is raised to 0.01, where float32 logits still divide well."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest one."""
    seed: int | None = None
    """Seed of this request; None (or -1) derives one from the engine's seed and the request id."""
    stop: str | Sequence[str] | None = None
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
    """Log probabilities per token: 0 for the sampled one, k for the k likeliest and that one, -1
    for the whole vocabulary; True means 1. More than the engine's ``max_logprobs``, 20 if nobody
    says otherwise, is refused; ``max_logprobs=-1`` allows any number and -1."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence among the generated tokens."""
    repetition_penalty: float = 1.0
    """Weakens (> 1) tokens seen in the prompt or the completion: divides a positive logit,
    multiplies a negative one."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    """Added to the logit of each token id, cut to plus or minus 100; kept as pairs by id."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these can be drawn."""
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated, at the start of a word or inside one."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must look like."""
    detokenize: bool = True
    """Make text of the tokens; False leaves the text empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Only True: the tokenizer's own decoder decides about spaces."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a streamed request holds."""
    logprob_token_ids: Sequence[int] | None = None
    """Of vLLM, not followed."""
    flat_logprobs: bool = False
    """Of vLLM, not followed."""
    extra_args: Mapping[str, Any] | None = None
    """Of vLLM, not followed: nothing here would read them."""
    thinking_token_budget: int | None = None
    """Of vLLM, not followed."""
    repetition_detection: Any = None
    """Of vLLM, not followed."""
    trace_decode_token_ids: Sequence[int] | None = None
    """Of vLLM, not followed."""

    def __post_init__(self) -> None:
        for name, limit in _NUMBERS.items():
            self._set(name, number(name, getattr(self, name), limit))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                self._set(name, 1)
        for name, limit in _INTEGERS.items():
            value = integer(name, getattr(self, name), limit, optional=name in _OPTIONAL)
            self._set(name, value)
        for name in _FLAGS:
            flag(name, getattr(self, name))
        self._set("stop", strings("stop", self.stop, "ends every text at once"))
        self._set("bad_words", strings("bad_words", self.bad_words, "is in every text"))
        end_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", token_ids("stop_token_ids", end_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _allowed_ids(self.allowed_token_ids))
        if self.seed == -1:
            self._set("seed", None)
        self._set_temperature()
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse token ids that a vocabulary does not have.

        Raises:
            RequestError: with the parameter and the id.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for entry in getattr(self, name) or ():
                token_id = entry[0] if name == "logit_bias" else entry
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} holds {shown(token_id)}, but the vocabulary has {vocab_size} "
                        "tokens; remove it"
                    )

    def _set(self, name: str, value: object) -> None:
        # The only writes to a frozen instance: plain ints, floats and tuples for what was given.
        object.__setattr__(self, name, value)

    def _set_temperature(self) -> None:
        if self.greedy:
            self._set("top_p", 1.0)
            self._set("top_k", 0)
            self._set("min_p", 0.0)
        else:
            self._set("temperature", max(self.temperature, MIN_TEMPERATURE))

    def _check_together(self) -> None:
        refuse_unsupported(self, _UNSUPPORTED, "")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            told = shown(self.structured_outputs)
            raise RequestError(f"structured_outputs is {told}; give StructuredOutputsParams")
        if not isinstance(self.output_kind, RequestOutputKind):
            told = shown(self.output_kind)
            raise RequestError(f"output_kind is {told}; give a RequestOutputKind")
        if self.greedy and self.n > 1:
            raise RequestError(
                f"n is {self.n} with temperature {self.temperature}: greedy completions would all "
                "be the same; set n=1 or raise the temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {shown(self.min_tokens)} and max_tokens is {self.max_tokens}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop is {self.stop!r} with detokenize False: there would be no text to find it "
                "in; set detokenize=True or give stop_token_ids"
            )


def _allowed_ids(value: object) -> tuple[int, ...]:
    ids = token_ids("allowed_token_ids", value)
    if not ids:
        raise RequestError(
            f"allowed_token_ids is {value!r}, which allows nothing; give at least one id, or None"
        )
    return ids


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs: Any = value.items() if isinstance(value, Mapping) else () if value is None else value
    try:
        if isinstance(pairs, str | bytes):
            raise TypeError
        # The keys of a JSON object are strings.
        biases = {int(key) if isinstance(key, str) else key: bias for key, bias in pairs}
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logit_bias is {shown(value)}; give a mapping of token ids to numbers"
        ) from error
    if not all(map(is_token_id, biases)):
        raise RequestError(f"logit_bias is {shown(value)}; give token ids from 0 up as its keys")
    numbers = {
        int(token_id): number(f"logit_bias[{shown(token_id)}]", bias, ANY)
        for token_id, bias in biases.items()
    }
    return tuple(
        (token_id, max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias)))
        for token_id, bias in sorted(numbers.items())
    )
