"""The family's SentencePiece tokenizer: the library's ids, whole characters, special tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tests.openpangu.pieces import END, THINK, TURN, trained, write_pieces

from torpor.engine.sampling.grammar import GrammarCompiler
from torpor.engine.text.detokenizer import Detokenizer
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import CheckpointError, ConfigError, ModelNotFoundError
from torpor.params import StructuredOutputsParams

TEXTS = [
    "the lazy dog",
    "  spaces   inside  ",
    "你好 世界、睡眠",
    "🙂 é 日本\n\ttabs\x00",
    "[unused1] unused9]",
    "",
]
SPECIAL = st.sampled_from([TURN, END, THINK, "<s>", "</s>", "<unk>"])
MIXED = st.lists(st.text(max_size=6) | SPECIAL | st.sampled_from([" ", "   ", "睡", "🙂"]))


def load(folder: Path, **options: Any) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.model", folder / "tokenizer_config.json", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


@pytest.fixture(scope="module")
def library(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def squeezing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As models are that drop every space a text begins with."""
    model = trained(remove_extra_whitespaces=True)
    return load(write_pieces(tmp_path_factory.mktemp("squeezing"), model=model))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_librarys(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    assert tokenizer.decode(ids) == text


@given(text=st.text())
def test_any_text_has_the_librarys_ids_and_survives(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not any(word in text for word in (TURN, END, THINK, "<s>", "</s>", "<unk>")):
        assert ids == library.encode(text)
    # The library writes a space so, and cannot tell it from the character itself.
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_special_tokens_cut_the_text_as_the_models_own_tokenizer_does(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor
) -> None:
    text = f"{TURN}用户：the dog{END}{TURN} 助手"  # noqa: RUF001
    turn, end = library.piece_to_id(TURN), library.piece_to_id(END)
    expected = [turn, *library.encode("用户：the dog"), end, turn, *library.encode(" 助手")]  # noqa: RUF001
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "用户：the dog  助手"  # noqa: RUF001
    assert tokenizer.decode([end], skip_special_tokens=False) == END


def test_one_begin_token_and_no_end(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [1, *plain]
    assert tokenizer.encode("<s>the dog") == [1, *plain]
    assert tokenizer.encode_chat("the dog") == tokenizer.encode_chat("<s>the dog") == [1, *plain]
    assert tokenizer.encode("") == [1]


def test_what_the_config_adds_is_followed(folder: Path, tmp_path: Path) -> None:
    model = (folder / "tokenizer.model").read_bytes()
    off = load(write_pieces(tmp_path, model=model, add_bos_token=False, add_eos_token=True))
    ids = off.encode("the", add_special_tokens=False)
    assert off.encode("the") == [*ids, off.eos_token_id]
    assert off.encode_chat("the") == ids


def test_special_tokens_have_ids_by_name(
    tokenizer: Tokenizer, library: sentencepiece.SentencePieceProcessor
) -> None:
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == library.piece_to_id(END)
    assert tokenizer.vocab_size == library.get_piece_size() == 380


def test_without_a_config_the_models_own_names_hold(folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.model")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("</s>the")[:2] == [1, 2]


def test_tokens_beyond_the_model_and_their_spaces(folder: Path, tmp_path: Path) -> None:
    model = (folder / "tokenizer.model").read_bytes()
    more = {
        "400": {"content": "<tool>", "special": False, "lstrip": True, "rstrip": True},
        "401": {"content": "<tool>x", "special": True, "single_word": True},
    }
    tokenizer = load(write_pieces(tmp_path, model=model, added_tokens_decoder=more))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.vocab_size == 402
    assert tokenizer.encode("the  <tool> the", add_special_tokens=False) == [*plain, 400, *plain]
    assert tokenizer.encode("<tool>x", add_special_tokens=False) == [401]
    assert tokenizer.encode("<tool>xy", add_special_tokens=False)[0] == 400
    assert tokenizer.decode([*plain, 400, 401, 390, 9999, -1]) == "the<tool>"


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["tokenizer", "squeezing"])
@given(ids=st.lists(st.integers(0, 379) | st.integers(340, 379), max_size=30))
def test_pieces_join_to_the_decoded_whole(
    request: pytest.FixtureRequest, name: str, skip: bool, ids: list[int]
) -> None:
    tokenizer = request.getfixturevalue(name)
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@given(parts=MIXED)
def test_no_piece_of_a_text_ends_within_a_character(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts).replace("▁", "").replace("\ufffd", "")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids, skip=False)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_bytes_comes_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    assert [piece for piece in streamed(tokenizer, ids, skip=True) if piece] == ["a", "🙂"]
    assert streamed(tokenizer, ids[:-1], skip=True)[-1].startswith("\ufffd")


def test_spaces_one_by_one_are_kept_where_leading_ones_are_dropped(squeezing: Tokenizer) -> None:
    tokens = [squeezing.encode(text, add_special_tokens=False)[-1] for text in ("za", "zb")]
    space = squeezing._backend.token_to_id("▁")
    assert space is not None
    ids = [tokens[0], space, space, tokens[1]]
    assert squeezing.decode(ids) == "a  b"
    assert "".join(streamed(squeezing, ids, skip=True)) == "a  b"


def test_a_missing_library_is_named_with_its_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'torpor\[sentencepiece\]'"):
        load(folder)


@pytest.mark.parametrize("data", [b"", b"junk", b"\x0a\x05hello"])
def test_a_damaged_model_is_refused(folder: Path, tmp_path: Path, data: bytes) -> None:
    write_pieces(tmp_path, model=(folder / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer.model is damaged"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.model cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"1": {"content": 3}}),
        ("added_tokens_decoder", {"1": "a"}),
        ("added_tokens_decoder", {"1": {"content": ""}}),
        ("add_bos_token", "yes"),
        ("legacy", False),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(
    folder: Path, tmp_path: Path, field: str, value: object
) -> None:
    model = (folder / "tokenizer.model").read_bytes()
    write_pieces(tmp_path, model=model, **{field: value})
    with pytest.raises(ConfigError, match=field):
        load(tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_structured_output_follows_its_tokens(tokenizer: Tokenizer, seed: int) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    choices = ["the 睡眠", "dog🙂"]
    compiler = GrammarCompiler(tokenizer, 400, [end])
    grammar = compiler.compile(StructuredOutputsParams(choice=choices))
    chosen = random.Random(seed)
    ids: list[int] = []
    while (allowed := grammar.mask().nonzero().flatten().tolist()) != [end]:
        assert end not in allowed
        ids.append(chosen.choice(allowed))
        grammar.accept(ids[-1])
    assert tokenizer.decode(ids, skip_special_tokens=False) in choices


def with_mask(folder: Path, **options: bool) -> Tokenizer:
    return load(write_pieces(folder, added_tokens_decoder={"400": {"content": "<m>", **options}}))


def test_a_token_takes_the_spaces_before_it_once_however_many(tmp_path: Path) -> None:
    tokenizer = with_mask(tmp_path, lstrip=True)
    plain = tokenizer.encode("a", add_special_tokens=False)
    for spaces in ("", " ", " \n\t ", " " * 100):
        ids = tokenizer.encode(f"a{spaces}<m>{spaces}<m>", add_special_tokens=False)
        assert ids == [*plain, 400, 400]
    # Quadratic time would be minutes.
    assert len(tokenizer.encode(" " * 300_000 + "x", add_special_tokens=False)) > 1


def test_a_begin_token_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bos_token is 'nope'; it must be a token of the vocab"):
        load(write_pieces(tmp_path, bos_token="nope"))
    load(write_pieces(tmp_path, bos_token="nope", add_bos_token=False))
