"""Calls of kernels, which can be kept and made again without Python.

A step of a small model is hundreds of short calls; between them Python's own work takes a good part
of the time. Calls whose addresses and sizes stay the same need it only once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from torpor.model.native.library import Kernel, Library
from torpor.model.native.room import Room


class Calls:
    """Calls the kernels of one engine.

    While there is a `Tape`, it keeps them; while there is a `Room`, results have their memory there
    as far as it goes.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.tape: Tape | None = None
        self.room: Room | None = None

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
        found = None if self.room is None else self.room.empty(shape, dtype)
        if found is not None:
            return found
        if self.tape is not None:
            self.tape.overflow = True
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
    """Calls in order; made again, they find what they need if their results lie where they lay."""

    def __init__(self) -> None:
        """Start with no calls."""
        self.structures: list[ctypes.Structure] = []
        self.weights: list[tuple[torch.Tensor, int]] = []
        """What the calls read, and the addresses they know."""
        self.overflow = False
        """Whether a result found no room; the calls cannot be made again then."""
        self._kept: list[tuple[int, ctypes.Array[ctypes.c_int64]]] = []
        self._calls: ctypes.Array[_Call] | None = None

    def keep(self, kernel: Kernel, arguments: ctypes.Array[ctypes.c_int64]) -> None:
        """Add a call."""
        self._kept.append((kernel.address, arguments))

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
