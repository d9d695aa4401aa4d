"""Writes a safetensors file one tensor at a time, in a chosen order.

The library's writer wants every tensor in memory at once and sorts them by name; a converted model
is written tensor by tensor, in the order its parameters lie in the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from torpor.model.checkpoints.safetensors_header import DTYPES, PREFIX_BYTES
from torpor.model.checkpoints.safetensors_source import tensor_digest

_ALIGNMENT = 64
"""Tensor data starts at a multiple of this: a cache line, and every dtype's alignment."""


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    pairs: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, str]:
    """Write tensors to a new safetensors file.

    Args:
        path: the file to create.
        shapes: name and shape of every tensor, in file order.
        dtype: dtype of all tensors.
        pairs: the same names in the same order, with CPU tensors of that shape and dtype.

    Returns:
        xxh3_128 hex digest of each tensor's bytes.

    Raises:
        OSError: the file cannot be written; what was written is left to the caller to remove.
    """
    digests: dict[str, str] = {}
    expected = iter(shapes.items())
    with path.open("xb") as file:
        file.write(_header(shapes, dtype))
        for name, tensor in pairs:
            wanted = next(expected, None)
            assert wanted == (name, tuple(tensor.shape)), f"{name} written where {wanted} was due"
            assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, the file is {dtype}"
            digests[name] = tensor_digest(tensor)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    assert len(digests) == len(shapes), f"{len(digests)} of {len(shapes)} tensors written"
    return digests


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    code = next(name for name, known in DTYPES.items() if known == dtype)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text
