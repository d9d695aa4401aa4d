"""Folders of tiny openPangu models, with a tokenizer of one word per id."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tests.openpangu.models import MODELS, write_model


def write_words(folder: Path, vocab_size: int) -> None:
    """A tokenizer of one word per id."""
    words = {f"w{index}": index for index in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


class Folders:
    """Model folders by kind and seed, each written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._written: dict[tuple[str, int], Path] = {}

    def __call__(self, kind: str, seed: int = 0) -> Path:
        key = kind, seed
        if key not in self._written:
            config = MODELS[kind]
            folder = write_model(self._root / f"{len(self._written)}", config, seed)
            write_words(folder, config["vocab_size"])
            self._written[key] = folder
        return self._written[key]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("openpangu"))
