"""Memory for the results of one pass, in one piece.

The system's allocator gives large memory back at once and gets it again as fresh pages, which the
kernel must clear: with a long prompt, for every result of every layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Bytes; a line of the processor's cache."""


class Room:
    """Gives out parts of a piece of memory; they are free again when no tensor refers to them.

    So the same results, asked for in the same order, lie where they lay before.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Start with all of it free.

        Args:
            memory: uint8, on the CPU. Its users, one after the other, may be several rooms.
        """
        self._memory = memory
        self._bytes = memory.numpy()
        self._first = memory.data_ptr()
        self._free = [(0, memory.numel())]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a result; None if there is no room for it."""
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._take(size)
        if start is None:
            return None
        piece = self._bytes[start : start + nbytes]
        # The storage holds the array: it goes when the last view of it goes.
        weakref.finalize(piece, self._give_back, start, size).atexit = False
        with torch._C.DisableTorchFunction():  # memory alone is nothing that is computed
            return _typed(torch.from_numpy(piece), shape, dtype)

    def spans(self, address: int) -> bool:
        """Whether an address is in it."""
        return self._first <= address < self._first + self._memory.numel()

    def at_the_place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place, as a part of the memory itself; nothing has no place."""
        if not tensor.numel():
            return tensor
        start = tensor.data_ptr() - self._first
        nbytes = tensor.numel() * tensor.dtype.itemsize
        assert 0 <= start <= self._memory.numel() - nbytes, "a result from elsewhere"
        return _typed(self._memory[start : start + nbytes], tensor.shape, tensor.dtype)

    def _take(self, size: int) -> int | None:
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[index] = (start + size, length - size)
                return start
        return None

    def _give_back(self, start: int, size: int) -> None:
        self._free.append((start, size))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for piece in self._free:
            if merged and sum(merged[-1]) == piece[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + piece[1])
            else:
                merged.append(piece)
        self._free = merged


def _typed(piece: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return piece.view(dtype).view(*shape)
