"""The embedded model, converted once into the cache that stays between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.helpers import write_folder, write_gguf

from torpor.model.checkpoints.files import ModelFiles
from torpor.model.checkpoints.resolve import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """The embedded model's files."""
    return resolve_model("smollm2")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORPOR_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama in one safetensors file."""
    return write_folder(tmp_path / "tiny")


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A tiny Llama in a GGUF file."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path
