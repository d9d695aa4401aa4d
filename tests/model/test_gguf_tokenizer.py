"""A tokenizer rebuilt from GGUF metadata splits, merges and marks text as the model was taught."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.helpers import GGUF_MERGES, GGUF_SPECIALS, GGUF_TOKENS, GGUF_TYPES, write_gguf
from tokenizers import Tokenizer

from torpor.errors import CheckpointError, ConfigError
from torpor.model.checkpoints.gguf_header import read_gguf_header
from torpor.model.checkpoints.gguf_tokenizer import TokenizerFiles, build_tokenizer


def rebuilt(folder: Path, **metadata: object) -> TokenizerFiles:
    names = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    if "chat_template" in metadata:
        names["tokenizer.chat_template"] = names.pop("tokenizer.ggml.chat_template")
    write_gguf(folder / "tiny.gguf", metadata=names)
    return build_tokenizer(read_gguf_header(folder / "tiny.gguf"))


def tokens(files: TokenizerFiles, text: str) -> list[str]:
    encoded: list[str] = Tokenizer.from_str(files.tokenizer_json).encode(text).tokens
    return encoded


def test_ids_are_the_vocabularys(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(rebuilt(tmp_path).tokenizer_json)
    assert tokenizer.get_vocab_size() == len(GGUF_TOKENS)
    assert [tokenizer.id_to_token(index) for index in range(len(GGUF_TOKENS))] == GGUF_TOKENS


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["hello", "Ġw", "ing", "Ġ", "1", "2", "1"]),
        ("gpt-2", ["hello", "Ġw", "ing", "Ġ", "12", "1"]),
        ("llama-bpe", ["hello", "Ġw", "ing", "Ġ", "12", "1"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    files = rebuilt(tmp_path, pre=pre, add_bos_token=False)
    assert tokens(files, "hello wing 121") == expected


def test_llama3_takes_a_whole_word_that_is_a_token(tmp_path: Path) -> None:
    words = [*GGUF_TOKENS[:-1], "zebra"]
    kinds = [*GGUF_TYPES[:-1], 1]
    files = rebuilt(tmp_path, pre="llama-bpe", tokens=words, token_type=kinds)
    assert tokens(files, "zebra") == ["<|begin|>", "zebra"]
    files = rebuilt(tmp_path, pre="gpt-2", tokens=words, token_type=kinds)
    assert tokens(files, "zebra") == list("zebra")


def test_control_and_user_defined_tokens_are_never_split(tmp_path: Path) -> None:
    files = rebuilt(tmp_path)
    text = "hello<|end|>12<tool>"
    assert tokens(files, text) == ["hello", "<|end|>", "1", "2", "<tool>"]
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello12<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_without_token_types_the_tokens_with_a_role_are_special(tmp_path: Path) -> None:
    files = rebuilt(tmp_path, token_type=None)
    assert tokens(files, "in<|end|>") == ["in", "<|end|>"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ["in"]),
        ({"add_bos_token": True}, ["<|begin|>", "in"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>", "in", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|begin|>", "in"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["in"]),
    ],
)
def test_prompts_begin_and_end_as_the_file_says(
    tmp_path: Path, metadata: dict[str, object], expected: list[str]
) -> None:
    assert tokens(rebuilt(tmp_path, **metadata), "in") == expected


def test_the_tokenizer_config_names_roles_and_template(tmp_path: Path) -> None:
    config = rebuilt(tmp_path, chat_template="{{ x }}").tokenizer_config
    assert config["chat_template"] == "{{ x }}"
    roles = ("bos_token", "eos_token", "pad_token")
    assert [config[role] for role in roles] == ["<|begin|>", "<|end|>", "<|pad|>"]
    assert "unk_token" not in config
    assert "chat_template" not in rebuilt(tmp_path, chat_template=None).tokenizer_config


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'.*tokenizer\.json"),
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"pre": "klingon"}, r"tokenizer\.ggml\.pre is 'klingon'; it must be 'gpt-2' or"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"eos_token_id": 10**6}, r"eos_token_id is 1000000; it must be a whole number from 0"),
        ({"bos_token_id": None, "add_bos_token": True}, "are to have a bos_token, but none"),
        ({"chat_template": 5}, "chat_template is 5"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_named(
    tmp_path: Path, metadata: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        rebuilt(tmp_path, **metadata)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is None, not a list of strings"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is \[1, 2\]"),
        ({"tokens": [*GGUF_TOKENS, "in"]}, "repeats 1 of them"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is None"),
        ({"merges": ["he"]}, "merge 'he' is not two tokens"),
        ({"merges": [*GGUF_MERGES, "x yz"]}, "do not fit together"),
        ({"token_type": GGUF_TYPES[:-1]}, "token_type does not match"),
        ({"token_type": "x"}, "token_type does not match"),
    ],
)
def test_a_damaged_vocabulary_is_refused(
    tmp_path: Path, metadata: dict[str, object], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        rebuilt(tmp_path, **metadata)


def test_a_byte_without_a_token_is_left_out(tmp_path: Path) -> None:
    words = ["<none>" if token == "q" else token for token in GGUF_TOKENS]
    assert tokens(rebuilt(tmp_path, tokens=words), "a quiz") == ["a", "Ġ", "u", "i", "z"]


def test_special_tokens_come_from_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(rebuilt(tmp_path).tokenizer_json)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {*GGUF_SPECIALS, "<tool>"}
