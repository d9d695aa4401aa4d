"""What a model name or path resolves to, and how long work on it reports its progress."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torpor.model.checkpoints.safetensors_source import SafetensorsSource
from torpor.model.config.config import ModelConfig


class Progress(Protocol):
    """Is told how far a long stage has come, for a progress bar."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Called at the start, on the way and at the end of a stage.

        Args:
            stage: ``check`` (hashing a source), ``convert`` or ``verify``.
            done: bytes done so far.
            total: bytes in all.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on disk, its config and headers read and checked."""

    name: str
    """What the caller asked for."""
    folder: Path
    config: ModelConfig
    source: SafetensorsSource
    tokenizer_json: Path | None
    """None when the folder has none."""
    tokenizer_model: Path | None
    """``tokenizer.model`` of SentencePiece; ``tokenizer.json`` wins over it."""
    tokenizer_config_json: Path | None
    """``tokenizer_config.json``: special tokens and, mostly, the chat template."""
    chat_template: Path | None
    """``chat_template.jinja``, where newer folders keep the template."""
    converted: bool
    """True when the folder is torpor's own cache, whose every byte has a recorded digest."""
