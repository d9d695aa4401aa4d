"""A Hugging Face safetensors folder, single or sharded, as a weight source."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch
import xxhash

from torpor.errors import CheckpointError
from torpor.model.checkpoints.safetensors_header import (
    SafetensorsHeader,
    TensorEntry,
    header_digest,
    no_memory_for,
    read_header,
)
from torpor.model.config.fields import read_json_object
from torpor.sleep.source import FileExtent

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsSource:
    """Every tensor of a safetensors folder, read from the files each time it is asked.

    Implements `torpor.sleep.source.WeightSource`.
    """

    def __init__(self, folder: Path, *, digests: Mapping[str, str] | None = None) -> None:
        """Read and check the headers; no tensor is read.

        Args:
            folder: holds ``model.safetensors`` or ``model.safetensors.index.json`` and its shards.
            digests: xxh3_128 hex digest of every tensor's raw bytes, checked by `pairs`.

        Raises:
            CheckpointError: no such file; a damaged header or index; a missing shard; a tensor
                that its shard lacks, that the index lacks, or that two shards hold; digests that
                name other tensors than the files.
        """
        self.folder = folder
        self._headers = _read_folder(folder)
        self._where: Mapping[str, tuple[SafetensorsHeader, TensorEntry]] = _locate(self._headers)
        self._digests = MappingProxyType(dict(digests)) if digests is not None else None
        if self._digests is not None and self._digests.keys() != self._where.keys():
            odd = sorted(self._digests.keys() ^ self._where.keys())
            raise CheckpointError(
                f"{folder}: tensors and recorded digests differ in {len(odd)} names, first "
                f"{odd[0]!r}; fetch or convert the model again"
            )

    @classmethod
    def without_files(cls, folder: Path) -> Self:
        """A source of no tensors, for a folder whose weights nobody reads."""
        made = cls.__new__(cls)
        made.folder = folder
        made._headers, made._where, made._digests = (), {}, None
        return made

    def names(self) -> Collection[str]:
        """Every tensor name, in file order."""
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self._where[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header."""
        return self._where[name][1].dtype

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for _, entry in self._where.values())

    def extent(self, name: str) -> FileExtent | None:
        """Where a tensor's raw bytes lie, or None when no file holds that name."""
        if name not in self._where:
            return None
        header, entry = self._where[name]
        return FileExtent(
            path=header.path, offset=entry.offset, nbytes=entry.nbytes, dtype=entry.dtype
        )

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor) once, in file order, checked against its digest if known.

        A tensor is a private view of the file's mapping: reading it costs page cache, not memory of
        its own. Its pages leave the process when the next tensor is asked for, and come back by
        themselves if it is read after that; what was written into it does not.

        Raises:
            CheckpointError: a file changed, shrank or vanished since this source was made, or a
                tensor's bytes differ from the recorded digest.
        """
        for header in self._headers:
            _check_unchanged(header)
            mapping = _map_file(header.path)
            for name, entry in header.entries.items():
                tensor = _view(mapping, entry)
                self._verify(name, tensor, header.path)
                yield name, tensor
                del tensor
                _drop_pages(mapping, entry)

    def _verify(self, name: str, tensor: torch.Tensor, path: Path) -> None:
        if self._digests is None:
            return
        found, expected = tensor_digest(tensor), self._digests[name]
        if found != expected:
            raise CheckpointError(
                f"{path}: the bytes of {name!r} have digest {found}, recorded was {expected}; "
                "fetch or convert the model again"
            )


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3_128 hex digest of a CPU tensor's bytes in row-major order."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(raw.numpy().data)


def _read_folder(folder: Path) -> tuple[SafetensorsHeader, ...]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return (read_header(single),)
    if index.exists():
        return _read_shards(folder, index)
    raise CheckpointError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; torpor reads safetensors folders "
        "and .gguf files: save the model in one of these formats"
    )


def _read_shards(folder: Path, index: Path) -> tuple[SafetensorsHeader, ...]:
    weight_map = _weight_map(index)
    headers = []
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names shard {shard!r}, which is missing; fetch it")
        header = read_header(folder / shard)
        listed = {name for name, owner in weight_map.items() if owner == shard}
        _check_listed(index, header, listed)
        headers.append(header)
    return tuple(headers)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                f"{index} places {name!r} in {shard!r:.80}, which is not the name of a file beside "
                "it; fetch it again"
            )
    return weight_map


def _is_file_name(text: str) -> bool:
    return Path(text).name == text and text not in ("", "..") and "\0" not in text


def _check_listed(index: Path, header: SafetensorsHeader, listed: set[str]) -> None:
    lacking = sorted(listed - header.entries.keys())
    if lacking:
        raise CheckpointError(
            f"{index} places {lacking[0]!r} in {header.path.name}, which lacks it "
            f"({len(lacking)} such names); fetch the index and the shard again"
        )
    extra = sorted(header.entries.keys() - listed)
    if extra:
        raise CheckpointError(
            f"{header.path} holds {extra[0]!r}, which {index.name} does not place there "
            f"({len(extra)} such names); fetch the index and the shard again"
        )


def _locate(
    headers: tuple[SafetensorsHeader, ...],
) -> dict[str, tuple[SafetensorsHeader, TensorEntry]]:
    return {name: (header, entry) for header in headers for name, entry in header.entries.items()}


def _check_unchanged(header: SafetensorsHeader) -> None:
    # A mapping of a file that shrank would end the process, so look before mapping.
    if header_digest(header.path) != (header.file_bytes, header.digest):
        raise CheckpointError(
            f"{header.path} has changed since it was opened; open the model again"
        )


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Private and writable: torch has no read-only tensors, and a stray write stays here.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise no_memory_for(path, error) from error
        raise CheckpointError(f"{path} cannot be mapped ({error}); fetch it again") from error


def _view(mapping: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw = torch.frombuffer(mapping, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    if entry.offset % entry.dtype.itemsize:
        # The format does not promise alignment; torch needs it.
        raw = raw.clone()
    return raw.view(entry.dtype).reshape(entry.shape)


def _drop_pages(mapping: mmap.mmap, entry: TensorEntry) -> None:
    start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = entry.offset + entry.nbytes - start
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED, start, length)
