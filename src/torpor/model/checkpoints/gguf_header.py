"""The header of a GGUF file, read with every count and length checked against the file's size.

The gguf library's reader trusts the file: a damaged length makes it loop or read past the end, and
a vocabulary takes it seconds. So the header is read here, and the library is used for what the
numbers mean: tensor types, block sizes and dequantisation.

Format (versions 2 and 3, little-endian): magic, version, tensor count, metadata count, metadata
(key, type, value), tensor infos (name, dims, type, offset), padding to the alignment, tensor data.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from torpor.errors import CheckpointError, TorporError
from torpor.model.checkpoints.gguf_types import tensor_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_METADATA = 65_536
MAX_TENSORS = 1_000_000
MAX_ARRAY = 4_000_000
"""Elements of one metadata array; the largest vocabularies have about a million merges."""
MAX_KEY_BYTES = 65_535
MAX_DIMS = 4

_REMEDY = "the file is damaged or cut short; fetch it again"

_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Metadata value type to its struct code."""
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of a file, still quantised."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as torch counts: the file stores dimensions the other way round."""
    kind: int
    """The format's type code, one of the gguf library's ``GGMLQuantizationType``."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of one file."""

    path: Path
    metadata: Mapping[str, object]
    """Key to int, float, bool, str, or a list of one of these."""
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        CheckpointError: the file cannot be read; magic, version, byte order, a count, a length, a
            type, a key, a shape or an offset is not what the format allows in a file of this size.
        ModelNotFoundError: the gguf library is not installed.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file, os.fstat(file.fileno()).st_size).header()
    except TorporError:
        raise  # a missing library is an OSError too
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from error


class _Reader:
    """Walks the header once, front to back."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._at = 0

    def header(self) -> GgufHeader:
        self._check_magic()
        num_tensors = self._count("tensors", MAX_TENSORS, least_bytes=24)
        num_metadata = self._count("metadata entries", MAX_METADATA, least_bytes=13)
        metadata: dict[str, object] = {}
        for _ in range(num_metadata):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"metadata key {key!r:.80} appears twice")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return GgufHeader(
            path=self._path,
            metadata=MappingProxyType(metadata),
            tensors=MappingProxyType(self._place(infos, _alignment(self._error, metadata))),
        )

    def _check_magic(self) -> None:
        magic = self._take(4, "the magic")
        if magic != MAGIC:
            raise self._error(f"it starts with {magic!r}, not with {MAGIC!r}")
        version = self._uint(4, "the version")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF; torpor reads little-endian ones: convert it"
            )
        if version not in VERSIONS:
            known = " and ".join(str(entry) for entry in VERSIONS)
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; torpor reads {known}: convert it again "
                "with a current tool, or fetch it again if it should be one of these"
            )

    def _value(self, key: str) -> object:
        kind = self._uint(4, f"the type of {key!r:.80}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._string(f"the value of {key!r:.80}", self._size)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str) -> list[object]:
        kind = self._uint(4, f"the element type of {key!r:.80}")
        count = self._count(f"elements of {key!r:.80}", MAX_ARRAY, least_bytes=1)
        if kind != _STRING:
            return self._scalars(key, kind, count)
        what = f"an element of {key!r:.80}"
        return [self._string(what, self._size) for _ in range(count)]

    def _scalars(self, key: str, kind: int, count: int) -> list[object]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._error(f"{key!r:.80} has the unknown value type {kind}")
        layout = struct.Struct(f"<{count}{code}")
        raw = self._take(layout.size, f"{count} values of {key!r:.80}")
        if code == "?" and any(byte > 1 for byte in raw):
            raise self._error(f"{key!r:.80} holds a boolean that is neither 0 nor 1")
        return list(layout.unpack(raw))

    def _tensor_info(self) -> GgufTensor:
        name = self._string("a tensor name", MAX_KEY_BYTES)
        num_dims = self._uint(4, f"the rank of {name!r:.80}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r:.80} has {num_dims} dimensions")
        dims = [self._uint(8, f"a dimension of {name!r:.80}") for _ in range(num_dims)]
        shape = tuple(reversed(dims))
        kind = self._uint(4, f"the type of {name!r:.80}")
        offset = self._uint(8, f"the offset of {name!r:.80}")
        try:
            nbytes = tensor_bytes(shape, kind)
        except ValueError as error:
            raise self._error(f"tensor {name!r:.80} {error}") from error
        return GgufTensor(name=name, shape=shape, kind=kind, offset=offset, nbytes=nbytes)

    def _place(self, infos: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
        """Turn offsets within the data into offsets within the file, and check them."""
        start = -(-self._at // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        end = 0
        for info in sorted(infos, key=lambda entry: entry.offset):
            problem = self._misplaced(info, start, end, alignment)
            if info.name in placed:
                problem = "appears twice"
            if problem:
                raise self._error(f"tensor {info.name!r:.80} {problem}")
            end = info.offset + info.nbytes
            placed[info.name] = GgufTensor(
                name=info.name,
                shape=info.shape,
                kind=info.kind,
                offset=start + info.offset,
                nbytes=info.nbytes,
            )
        return placed

    def _misplaced(self, info: GgufTensor, start: int, end: int, alignment: int) -> str:
        if info.offset % alignment:
            return f"starts at offset {info.offset}, which is not a multiple of {alignment}"
        if info.offset < end:
            return f"starts at offset {info.offset}, inside the one before, which ends at {end}"
        if start + info.offset + info.nbytes > self._size:
            return (
                f"ends at byte {start + info.offset + info.nbytes} of a file of {self._size} bytes"
            )
        return ""

    def _count(self, what: str, most: int, *, least_bytes: int) -> int:
        """A number of things that are still to come, each at least so many bytes long."""
        count = self._uint(8, f"the number of {what}")
        if count > min(most, (self._size - self._at) // least_bytes):
            raise self._error(f"it states {count} {what} in {self._size - self._at} bytes")
        return count

    def _string(self, what: str, most: int) -> str:
        length = self._uint(8, f"the length of {what}")
        if length > most:
            raise self._error(f"{what} is {length} bytes long")
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {raw[:40]!r}") from error

    def _uint(self, num_bytes: int, what: str) -> int:
        return int.from_bytes(self._take(num_bytes, what), "little")

    def _take(self, num_bytes: int, what: str) -> bytes:
        # Compare before reading: a damaged length must not become an allocation.
        raw = self._file.read(num_bytes) if num_bytes <= self._size - self._at else b""
        if len(raw) != num_bytes:
            raise self._error(f"{what} needs {num_bytes} bytes at byte {self._at}")
        self._at += num_bytes
        return raw

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} ({self._size} bytes): {problem}; {_REMEDY}")


def _alignment(error: Callable[[str], CheckpointError], metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= 2**20 or value & (value - 1):
        raise error(f"general.alignment is {value!r:.80}, not a power of two")
    return value
