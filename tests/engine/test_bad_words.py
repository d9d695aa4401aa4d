from __future__ import annotations

from torpor.engine.sampling.bad_words import bad_word_sequences, blocked_ids
from torpor.engine.text.tokenizer import Tokenizer


def test_a_word_is_forbidden_with_and_without_a_space_before_it(tokenizer: Tokenizer) -> None:
    sequences = bad_word_sequences(tokenizer, ["sleep", " fox"])
    texts = {tokenizer.decode(sequence) for sequence in sequences}
    assert texts == {"sleep", " sleep", "fox", " fox"}


def test_a_space_alone_can_be_forbidden(tokenizer: Tokenizer) -> None:
    [sequence] = bad_word_sequences(tokenizer, [" "])
    assert tokenizer.decode(sequence) == " "


def test_no_special_token_is_added_to_a_word(tokenizer: Tokenizer) -> None:
    specials = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert not specials & {i for words in bad_word_sequences(tokenizer, ["a"]) for i in words}


def test_the_last_token_is_blocked_when_the_others_have_come() -> None:
    words = ((1, 2, 3), (4,), (2, 5))
    assert blocked_ids(words, []) == {4}
    assert blocked_ids(words, [1]) == {4}
    assert blocked_ids(words, [1, 2]) == {3, 4, 5}
    assert blocked_ids(words, [9, 1, 2]) == {3, 4, 5}
    assert blocked_ids(words, [1, 2, 9]) == {4}
    assert blocked_ids((), [1, 2]) == set()
