"""Calls of kernels, which can be noted, made all at once, and made again without Python.

A pass is hundreds of calls; between them Python's own work takes a good part of the time where they
are short. Where they are long each empties the processor's caches, and what Python does after it
takes ten times as long. Calls that are noted first cost Python little, and those whose addresses
and sizes stay the same need it only once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from torpor.model.native.library import Kernel, Library
from torpor.model.native.room import Room

AT_A_TIME = 64
"""Calls that are made without a look at what Python wants meanwhile."""


class Calls:
    """Calls the kernels of one engine.

    While there is a `Tape`, they are noted there and made when it says; while there is a `Room`,
    results have their memory there as far as it goes.
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
        if self.tape is None:
            kernel.function(block)
        else:
            self.tape.note(kernel, block)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result."""
        found = None if self.room is None else self.room.empty(shape, dtype)
        if found is not None:
            return found
        if self.tape is not None:
            return self.tape.overflow(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def address(self, memory: torch.Tensor | None) -> int | None:
        """Where a call finds memory; to be asked by whoever notes the call, before it does."""
        if memory is None:
            return None
        address = memory.data_ptr()
        if self.tape is not None and (self.room is None or not self.room.spans(address)):
            self.tape.hold(memory)
        return address

    def reads(self, *weights: torch.Tensor | None) -> None:
        """Say which weights the next calls read."""
        if self.tape is not None:
            self.tape.weights += (
                (weight, weight.data_ptr()) for weight in weights if weight is not None
            )

    def pin(self, structure: ctypes.Structure) -> int:
        """Address of a structure that lives as long as noted calls that name it; the caller's own
        reference is what keeps it else."""
        if self.tape is not None:
            self.tape.structures.append(structure)
        return ctypes.addressof(structure)


class _Call(ctypes.Structure):
    """See ``kernels.cpp``."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Tape:
    """Calls in order. Made again, they find what they need if their results lie where they lay."""

    def __init__(self, library: Library) -> None:
        """Start with no calls."""
        self.structures: list[ctypes.Structure] = []
        self.weights: list[tuple[torch.Tensor, int]] = []
        """What the calls read, and the addresses they know."""
        self.overflowed = False
        """Whether a result found no room; the calls cannot be made again then."""
        self._library = library
        self._noted: list[tuple[int, ctypes.Array[ctypes.c_int64]]] = []
        self._made = 0
        self._held: list[tuple[int, torch.Tensor]] = []
        """By the number of the call that finds it."""
        self._calls: ctypes.Array[_Call] | None = None

    def note(self, kernel: Kernel, arguments: ctypes.Array[ctypes.c_int64]) -> None:
        """Add a call; it is not made yet."""
        self._noted.append((kernel.address, arguments))

    def hold(self, memory: torch.Tensor) -> None:
        """Keep what lies outside the room until the call noted next has been made. What lies in
        the room may be given to somebody else at once: only calls write there, in their order."""
        self._held.append((len(self._noted), memory))

    def overflow(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result that found no room, after everything before it: so no more of it
        is held at a time than without a tape."""
        self.overflowed = True
        self.make()
        with torch._C.DisableTorchFunction():  # memory alone is nothing that is computed
            return torch.empty(shape, dtype=dtype)

    def make(self) -> None:
        """Make the calls that are noted and not made yet. Each is made once, also when a signal
        handler has torch compute in the middle of this."""
        noted = len(self._noted)
        first, self._made = self._made, noted
        self._make(_array(self._noted[first:noted]))
        self._let_go()

    def drop(self) -> None:
        """Never make what is not made yet."""
        self._made = len(self._noted)
        self._let_go()

    def _let_go(self) -> None:
        self._held = [held for held in self._held if held[0] >= self._made]

    def reads_the_same(self) -> bool:
        """Whether all weights are where they were."""
        return all(weight.data_ptr() == address for weight, address in self.weights)

    def finish(self) -> None:
        """No more calls will come; those there are can be made again."""
        self._calls = _array(self._noted)

    def repeat(self) -> None:
        """Make all calls again."""
        assert self._calls is not None, "an unfinished tape"
        self._make(self._calls)

    def _make(self, calls: ctypes.Array[_Call]) -> None:
        """Some at a time, so that an interrupt is noticed."""
        for first in range(0, len(calls), AT_A_TIME):
            count = min(AT_A_TIME, len(calls) - first)
            self._library.repeat(ctypes.addressof(calls) + first * ctypes.sizeof(_Call), count)


def _array(calls: Sequence[tuple[int, ctypes.Array[ctypes.c_int64]]]) -> ctypes.Array[_Call]:
    made = [_Call(address, ctypes.addressof(block)) for address, block in calls]
    return (_Call * len(made))(*made)
