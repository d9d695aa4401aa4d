"""A completion alone: where it ends, what its text is, and that a token is all or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.engine.interrupts import interrupted_at
from tests.engine.scripted import END_RULES, EOS, sampled

from torpor.engine.requests import completion as completion_module
from torpor.engine.requests.completion import Completion
from torpor.engine.text import detokenizer as detokenizer_module
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import RequestError
from torpor.params import SamplingParams

Make = Callable[..., Completion]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def make(num_prompt_tokens: int = 3, **params: Any) -> Completion:
        options = {"max_tokens": None, **params}
        return Completion(
            SamplingParams(**options), 0, num_prompt_tokens, tokenizer=tokenizer, rules=END_RULES
        )

    return make


def feed(completion: Completion, token_ids: Sequence[int], count: int | None = None) -> list[str]:
    """Accept tokens until the completion ends; the pieces of text that became certain."""
    pieces = []
    for token_id in token_ids:
        completion.accept(sampled(token_id, count))
        pieces.append(completion.take_text())
        if completion.finished:
            break
    return pieces


def test_a_completion_ends_at_the_end_token(make: Make, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog")
    completion = make()
    feed(completion, [*ids, EOS])
    output = completion.output()
    assert output.text == "the lazy dog"
    assert output.token_ids == (*ids, EOS)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_no_token_comes_after_the_end(make: Make) -> None:
    completion = make()
    feed(completion, [EOS])
    with pytest.raises(AssertionError, match="has ended"):
        completion.accept(sampled(70))


def test_max_tokens_ends_a_completion(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(max_tokens=1)
    feed(completion, tokenizer.encode("the lazy dog"))
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_context_ends_a_completion(make: Make, max_tokens: int | None) -> None:
    completion = make(max_tokens=max_tokens)
    feed(completion, [70] * 40)
    # 32 positions, 3 of them for the prompt.
    assert (len(completion.token_ids), completion.finish_reason) == (29, "length")


def test_an_end_token_on_the_last_allowed_position_is_a_stop(make: Make) -> None:
    completion = make(max_tokens=2)
    feed(completion, [70, EOS])
    assert completion.finish_reason == "stop"


def test_the_end_token_can_be_ignored(make: Make, tokenizer: Tokenizer) -> None:
    (a,) = tokenizer.encode("a")
    completion = make(ignore_eos=True, max_tokens=4)
    feed(completion, [a, EOS, EOS, EOS])
    output = completion.output()
    assert output.token_ids == (a, EOS, EOS, EOS)
    assert (output.text, output.finish_reason) == ("a", "length")


def test_special_tokens_can_be_shown(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(ignore_eos=True, max_tokens=2, skip_special_tokens=False)
    feed(completion, [*tokenizer.encode("a"), EOS])
    assert completion.output().text == "a<|end|>"


def test_a_stop_token_ends_a_completion_and_is_named(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(stop_token_ids=[70])
    feed(completion, [*tokenizer.encode("a"), 70, 71])
    output = completion.output()
    assert (output.text, output.token_ids[-1]) == ("a", 70)
    assert (output.finish_reason, output.stop_reason) == ("stop", 70)


def test_the_text_of_a_stop_token_can_be_kept(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(stop_token_ids=[70], include_stop_str_in_output=True)
    feed(completion, [*tokenizer.encode("a"), 70])
    assert completion.output().text == "a" + tokenizer.decode([70])


@pytest.mark.parametrize(("include", "text"), [(False, "one t"), (True, "one two t")])
def test_a_stop_string_ends_a_completion_and_is_named(
    make: Make, tokenizer: Tokenizer, include: bool, text: str
) -> None:
    completion = make(stop=["wo t", "three"], include_stop_str_in_output=include)
    feed(completion, [*tokenizer.encode("one two three"), EOS])
    output = completion.output()
    assert output.text == text
    assert (output.finish_reason, output.stop_reason) == ("stop", "wo t")


def test_a_stop_string_on_the_last_allowed_token_still_counts(
    make: Make, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("one two")
    completion = make(stop="two", max_tokens=len(ids))
    feed(completion, ids)
    output = completion.output()
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "two", "one ")


def test_min_tokens_forbids_what_would_end_the_text(make: Make) -> None:
    completion = make(min_tokens=2, stop_token_ids=[70])
    assert completion.forbidden == {EOS, 70}
    feed(completion, [80])
    assert completion.forbidden == {EOS, 70}
    feed(completion, [80])
    assert completion.forbidden == frozenset()
    assert make(min_tokens=2, ignore_eos=True).forbidden == frozenset()


def test_min_tokens_holds_off_stop_strings(make: Make, tokenizer: Tokenizer) -> None:
    (b,) = tokenizer.encode("b")
    completion = make(stop="b", min_tokens=4)
    feed(completion, [b] * 8)
    assert (len(completion.token_ids), completion.stop_reason) == (5, "b")
    assert completion.output().text == "bbbb"


def test_pieces_join_to_the_text_and_hold_back_stop_strings(
    make: Make, tokenizer: Tokenizer
) -> None:
    completion = make(stop=["two 🙂 x", "ree"])
    pieces = feed(completion, [*tokenizer.encode("one two 🙂 three"), EOS])
    assert "".join(pieces) == completion.output().text == "one two 🙂 th"
    assert not any("\ufffd" in piece for piece in pieces)
    shown = ""
    for piece in pieces:
        shown += piece
        # Until the smiley is followed by something else, all from "two" on may be taken away.
        assert shown in ("one two 🙂 th", "one two 🙂 t", "one two 🙂 ") or "two" not in shown


def test_an_unfinished_output_shows_only_what_is_certain(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(stop="dogs")
    feed(completion, tokenizer.encode("the dog"))
    assert completion.output().text == "the "
    assert completion.take_text() == ""
    feed(completion, tokenizer.encode("e"))
    assert completion.output().text == "the doge"


def test_part_of_a_character_is_told_when_the_text_ends(make: Make, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    completion = make(max_tokens=len(ids) - 1)
    pieces = feed(completion, ids)
    assert completion.output().text == "".join(pieces)
    assert completion.output().text.startswith("a\ufffd")
    assert "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_part_of_a_character_before_the_end_token_is_told(
    make: Make, tokenizer: Tokenizer, include: bool
) -> None:
    completion = make(include_stop_str_in_output=include)
    feed(completion, [tokenizer.encode("🙂")[0], EOS])
    assert completion.output().text == "\ufffd"


def test_an_end_from_outside_shows_what_was_held_back(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(stop="dogs")
    pieces = feed(completion, [*tokenizer.encode("the dog"), tokenizer.encode("🙂")[0]])
    completion.end("abort")
    pieces.append(completion.take_text())
    assert completion.output().finish_reason == "abort"
    assert "".join(pieces) == completion.output().text == "the dog\ufffd"


def test_an_end_from_outside_comes_too_late_for_a_finished_one(make: Make) -> None:
    completion = make(stop_token_ids=[70])
    feed(completion, [70])
    completion.end("abort")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 70)


def test_without_detokenizing_there_is_no_text(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(detokenize=False)
    ids = tokenizer.encode("the lazy dog")
    assert "".join(feed(completion, [*ids, EOS])) == ""
    output = completion.output()
    assert (output.text, output.token_ids) == ("", (*ids, EOS))
    assert output.finish_reason == "stop"


def test_logprobs_are_told_per_token_with_rank_and_text(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(logprobs=2)
    feed(completion, [*tokenizer.encode("ab"), EOS], count=1)
    output = completion.output()
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert list(entry) == [token_id, token_id - 1]
        assert [told.rank for told in entry.values()] == [1, 2]
        assert [told.logprob for told in entry.values()] == [-0.5, -1.5]
    assert output.logprobs[-1][EOS].decoded_token == "<|end|>"
    assert output.cumulative_logprob == -0.5 * len(output.token_ids)


def test_an_output_can_leave_out_its_first_tokens(make: Make, tokenizer: Tokenizer) -> None:
    completion = make(logprobs=1)
    feed(completion, [*tokenizer.encode("abc"), EOS], count=0)
    whole, rest = completion.output(), completion.output(since=2, text="rest")
    assert whole.logprobs is not None
    assert (rest.text, rest.token_ids) == ("rest", whole.token_ids[2:])
    assert rest.logprobs == whole.logprobs[2:]
    assert rest.cumulative_logprob == whole.cumulative_logprob


class Grammar:
    """Takes every token but one."""

    def __init__(self, refused: int | None = None) -> None:
        self.accepted: list[int] = []
        self.refused = refused

    def accept(self, token_id: int) -> None:
        if token_id == self.refused:
            raise RequestError("no way on")
        self.accepted.append(token_id)


def test_a_grammar_is_told_each_token_but_the_last(make: Make, tokenizer: Tokenizer) -> None:
    grammar: Any = Grammar()
    completion = make()
    completion.grammar = grammar
    ids = tokenizer.encode("abc")
    feed(completion, [*ids, EOS])
    assert grammar.accepted == ids


def test_a_token_that_the_grammar_refuses_did_not_come(make: Make, tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("a") + tokenizer.encode("b")
    grammar: Any = Grammar(refused=b)
    completion = make(logprobs=0)
    completion.grammar = grammar
    feed(completion, [a], count=0)
    before = completion.output()
    with pytest.raises(RequestError, match="no way on"):
        completion.accept(sampled(b, 0))
    assert completion.output() == before
    assert completion.take_text() == ""


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["two 🙂 x", "ree"]},
        {"stop": "two 🙂 t", "include_stop_str_in_output": True},
        {"max_tokens": 6},
        {"stop_token_ids": [320 - 1], "min_tokens": 4},
    ],
    ids=str,
)
def test_an_interrupt_anywhere_leaves_a_token_out_entirely_or_in(
    make: Make, tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    ids = [*tokenizer.encode("one two 🙂 three"), EOS]
    expected = make(logprobs=1, **params)
    pieces = feed(expected, ids, count=1)
    length = len(expected.token_ids)
    files = {str(completion_module.__file__), str(detokenizer_module.__file__)}

    num_interrupts = 0
    for number in range(length):
        for line in range(sys.maxsize):
            completion = make(logprobs=1, **params)
            told = feed(completion, ids[:number], count=1)
            before = completion.output()
            token = sampled(ids[number], 1)
            if not interrupted_at(line, lambda c=completion, t=token: c.accept(t), files):
                break
            num_interrupts += 1
            if len(completion.token_ids) == number:
                assert completion.output() == before
                told += feed(completion, ids[number:], count=1)
            else:
                told += [completion.take_text(), *feed_rest(completion, ids[number + 1 :])]
            assert completion.output() == expected.output()
            assert "".join(told) == "".join(pieces)
    assert num_interrupts > 10 * length


def feed_rest(completion: Completion, token_ids: Sequence[int]) -> list[str]:
    return [] if completion.finished else feed(completion, token_ids, count=1)
