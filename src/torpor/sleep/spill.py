"""A private file without a name, used as a heap of byte ranges.

The file is unlinked as soon as it is open: nobody else can read it, and it vanishes with the
process however that ends. Freed ranges are reused, neighbours are joined, and a free tail is cut
off, so the file is as long as what it holds plus its gaps.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path

from torpor.errors import HostCopyError, HostFullError

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ALIGNMENT = 4096
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
        self._lock = threading.RLock()
        self._free: list[tuple[int, int]] = []
        self._end = 0
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._end

    def write(self, data: memoryview) -> int:
        """Store bytes and return their offset.

        Raises:
            HostFullError: the disk or quota is full; nothing was stored.
            HostCopyError: the file cannot be written.
        """
        with self._lock:
            offset = self._take(len(data))
            try:
                self._write_at(offset, data)
            except BaseException:
                self.free(offset, len(data))
                raise
            return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back."""
        with self._lock:
            if self._closed:
                return
            self._free.append((offset, _rounded(nbytes)))
            self._free = _joined(self._free)
            last_offset, last_size = self._free[-1]
            if last_offset + last_size == self._end:
                self._free.pop()
                self._end = last_offset
                os.ftruncate(self.descriptor, self._end)

    def close(self) -> None:
        """Close the file; the system deletes it. Repeating is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()

    def _take(self, nbytes: int) -> int:
        needed = _rounded(nbytes)
        for index, (offset, size) in enumerate(self._free):
            if size >= needed:
                rest = (offset + needed, size - needed)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return offset
        offset = self._end
        self._end += needed
        return offset

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


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((offset, size))
    return joined
