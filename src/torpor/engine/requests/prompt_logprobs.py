"""Log probabilities of the prompt's own tokens, gathered over the chunks of its prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torpor.outputs import Logprob

if TYPE_CHECKING:
    from torpor.engine.sampling.sampler import RankedToken
    from torpor.engine.text.tokenizer import Tokenizer

PromptLogprobList = tuple[dict[int, Logprob] | None, ...]


class PromptLogprobs:
    """Filled by position, so that a recomputed chunk writes the same places again."""

    def __init__(self, num_prompt_tokens: int, count: int, tokenizer: Tokenizer) -> None:
        """Start with nothing known.

        Args:
            num_prompt_tokens: positions; the first has no log probability, nothing precedes it.
            count: alternatives per position; -1 for the whole vocabulary.
            tokenizer: gives the tokens' texts.
        """
        self.count = count
        self._tokenizer = tokenizer
        self._entries: list[dict[int, Logprob] | None] = [None] * num_prompt_tokens

    def put(self, position: int, tokens: Sequence[RankedToken]) -> None:
        """Keep what the model held likely at one position, from 1."""
        self._entries[position] = {
            token.token_id: Logprob(
                logprob=token.logprob,
                rank=token.rank,
                decoded_token=self._tokenizer.decode([token.token_id], skip_special_tokens=False),
            )
            for token in tokens
        }

    def output(self) -> PromptLogprobList:
        """One entry per position of the prompt; the first is None."""
        return tuple(self._entries)
