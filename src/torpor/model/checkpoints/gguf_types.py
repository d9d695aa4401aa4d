"""Tensor types of GGUF, as the gguf library knows them: block sizes and dequantisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torpor.errors import ModelNotFoundError

if TYPE_CHECKING:
    from types import ModuleType

    Values = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def tensor_bytes(shape: Sequence[int], kind: int) -> int:
    """Bytes of a tensor of the given row-major shape and type code.

    Raises:
        ValueError: the type is unknown, a dimension is zero or absurd, or a row is not whole
            blocks of the type; the message continues "tensor x ...".
    """
    constants = _library().constants
    try:
        block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise ValueError(f"has the unknown type {kind}") from error
    if not all(1 <= size < 2**48 for size in shape):
        raise ValueError(f"has the impossible shape {tuple(shape)}")
    if shape[-1] % block:
        raise ValueError(f"has rows of {shape[-1]} values, not whole blocks of {block}")
    return int(math.prod(shape) // block * block_bytes)


def dequantise(raw: bytes, shape: Sequence[int], kind: int) -> Values:
    """Raw tensor bytes to float32 values of the given row-major shape.

    Raises:
        ValueError: the type holds no weights that can be dequantised; the message continues
            "tensor x ...".
    """
    library = _library()
    name = library.constants.GGMLQuantizationType(kind)
    # Rows are whole blocks, so the bytes divide evenly over all dimensions but the last.
    blocks = np.frombuffer(bytearray(raw), np.uint8).reshape(*shape[:-1], -1)
    try:
        with np.errstate(all="ignore"):  # the caller counts NaN and infinity
            values = library.quants.dequantize(blocks, name)
    except NotImplementedError as error:
        raise ValueError(f"is of type {name.name}, which cannot be dequantised") from error
    return np.ascontiguousarray(values, dtype=np.float32)


def _library() -> ModuleType:
    try:
        import gguf
        import gguf.constants
        import gguf.quants
    except ImportError as error:
        raise ModelNotFoundError(
            f"reading GGUF files needs the package gguf ({error}); run: pip install 'torpor[gguf]'"
        ) from error
    return gguf
