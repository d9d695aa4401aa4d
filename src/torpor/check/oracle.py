"""The oracle: questions with the answers a model gave, to be compared bit for bit later.

Greedy answers with log probabilities depend on every weight that the question touches, on the KV
cache and on the order of all additions, so they notice what digests cannot see: a tensor that no
owner declared, a stale cache, another kernel.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torpor.params import SamplingParams

if TYPE_CHECKING:
    from torpor.engine.llm import LLM
    from torpor.outputs import RequestOutput

DEFAULT_PROMPTS = ("Why do people need sleep?",)
"""What the model is asked when the caller names nothing."""

NUM_LOGPROBS = 5
"""Alternatives per token whose log probabilities are compared, beside the chosen token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One greedy completion."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    """Per token: (id, natural log of its probability), the chosen one first, then by rank."""

    def same_logprobs(self, other: Answer) -> bool:
        """Whether ids, order and every bit of every log probability are equal."""
        return _bits(self) == _bits(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answers of one round beside the reference."""

    answers: tuple[Answer, ...]
    tokens_equal: bool
    logprobs_equal: bool
    generate_s: float


class Oracle:
    """Asks one model the same questions again and again."""

    def __init__(
        self, llm: LLM, prompts: Sequence[str] = DEFAULT_PROMPTS, *, max_tokens: int = 16
    ) -> None:
        """Ask for the first time; these answers are the reference.

        Models with a chat template are asked through it, others complete the prompt. The model's
        end token does not end an answer, so that every round computes ``max_tokens`` tokens.

        Raises:
            RequestError: a prompt or ``max_tokens`` cannot be used.
            AsleepError, WeightsIncompleteError: the model cannot answer now.
        """
        self._llm = llm
        self._prompts = tuple(prompts)
        self._params = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=NUM_LOGPROBS, ignore_eos=True
        )
        start_s = time.perf_counter()
        self.reference = self._ask()
        self.reference_s = time.perf_counter() - start_s

    def ask_again(self) -> Comparison:
        """Ask now, and compare with the reference.

        Raises:
            AsleepError, WeightsIncompleteError: the model cannot answer now.
        """
        start_s = time.perf_counter()
        answers = self._ask()
        generate_s = time.perf_counter() - start_s
        pairs = list(zip(answers, self.reference, strict=True))
        return Comparison(
            answers=answers,
            tokens_equal=all(new.token_ids == old.token_ids for new, old in pairs),
            logprobs_equal=all(new.same_logprobs(old) for new, old in pairs),
            generate_s=generate_s,
        )

    def _ask(self) -> tuple[Answer, ...]:
        prompts = list(self._prompts)
        # The same schedule each time: nothing of an earlier answer is hit.
        self._llm.reset_prefix_cache()
        if self._llm.get_tokenizer().chat_template is None:
            outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        else:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = self._llm.chat(conversations, self._params, use_tqdm=False)
        return tuple(map(_answer, prompts, outputs))


def _answer(prompt: str, output: RequestOutput) -> Answer:
    (completion,) = output.outputs
    assert completion.logprobs is not None, "log probabilities were asked for"
    return Answer(
        prompt=prompt,
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=tuple(
            tuple((token_id, entry.logprob) for token_id, entry in step.items())
            for step in completion.logprobs
        ),
    )


def _bits(answer: Answer) -> list[list[tuple[int, bytes]]]:
    # Compared as bytes: == takes -0.0 for 0.0, and NaN for nothing at all.
    return [
        [(token_id, struct.pack("<d", logprob)) for token_id, logprob in step]
        for step in answer.logprobs
    ]
