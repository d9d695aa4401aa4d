from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.engine.conftest import TEMPLATE

from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import CheckpointError, ConfigError, RequestError


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / name)
    return tmp_path


def load(folder: Path) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.json", folder / "tokenizer_config.json")


def change_config(folder: Path, **values: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    for text in ("the lazy dog", "  spaces  ", "日本語 🙂", "\x00\r\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_known_by_name_and_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.vocab_size == 300


def test_special_tokens_in_a_text_become_one_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|end|>") == [1]
    assert tokenizer.decode([1]) == ""
    assert tokenizer.decode([1], skip_special_tokens=False) == "<|end|>"


def test_unknown_ids_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([310]) == ""


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)


def test_a_text_that_is_no_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the text is 7"):
        tokenizer.encode(7)  # type: ignore[arg-type]


def test_truncation_and_padding_left_by_training_are_switched_off(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    document["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    path.write_text(json.dumps(document))
    tokenizer = load(folder)
    text = "the quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_a_tokenizer_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b'{"version": "\xff"}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not UTF-8 .*fetch the file"):
        load(folder)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_tokenizer_is_refused(folder: Path, fraction: float) -> None:
    path = folder / "tokenizer.json"
    text = path.read_text()
    path.write_text(text[: int(len(text) * fraction)])
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"model": {"type": "BPE"}}', "7"])
def test_json_that_is_no_tokenizer_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)


def test_a_missing_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        load(folder)


def test_a_damaged_tokenizer_config_is_refused(folder: Path) -> None:
    for data in (b"{", b"[]", b'{"a": "\xff"}'):
        (folder / "tokenizer_config.json").write_bytes(data)
        with pytest.raises(ConfigError, match=r"tokenizer_config.json"):
            load(folder)


@pytest.mark.parametrize(
    "values", [{"eos_token": 7}, {"bos_token": ["a"]}, {"chat_template": 7}], ids=str
)
def test_a_config_field_of_the_wrong_type_is_refused(
    folder: Path, values: dict[str, object]
) -> None:
    change_config(folder, **values)
    with pytest.raises(ConfigError, match=next(iter(values))):
        load(folder)


def test_a_tokenizer_works_without_its_config(folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    assert tokenizer.eos_token_id is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_file_wins_over_the_config(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text("{{ messages[0].content }}!")
    tokenizer = Tokenizer(folder / "tokenizer.json", folder / "tokenizer_config.json", path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="jinja is not UTF-8"):
        Tokenizer(folder / "tokenizer.json", None, path)


def test_of_several_named_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    change_config(folder, chat_template=named)
    assert load(folder).chat_template == "d"
    change_config(folder, chat_template=named[:1])
    assert load(folder).chat_template is None


def test_chat_text_ends_with_the_assistant_header_when_asked(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = "<|start|>user\nhi<|end|>\n"
    assert tokenizer.apply_chat_template(messages) == f"{asked}<|start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == asked


def test_a_callers_template_is_used_instead(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], chat_template="{{ bos_token }}{{ messages|length }}"
    )
    assert text == "<|start|>1"
    assert tokenizer.chat_template == TEMPLATE
