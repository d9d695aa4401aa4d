"""What an arena asks of a device. The CPU implements it with mmap; CUDA fits behind it unchanged.

Addresses are integers and sizes are bytes. A range is reserved once and keeps its address for life;
physical memory comes and goes under it with ``map`` and ``unmap``, from the front, so that any
prefix of a range can be present. Calls that move bytes may be asynchronous on a stream of the
device's own; ``synchronize`` waits for that stream only, never for other models on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from torpor.sleep.host import HostCopy

Range = tuple[int, int]
"""(address, bytes)."""


class Device(Protocol):
    """Address ranges whose physical memory can be released and acquired again."""

    @property
    def name(self) -> str:
        """Name in reports, such as ``cpu``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors over this device's memory live."""
        ...

    @property
    def fresh_memory_is_zero(self) -> bool:
        """Whether ``map`` after ``unmap`` gives zeros by the system's own promise."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes; mapped sizes are multiples of it."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve an address range without physical memory; return its address.

        Raises:
            ArenaError: the system refuses.
        """
        ...

    def free(self, address: int, nbytes: int) -> None:
        """Give back a reserved range and whatever is mapped in it."""
        ...

    def map(self, address: int, nbytes: int, *, populate: bool, handle_bytes: int = 0) -> None:
        """Put physical memory under a range. Repeating it on a mapped range changes nothing.

        Args:
            populate: acquire every page now, so that a shortage is an error here and not later.
            handle_bytes: size of one physical handle where the device has such; 0 lets it choose.

        Raises:
            OutOfMemoryError: there is not enough memory; the range is as before.
            ArenaError: the system refuses for another reason.
        """
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Release the physical memory of a range. Repeating it changes nothing.

        Touching the range afterwards is a fault, never a read of zeros.
        """
        ...

    def abandon(self, address: int, nbytes: int) -> None:
        """Let a released range be read for good, without memory: its owner gave the content up.

        What is read means nothing; but a debugger or a traceback that prints a tensor must not end
        the process.
        """
        ...

    def available_bytes(self) -> int:
        """Physical memory that ``map`` could acquire now."""
        ...

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set every byte of a mapped range."""
        ...

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy between two mapped ranges of this device."""
        ...

    def copy_in(self, address: int, copy: HostCopy) -> None:
        """Copy a host copy into a mapped range of the same size.

        Raises:
            HostCopyError: the host copy cannot be read.
        """
        ...

    def copy_out(self, address: int, nbytes: int, target: memoryview) -> None:
        """Copy a mapped range into host memory."""
        ...

    def host_view(self, address: int, nbytes: int) -> memoryview | None:
        """A view of a mapped range that host code may read directly, or None if it cannot."""
        ...

    def fingerprint(self, ranges: Sequence[Range]) -> list[str]:
        """The local digest of every range, as hex, by the device's own fastest function."""
        ...

    def storage(self, address: int, nbytes: int, keep_alive: object) -> torch.UntypedStorage:
        """A torch storage over a range. ``keep_alive`` lives as long as the storage does."""
        ...

    def resident_bytes(self, ranges: Sequence[Range]) -> int:
        """Physical memory under the ranges, asked of the system and not of our own books."""
        ...

    def synchronize(self) -> None:
        """Wait for this device's own queue of copies and fills."""
        ...

    def trim(self) -> None:
        """Return memory that allocators keep cached to the system."""
        ...
