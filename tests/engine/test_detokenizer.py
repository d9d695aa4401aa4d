from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from torpor.engine.text.detokenizer import Detokenizer, StopStrings
from torpor.engine.text.tokenizer import Tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(text=st.text(max_size=40))
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == text


@given(ids=st.lists(st.integers(0, 299), max_size=40))
def test_pieces_join_to_the_decoded_whole_for_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    text = "é 日本 🙂"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces = pieces_of(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "🙂" in pieces
    assert pieces[-1] == ""


def test_part_of_a_character_appears_when_the_text_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert set(pieces[1:-1]) == {""}
    assert pieces[0] == "a"
    assert pieces[-1].startswith("\ufffd")


def test_special_tokens_are_left_out_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), 2, 2, *tokenizer.encode(" two")]
    assert "".join(pieces_of(tokenizer, ids)) == "one two"
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(map(detokenizer.push, ids)) == "one<|pad|><|pad|> two"


def test_a_space_that_belongs_to_a_word_survives_a_special_token(tmp_path: Path) -> None:
    # Such tokenizers drop the space of the first word they decode, so the window must not begin
    # at a word that comes later.
    vocab = {"▁one": 0, "▁two": 1, "<pad>": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert pieces_of(tokenizer, [2, 0, 2, 2, 1]) == ["", "one", "", "", " two", ""]


def test_a_stop_string_cuts_the_text() -> None:
    stops = StopStrings(["END"])
    assert stops.push("one EN") is None
    assert stops.push("D two") == "END"
    assert stops.text == "one "


def test_a_stop_string_can_be_kept() -> None:
    stops = StopStrings(["END"], include=True)
    assert stops.push("one END two") == "END"
    assert stops.text == "one END"


def test_the_stop_string_that_completes_first_wins() -> None:
    assert StopStrings(["abcd", "b"]).push("abcd") == "b"
    # Both end at the same place: the longer one cuts more.
    assert StopStrings(["bc", "abc"]).push("xabc") == "abc"


def test_text_before_the_search_is_not_a_stop_string() -> None:
    stops = StopStrings(["ab"])
    assert stops.push("ab a", search=False) is None
    assert stops.push("b") == "ab"
    assert stops.text == "ab "


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["\n\nQ:", "###"])
    lengths = []
    for text in ("one", "\n", "\n", "Q", "x", "##", "a"):
        stops.push(text)
        lengths.append(len(stops.text) - stops.certain_length())
    assert lengths == [0, 1, 2, 3, 0, 2, 0]
    kept = StopStrings(["ab"], include=True)
    kept.push("a")
    assert kept.certain_length() == 1


@pytest.mark.parametrize("include", [False, True])
@given(
    text=st.text("ab", max_size=25),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 5),
)
def test_the_cut_does_not_depend_on_the_pieces(
    include: bool, text: str, stop: list[str], seed: int
) -> None:
    whole = StopStrings(stop, include=include)
    found = whole.push(text)
    source = random.Random(seed)
    parts = StopStrings(stop, include=include)
    shown, start, stopped = "", 0, None
    while start < len(text) and stopped is None:
        end = source.randint(start, len(text))
        stopped = parts.push(text[start:end])
        start = end
        certain = len(parts.text) if stopped else parts.certain_length()
        assert parts.text.startswith(shown), "text that was shown was taken back"
        shown = parts.text[:certain]
    assert (stopped, parts.text) == (found, whole.text)
