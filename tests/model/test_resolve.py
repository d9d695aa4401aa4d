"""A name or path becomes a model's files, or an error that says what would have worked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.helpers import write_folder, write_shards

from torpor.errors import CheckpointError, ConfigError, ModelNotFoundError
from torpor.model.checkpoints.resolve import resolve_model


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    files = resolve_model(str(folder))
    assert files.folder == folder
    assert not files.converted
    assert files.tokenizer_json is None
    assert files.tokenizer_config_json is None
    assert files.chat_template is None
    assert files.config.hidden_size == 32
    assert "model.norm.weight" in files.source.names()


def test_the_files_beside_the_weights_are_found(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    files = resolve_model(folder)
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.tokenizer_config_json == folder / "tokenizer_config.json"
    assert files.chat_template == folder / "chat_template.jinja"


def test_a_sharded_folder_is_taken_too(tmp_path: Path) -> None:
    assert "lm_head.weight" not in resolve_model(write_shards(tmp_path / "s")).source.names()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"model 'gpt-7' does not exist.*smollm2"):
        resolve_model("gpt-7")


def test_a_file_of_another_kind_is_refused(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is neither a folder nor a \.gguf file"):
        resolve_model(folder / "model.safetensors")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        resolve_model(tmp_path)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        resolve_model(folder)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    config = (folder / "config.json").read_text().replace("LlamaForCausalLM", "MambaForCausalLM")
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="'MambaForCausalLM' is unknown; torpor runs Llama"):
        resolve_model(folder)


def test_the_ending_of_a_gguf_may_be_in_capitals(tiny_gguf: Path, cache: Path) -> None:
    assert resolve_model(tiny_gguf.rename(tiny_gguf.with_suffix(".GGUF"))).converted


def test_a_gguf_that_is_none_is_a_checkpoint_error(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="starts with b'not '"):
        resolve_model(tmp_path / "x.gguf")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b"], ids=["long", "longer", "null"])
def test_a_name_that_no_path_can_be_is_of_no_model(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="cannot be looked up") as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 500 + len(name)
