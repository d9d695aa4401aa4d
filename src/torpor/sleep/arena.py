"""One reserved address range, the slots cut from it, and the physical memory under it.

    address                                                    address + nbytes
    | slot 0 | pad | slot 1 | pad | ...                | unused |
    |<------------- mapped_bytes ------------->|<-- no memory ->|

Slots start at multiples of 512 bytes and never move. An arena lives as long as any storage in it:
every storage holds a reference to the arena, and the last one to go gives the range back.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from torpor.errors import ArenaError

if TYPE_CHECKING:
    import torch

    from torpor.sleep.device import Device, Range

SLOT_ALIGNMENT = 512
"""Bytes. What CUDA allocators give, so that kernels see the alignment they are used to."""


def aligned(nbytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that holds ``nbytes``."""
    return -(-nbytes // alignment) * alignment


class Arena:
    """A range of one device, reserved once; its memory can be released and acquired again."""

    def __init__(self, device: Device, nbytes: int, label: str) -> None:
        """Reserve ``nbytes`` (rounded up to the device's granularity) without mapping anything.

        Raises:
            ArenaError: the system refuses the reservation.
        """
        self.device = device
        self.label = label
        self.nbytes = aligned(max(nbytes, 1), device.granularity)
        self.address = device.reserve(self.nbytes)
        self.used_bytes = 0
        self.mapped_bytes = 0
        release = weakref.finalize(self, device.free, self.address, self.nbytes)
        # At interpreter exit tensors may still be alive; the system takes the range back by itself.
        release.atexit = False

    @property
    def range(self) -> Range:
        """(address, bytes) of the whole reservation."""
        return self.address, self.nbytes

    @property
    def is_mapped(self) -> bool:
        """Whether any physical memory lies under the range."""
        return self.mapped_bytes > 0

    def contains(self, address: int) -> bool:
        """Whether an address lies in the reservation."""
        return self.address <= address < self.address + self.nbytes

    def allocate(self, nbytes: int) -> int:
        """Cut the next slot and return its offset. Slots are never given back.

        Raises:
            ArenaError: the arena is full.
        """
        offset = aligned(self.used_bytes, SLOT_ALIGNMENT)
        if offset + nbytes > self.nbytes:
            raise ArenaError(
                f"arena {self.label!r} of {self.nbytes} bytes has {self.nbytes - offset} left and "
                f"cannot hold {nbytes} more; reserve a larger one"
            )
        self.used_bytes = offset + nbytes
        return offset

    def map(self, nbytes: int | None = None, *, populate: bool = False) -> None:
        """Put memory under the first ``nbytes`` (default: all). Growing keeps what is there.

        Raises:
            OutOfMemoryError: not enough memory; nothing has changed.
        """
        target = self.nbytes if nbytes is None else aligned(nbytes, self.device.granularity)
        if target > self.nbytes:
            raise ArenaError(
                f"arena {self.label!r} spans {self.nbytes} bytes; {target} cannot be mapped"
            )
        if target <= self.mapped_bytes:
            return
        start = self.mapped_bytes
        self.device.map(self.address + start, target - start, populate=populate)
        self.mapped_bytes = target

    def remap(self, nbytes: int, *, populate: bool = True) -> None:
        """Map the first ``nbytes`` whatever the books say: an interrupted call may have got
        further.

        Raises:
            OutOfMemoryError: not enough memory.
        """
        if nbytes:
            self.device.map(self.address, nbytes, populate=populate)
        self.mapped_bytes = nbytes

    def unmap(self) -> None:
        """Release all memory under the range. The address stays reserved; repeating is harmless."""
        # The whole range, whatever the books say: an interrupted map may have got further.
        self.device.unmap(self.address, self.nbytes)
        self.mapped_bytes = 0

    def give_up(self) -> None:
        """Release all memory; what the system refuses to take back counts as absent all the same.

        For rolling back, which has to end; the next ``remap`` finds it and goes on.
        """
        with contextlib.suppress(ArenaError):
            self.device.unmap(self.address, self.nbytes)
        self.mapped_bytes = 0

    def abandon(self) -> None:
        """Release all memory for good, and let what is left be read; see ``Device.abandon``."""
        self.give_up()
        with contextlib.suppress(ArenaError):
            self.device.abandon(self.address, self.nbytes)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A torch storage over one slot; it keeps this arena alive."""
        return self.device.storage(self.address + offset, nbytes, self)

    def resident_bytes(self) -> int:
        """Physical memory under the range as the system counts it."""
        return self.device.resident_bytes([self.range])
