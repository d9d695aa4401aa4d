"""The header of one safetensors file, read and checked before a tensor is touched.

Format: 8 bytes little-endian header length, that many bytes of JSON, then raw tensor bytes without
gaps. Every entry is checked against the file's real size, so that a damaged file can only raise.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

import safetensors
import torch
import xxhash

from torpor.errors import CheckpointError, OutOfMemoryError
from torpor.model.config.fields import parse_json_object

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The library's own limit; a longer header is damage."""

MAX_DIMS = 64
"""torch's own limit."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
    }
)
"""Format name to torch dtype."""

_REMEDY = "the file is damaged or cut short; fetch it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file: what it is and where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """All tensors of one file, in file order."""

    path: Path
    file_bytes: int
    digest: str
    """xxh3_128 of the length prefix and the header."""
    entries: Mapping[str, TensorEntry]


def read_header(path: Path) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is missing or unreadable; its header is damaged; a dtype is
            unknown; a tensor's bytes are out of range, overlap, leave a gap or do not fit its
            shape.
    """
    raw, file_bytes = _raw_header(path)
    values = parse_json_object(raw[PREFIX_BYTES:], f"the header of {path}", CheckpointError)
    values.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, len(raw)) for name, value in values.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    _check_layout(path, entries, len(raw), file_bytes)
    _check_with_library(path)
    return SafetensorsHeader(
        path=path,
        file_bytes=file_bytes,
        digest=xxhash.xxh3_128_hexdigest(raw),
        entries=MappingProxyType(entries),
    )


def header_digest(path: Path) -> tuple[int, str]:
    """The file's size in bytes and the digest of its header as it is now.

    Raises:
        CheckpointError: as `read_header`, without looking into the JSON.
    """
    raw, file_bytes = _raw_header(path)
    return file_bytes, xxhash.xxh3_128_hexdigest(raw)


def _raw_header(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(PREFIX_BYTES)
            length = int.from_bytes(prefix, "little")
            room = min(file_bytes - PREFIX_BYTES, MAX_HEADER_BYTES)
            if len(prefix) < PREFIX_BYTES or length > room:
                raise CheckpointError(
                    f"{path} states a header of {length} bytes in a file of {file_bytes} bytes; "
                    f"{_REMEDY}"
                )
            raw = prefix + file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); fetch the file or fix its permissions"
        ) from error
    if len(raw) != PREFIX_BYTES + length:
        raise CheckpointError(f"{path} ended within its header of {length} bytes; {_REMEDY}")
    return raw, file_bytes


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is described by {value!r:.80}; {_REMEDY}")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        known = ", ".join(DTYPES)
        raise CheckpointError(
            f"{where} has dtype {value.get('dtype')!r:.80}; torpor reads {known}; "
            "convert the checkpoint to one of them"
        )
    shape, offsets = value.get("shape"), value.get("data_offsets")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where} has shape {shape!r:.80} and offsets {offsets!r:.80}; {_REMEDY}"
        )
    begin, end = offsets
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{where} of shape {shape!r:.80} needs {needed} bytes, but its offsets span "
            f"{end - begin}; {_REMEDY}"
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), offset=data_start + begin, nbytes=needed)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )


def _check_layout(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int
) -> None:
    position = data_start
    for name, entry in entries.items():
        if entry.offset != position:
            relation = "overlaps the one before" if entry.offset < position else "follows a gap"
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {entry.offset} and {relation}, which ends "
                f"at {position}; {_REMEDY}"
            )
        position += entry.nbytes
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes where its header describes {position}; {_REMEDY}"
        )


def no_memory_for(path: Path, error: Exception) -> OutOfMemoryError:
    """The error where there is no memory, or no address space, to map a file."""
    return OutOfMemoryError(
        f"{path} cannot be mapped for lack of memory ({error}); free some, or raise the limit of "
        "this process"
    )


def _check_with_library(path: Path) -> None:
    """The format's own library has the last word on what is valid."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except (MemoryError, RuntimeError) as error:
        # torch maps the whole file, and has no class of its own for this.
        if isinstance(error, RuntimeError) and os.strerror(errno.ENOMEM) not in str(error):
            raise
        raise no_memory_for(path, error) from error
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is refused by safetensors ({error}); {_REMEDY}") from error
