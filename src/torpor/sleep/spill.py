"""A private file without a name, used as a heap of byte ranges.

The file is unlinked as soon as it is open: nobody else can read it, and it vanishes with the
process however that ends. Freed ranges are reused, neighbours are joined, and a free tail is cut
off, so the file is as long as what it holds plus its gaps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import HostCopyError, HostFullError

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ALIGNMENT = 4096
_Range = tuple[int, int]
"""(offset, bytes)."""

ENVIRONMENT_VARIABLE = "TORPOR_SPILL_DIR"


def default_folder() -> Path:
    """``$TORPOR_SPILL_DIR``, else /var/tmp: /tmp is often memory, where a copy frees nothing."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen)
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())


class SpillFile:
    """Byte ranges in an unlinked file. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open the file.

        Raises:
            HostCopyError: the folder does not exist or is not writable.
        """
        self.folder = folder
        self.what = f"spill file in {folder}"
        try:
            self.descriptor, path = tempfile.mkstemp(prefix="torpor-", suffix=".spill", dir=folder)
            os.unlink(path)
        except OSError as error:
            raise HostCopyError(
                f"cannot create a spill file in {folder}: {error}; pass spill_dir or set "
                f"{ENVIRONMENT_VARIABLE} to a writable folder"
            ) from error
        # Taken by ``with`` only: between a call of acquire() and what follows, an interrupt would
        # keep it taken for ever.
        self._lock = threading.RLock()
        self._busy = False
        self._process = os.getpid()
        self._layout = _Layout((), 0)
        self._returned: deque[_Range] = deque()

    @property
    def is_open(self) -> bool:
        """Whether what was stored can still be read."""
        return self.descriptor >= 0

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the file. A forked child shares it with its parent, and may
        read it, but must not write to it or give room back."""
        return self._process == os.getpid()

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._layout.end

    def write(self, data: memoryview) -> int:
        """Store bytes and return their offset.

        Raises:
            HostFullError: the disk or quota is full; nothing was stored.
            HostCopyError: the file cannot be written.
        """
        with self._lock:
            self._busy = True
            try:
                self._tidy()
                offset, layout = self._layout.with_room_for(_rounded(len(data)))
                self._write_at(offset, data)
                self._layout = layout  # The commit: until here the range counts as free.
            except BaseException:
                self._cut()
                raise
            finally:
                self._busy = False
            return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back. Safe to call from a finaliser, which may run inside ``write``."""
        if not self.is_ours:
            return
        self._returned.append((offset, _rounded(nbytes)))
        with self._lock:
            if self._busy:
                return
            self._busy = True
            try:
                self._tidy()
            finally:
                self._busy = False

    def close(self) -> None:
        """Close the file; the system deletes it. Repeating is harmless."""
        with self._lock:
            # Never the old number again: it may be another file by the time somebody reads.
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)

    def _tidy(self) -> None:
        """Take in what was given back."""
        if self._returned and self.is_open:
            end = self._layout.end
            while self._returned:
                self._layout = self._layout.without(self._returned[0])
                self._returned.popleft()
            if self._layout.end < end:
                self._cut()

    def _cut(self) -> None:
        """Make the file as long as its layout says, so that the rest of the disk is free again."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, self._layout.end)

    def _write_at(self, offset: int, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.descriptor, data[done:], offset + done)
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise HostFullError(
                    f"no room for a host copy of {len(data)} bytes in {self.folder}: {error}; free "
                    f"space there, or choose another folder with spill_dir or "
                    f"{ENVIRONMENT_VARIABLE}"
                ) from error
            raise HostCopyError(f"cannot write to the {self.what}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which ranges of the file are free. Never changed in place."""

    free: tuple[_Range, ...]
    """Sorted, not touching each other."""
    end: int

    def with_room_for(self, nbytes: int) -> tuple[int, _Layout]:
        """The first free range that is long enough, else the end of the file; and what is left."""
        for index, (offset, size) in enumerate(self.free):
            if size >= nbytes:
                rest = ((offset + nbytes, size - nbytes),) if size > nbytes else ()
                free = (*self.free[:index], *rest, *self.free[index + 1 :])
                return offset, _Layout(free, self.end)
        return self.end, _Layout(self.free, self.end + nbytes)

    def without(self, gone: _Range) -> _Layout:
        """The layout once a range is free, joined with its neighbours, the tail cut off.

        Giving a range back twice in a row is harmless: an interrupt may come in between.
        """
        joined: list[_Range] = []
        for offset, size in sorted((*self.free, gone)):
            if offset >= self.end:
                continue
            if joined and sum(joined[-1]) >= offset:
                start = joined[-1][0]
                joined[-1] = (start, max(sum(joined[-1]), offset + size) - start)
            else:
                joined.append((offset, size))
        end = joined.pop()[0] if joined and sum(joined[-1]) == self.end else self.end
        return _Layout(tuple(joined), end)


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
