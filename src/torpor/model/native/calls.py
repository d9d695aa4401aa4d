"""Calls of kernels, which can be kept and made again without Python.

A step of a small model is hundreds of short calls; between them Python's own work takes a good part
of the time. Calls whose addresses and sizes stay the same need it only once.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch

from torpor.model.native.library import Kernel, Library

ALIGNMENT = 64
"""Bytes; a line of the processor's cache."""


class Calls:
    """Calls the kernels of one engine. A `Tape`, while there is one, keeps them, gives memory."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.tape: Tape | None = None

    def team(self) -> int:
        """Threads as many as torch computes with."""
        return self.library.team(torch.get_num_threads())

    def call(self, kernel: Kernel, *arguments: int | None) -> None:
        """Call a kernel with integers and addresses; None is the null address."""
        block = (ctypes.c_int64 * len(arguments))(*(each or 0 for each in arguments))
        if self.tape is not None:
            self.tape.keep(kernel, block)
        kernel.function(block)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""
        if self.tape is not None:
            with torch._C.DisableTorchFunction():  # not a part of what is watched
                return self.tape.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def reads(self, *weights: torch.Tensor | None) -> None:
        """Say which weights the next calls read."""
        if self.tape is not None:
            self.tape.weights += (
                (weight, weight.data_ptr()) for weight in weights if weight is not None
            )

    def pin(self, structure: ctypes.Structure) -> int:
        """Address of a structure that lives as long as kept calls that name it; the caller's own
        reference is what keeps it else."""
        if self.tape is not None:
            self.tape.structures.append(structure)
        return ctypes.addressof(structure)


class _Call(ctypes.Structure):
    """See ``kernels.cpp``."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Tape:
    """Calls in order, and the memory of their results.

    Results live in one piece of memory, where those that nobody holds any more make room for later
    ones; so a call made again finds what it needs where it was.
    """

    def __init__(self, room: torch.Tensor) -> None:
        """Start with no calls.

        Args:
            room: uint8, for all results that live at a time.
        """
        self.structures: list[ctypes.Structure] = []
        self.weights: list[tuple[torch.Tensor, int]] = []
        """What the calls read, and the addresses they know."""
        self.overflow = False
        """Whether a result found no room; the calls cannot be made again then."""
        self._room = room
        self._bytes = room.numpy()
        self._free = [(0, room.numel())]
        self._kept: list[tuple[int, ctypes.Array[ctypes.c_int64]]] = []
        self._calls: ctypes.Array[_Call] | None = None

    def keep(self, kernel: Kernel, arguments: ctypes.Array[ctypes.c_int64]) -> None:
        """Add a call."""
        self._kept.append((kernel.address, arguments))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result, free again when no tensor refers to it."""
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._take(size)
        if start is None:
            self.overflow = True
            return torch.empty(shape, dtype=dtype)
        piece = self._bytes[start : start + nbytes]
        # The storage holds the array: it goes when the last view of it goes.
        weakref.finalize(piece, self._give_back, start, size).atexit = False
        return _typed(torch.from_numpy(piece), shape, dtype)

    def at_the_place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place, as a part of the room itself."""
        start = tensor.data_ptr() - self._room.data_ptr()
        nbytes = tensor.numel() * tensor.dtype.itemsize
        assert 0 <= start <= self._room.numel() - nbytes, "a result from elsewhere"
        return _typed(self._room[start : start + nbytes], tensor.shape, tensor.dtype)

    def reads_the_same(self) -> bool:
        """Whether all weights are where they were."""
        return all(weight.data_ptr() == address for weight, address in self.weights)

    def finish(self) -> None:
        """No more calls will come."""
        made = [_Call(address, ctypes.addressof(block)) for address, block in self._kept]
        self._calls = (_Call * len(made))(*made)

    def repeat(self, library: Library) -> None:
        """Make all calls again."""
        assert self._calls is not None, "an unfinished tape"
        library.repeat(ctypes.addressof(self._calls), len(self._calls))

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
