"""Texts that must not be generated, as token sequences: the rule of vLLM's ``bad_words``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.engine.text.tokenizer import Tokenizer

TokenSequences = tuple[tuple[int, ...], ...]


def bad_word_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> TokenSequences:
    """The tokens of each word, with and without a space before it.

    A tokenizer writes a word differently at the start of a text and after a space; both are
    forbidden. Another way to spell the same text in tokens is not noticed, as in vLLM.

    Args:
        tokenizer: of the model.
        words: non-empty texts.
    """
    sequences = {
        tuple(tokenizer.encode(space + word.lstrip(" "), add_special_tokens=False)): None
        for word in words
        for space in ("", " ")
    }
    return tuple(sequence for sequence in sequences if sequence)


def blocked_ids(sequences: TokenSequences, output_token_ids: Sequence[int]) -> set[int]:
    """The ids that would complete a sequence as the next token of the output."""
    size = len(output_token_ids)
    return {
        sequence[-1]
        for sequence in sequences
        if len(sequence) - 1 <= size
        and tuple(output_token_ids[size - len(sequence) + 1 :]) == sequence[:-1]
    }
