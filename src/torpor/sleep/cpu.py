"""The CPU as a device: private anonymous mappings whose pages really go away.

Release is ``madvise(MADV_DONTNEED)`` plus ``mprotect(PROT_NONE)``: the pages return to the system
and a stray touch crashes instead of reading zeros. Whole 2 MiB parts of a range ask for huge pages,
which makes release and refill several times faster; the tail is exact in small pages. One unmapped
page on either side keeps the kernel from merging a range with its neighbours, so that
/proc/self/smaps speaks of this range alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torpor.errors import ArenaError, OutOfMemoryError
from torpor.sleep.digest import local_digest
from torpor.sleep.procfs import available_memory_bytes

if TYPE_CHECKING:
    from torpor.sleep.device import Range
    from torpor.sleep.host import HostCopy

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
HUGE_PAGE_BYTES = 2 * 1024 * 1024

# Linux values, the same on every architecture that torch builds for (man 2 mmap, man 2 madvise).
_PROT_NONE = 0
_PROT_READ = 1
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value


def _buffer_at(address: int, nbytes: int, keep_alive: object) -> ctypes.Array[ctypes.c_ubyte]:
    buffer_type: Any = type(
        "_SizedBuffer", (ctypes.Array,), {"_type_": ctypes.c_ubyte, "_length_": nbytes}
    )
    buffer: ctypes.Array[ctypes.c_ubyte] = buffer_type.from_address(address)
    buffer.keep_alive = keep_alive  # type: ignore[attr-defined]
    return buffer


class CpuDevice:
    """Process memory. See ``Device`` for the contract of each method."""

    name = "cpu"

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t,
            ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        for function in (self._libc.mprotect, self._libc.madvise):
            function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def fresh_memory_is_zero(self) -> bool:
        return True  # man 2 madvise, MADV_DONTNEED: zero-fill-on-demand pages for private mappings.

    @property
    def granularity(self) -> int:
        return PAGE_BYTES

    def reserve(self, nbytes: int) -> int:
        span = _guarded(nbytes)
        base = self._libc.mmap(None, span, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if base == _MAP_FAILED:
            raise ArenaError(f"cannot reserve {span} bytes of address space: {_reason()}")
        address = _first_aligned(base + PAGE_BYTES)
        # Keep one guard page on each side of the aligned range and give the slack back.
        lower, upper = address - PAGE_BYTES, address + nbytes + PAGE_BYTES
        if lower > base:
            self._libc.munmap(base, lower - base)
        if base + span > upper:
            self._libc.munmap(upper, base + span - upper)
        huge = nbytes - nbytes % HUGE_PAGE_BYTES
        if huge:
            # Advice only: kernels without huge pages refuse it and nothing else changes.
            self._libc.madvise(address, huge, _MADV_HUGEPAGE)
        return address

    def free(self, address: int, nbytes: int) -> None:
        self._libc.munmap(address - PAGE_BYTES, nbytes + 2 * PAGE_BYTES)

    def map(self, address: int, nbytes: int, *, populate: bool, handle_bytes: int = 0) -> None:
        if nbytes == 0:
            return
        available = self.available_bytes()
        if nbytes > available:
            raise OutOfMemoryError(
                f"cannot map {nbytes} bytes: {available} are available to this process; "
                "free memory and call again"
            )
        self._check(self._libc.mprotect(address, nbytes, _PROT_READ_WRITE), "make readable", nbytes)
        if populate:
            result = self._libc.madvise(address, nbytes, _MADV_POPULATE_WRITE)
            # Kernels before 5.14 do not know the advice; pages then come on first touch.
            if result != 0 and ctypes.get_errno() != errno.EINVAL:
                reason = _reason()
                self.unmap(address, nbytes)
                raise OutOfMemoryError(
                    f"cannot populate {nbytes} bytes: {reason}; free memory and call again"
                )

    def unmap(self, address: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        # Protected first: whoever touches pages ahead cannot bring any back after their release.
        self._check(self._libc.mprotect(address, nbytes, _PROT_NONE), "protect", nbytes)
        if self._libc.madvise(address, nbytes, _MADV_DONTNEED) != 0:
            reason = ctypes.get_errno()
            self._libc.mprotect(address, nbytes, _PROT_READ_WRITE)
            ctypes.set_errno(reason)
            self._check(-1, "release", nbytes)

    def touch(self, address: int, nbytes: int) -> bool:
        """Get the pages of a range now, from any thread; their content stays.

        Returns:
            False where the range has no memory, or the kernel does not know how.
        """
        return bool(self._libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0)

    def abandon(self, address: int, nbytes: int) -> None:
        if nbytes:
            # The kernel answers reads of fresh private pages from one page of zeros.
            self._check(self._libc.mprotect(address, nbytes, _PROT_READ), "make readable", nbytes)

    def available_bytes(self) -> int:
        return available_memory_bytes()

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def move(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_in(self, address: int, copy: HostCopy) -> None:
        copy.read_into(self.host_view(address, copy.nbytes))

    def copy_out(self, address: int, nbytes: int, target: memoryview) -> None:
        target[:] = self.host_view(address, nbytes)

    def host_view(self, address: int, nbytes: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    def fingerprint(self, ranges: Sequence[Range]) -> list[str]:
        return [local_digest(self.host_view(address, nbytes)) for address, nbytes in ranges]

    def storage(self, address: int, nbytes: int, keep_alive: object) -> torch.UntypedStorage:
        buffer = _buffer_at(address, nbytes, keep_alive)
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()

    def resident_bytes(self, ranges: Sequence[Range]) -> int:
        # mincore walks the page tables of the range alone; smaps, which says the same, describes
        # the whole process first and takes longer than a clean sleep does.
        return sum(self._resident(address, nbytes) for address, nbytes in ranges)

    def _resident(self, address: int, nbytes: int) -> int:
        pages = np.zeros(-(-nbytes // PAGE_BYTES), dtype=np.uint8)
        self._check(
            self._libc.mincore(address, nbytes, pages.ctypes.data), "count the pages of", nbytes
        )
        return int(np.count_nonzero(pages & 1)) * PAGE_BYTES

    def synchronize(self) -> None:
        """Nothing to wait for: every CPU copy has ended when its call returns."""

    def trim(self) -> None:
        trim = getattr(self._libc, "malloc_trim", None)
        if trim is not None:  # glibc only
            trim(0)

    def _check(self, result: int, what: str, nbytes: int) -> None:
        if result != 0:
            raise ArenaError(f"cannot {what} {nbytes} bytes: {_reason()}; nothing else has changed")


def _guarded(nbytes: int) -> int:
    return nbytes + HUGE_PAGE_BYTES + 2 * PAGE_BYTES


def _first_aligned(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
