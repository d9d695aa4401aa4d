"""Converts a GGUF file into a Hugging Face folder with a digest for every byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from torpor.errors import CheckpointError
from torpor.model.checkpoints.files import Progress
from torpor.model.checkpoints.gguf_file import GgufFile, special_ids
from torpor.model.checkpoints.gguf_tokenizer import build_tokenizer
from torpor.model.checkpoints.load import checkpoint_shapes, new_model
from torpor.model.checkpoints.manifest import write_manifest
from torpor.model.checkpoints.safetensors_source import SINGLE_FILE
from torpor.model.checkpoints.safetensors_writer import write_safetensors

DTYPE = torch.float32
"""Converted weights are float32: what a CPU computes in, and exact for every quantised type."""


def convert_gguf(
    path: Path, folder: Path, *, origin: str, progress: Progress | None = None
) -> None:
    """Write config, tokenizer, weights and manifest of a GGUF file into an existing folder.

    Args:
        path: the GGUF file.
        folder: an empty folder.
        origin: identity of the source file, recorded in the manifest.
        progress: told of the stage ``convert``.

    Raises:
        CheckpointError: the file is damaged or its parts do not fit together.
        ConfigError: it holds a model or tokenizer that torpor does not know.
        OSError: the folder cannot be written; the caller removes it.
    """
    gguf = GgufFile(path)
    tokenizer = build_tokenizer(gguf.header)
    if tokenizer.vocab_size != gguf.config.vocab_size:
        raise CheckpointError(
            f"{path} has {tokenizer.vocab_size} tokens and {gguf.config.vocab_size} rows of "
            "embedding; fetch it again"
        )
    # Layer order, with fused parts side by side: a fused parameter is one run of the file.
    shapes = checkpoint_shapes(new_model(gguf.config, DTYPE))
    pairs = _reported(gguf, list(shapes), progress)
    digests = write_safetensors(folder / SINGLE_FILE, shapes, DTYPE, pairs)
    _write_json(folder / "config.json", gguf.config_json)
    _write_json(folder / "generation_config.json", special_ids(gguf.header))
    _write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config)
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    write_manifest(folder, origin, digests)


def _reported(
    gguf: GgufFile, names: list[str], progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    total, done = gguf.num_parameters * DTYPE.itemsize, 0
    if progress:
        progress("convert", 0, total)
    for name in names:
        tensor = gguf.tensor(name, DTYPE)
        yield name, tensor
        done += tensor.nbytes
        if progress:
            progress("convert", done, total)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")
