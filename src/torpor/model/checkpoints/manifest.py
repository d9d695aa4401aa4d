"""The manifest of a converted model: one digest for every byte of the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from torpor.errors import CheckpointError
from torpor.model.checkpoints.files import Progress
from torpor.model.checkpoints.safetensors_header import header_digest
from torpor.model.checkpoints.safetensors_source import SINGLE_FILE, SafetensorsSource
from torpor.model.config.fields import read_json_object

MANIFEST_FILE = "manifest.json"
FORMAT = 1
"""Grows when the content of a converted folder would change."""

_REMEDY = "the cache is damaged; it is made again from its source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a converted folder was made from and what every byte of it must be."""

    origin: str
    """Identity of the source file."""
    files: Mapping[str, str]
    """xxh3_128 of every small file, and of the header of the weights file."""
    tensors: Mapping[str, str]
    """xxh3_128 of every tensor's bytes."""


def write_manifest(folder: Path, origin: str, tensors: Mapping[str, str]) -> None:
    """Record the digests of a finished folder.

    Raises:
        OSError: the manifest cannot be written.
    """
    files = {path.name: _file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    content: dict[str, object] = {
        "format": FORMAT,
        "origin": origin,
        "files": files,
        "tensors": dict(tensors),
    }
    content["digest"] = _content_digest(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and check it against its own digest.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    path = folder / MANIFEST_FILE
    content = read_json_object(path, CheckpointError)
    recorded = content.pop("digest", None)
    if recorded != _content_digest(content):
        raise CheckpointError(f"{path} does not match its own digest {recorded!r:.80}; {_REMEDY}")
    files, tensors, origin = content.get("files"), content.get("tensors"), content.get("origin")
    if (
        content.get("format") != FORMAT
        or not isinstance(files, dict)
        or not isinstance(tensors, dict)
        or not isinstance(origin, str)
    ):
        raise CheckpointError(f"{path} has format {content.get('format')!r:.80}; {_REMEDY}")
    return Manifest(origin=origin, files=files, tensors=tensors)


def open_verified(folder: Path, origin: str, progress: Progress | None = None) -> SafetensorsSource:
    """Compare every byte of a converted folder with its manifest.

    Args:
        folder: the converted model.
        origin: identity its source must have.
        progress: told of the stage ``verify``.

    Returns:
        The folder's weights, which check themselves again at every reading.

    Raises:
        CheckpointError: anything is missing, changed, or made from another origin.
    """
    manifest = read_manifest(folder)
    if manifest.origin != origin:
        raise CheckpointError(
            f"{folder} was made from {manifest.origin}, the source is now {origin}; "
            "it is made again"
        )
    for name, recorded in manifest.files.items():
        found = _file_digest(folder / name)
        if found != recorded:
            raise CheckpointError(
                f"{folder / name} has digest {found}, recorded was {recorded}; {_REMEDY}"
            )
    source = SafetensorsSource(folder, digests=manifest.tensors)
    total, done = source.total_bytes, 0
    if progress:
        progress("verify", 0, total)
    for _, tensor in source.pairs():
        done += tensor.nbytes
        if progress:
            progress("verify", done, total)
    return source


def _file_digest(path: Path) -> str:
    """Digest of a small file, or of the header of the weights file: tensors have their own."""
    if path.name == SINGLE_FILE:
        return header_digest(path)[1]
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {_REMEDY}") from error


def _content_digest(content: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
