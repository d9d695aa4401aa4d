"""Host copies: where the bytes of a sleeping tensor wait.

One interface over three places: the checkpoint file that already holds the bytes, an unlinked
private spill file, or host memory (for devices whose memory is not host memory: on the CPU a copy
in memory would free nothing). A copy is immutable, knows the digest of its bytes, and is shared by
content: tensors, models and replicas that hold the same bytes keep one copy between them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torpor.errors import ArgumentError, HostCopyError, HostFullError
from torpor.sleep.digest import local_digest_of_parts
from torpor.sleep.source import FileExtent
from torpor.sleep.spill import SpillFile, default_folder

MEDIA = ("file", "memory")
"""Where a store keeps copies that no checkpoint file holds."""

_CHUNK_BYTES = 1024 * 1024


class HostCopy(Protocol):
    """Immutable bytes of one owned storage, outside its arena."""

    @property
    def nbytes(self) -> int:
        """Size of the copy."""
        ...

    @property
    def digest(self) -> str:
        """Local digest of the bytes."""
        ...

    @property
    def kind(self) -> str:
        """``checkpoint``, ``file`` or ``memory``."""
        ...

    def is_current(self) -> bool:
        """Whether the bytes can be expected to be there still, as far as a cheap look tells."""
        ...

    def read_into(self, target: memoryview) -> None:
        """Copy the bytes into ``target``, which has exactly ``nbytes``.

        Raises:
            HostCopyError: the copy cannot be read in full.
        """
        ...


def read_exactly(descriptor: int, target: memoryview, offset: int, what: str) -> None:
    """Fill ``target`` from a file, starting at ``offset``.

    Raises:
        HostCopyError: the file ends early or cannot be read.
    """
    done = 0
    try:
        while done < len(target):
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise HostCopyError(
                    f"{what} ends at byte {offset + done}; {len(target) - done} more were expected"
                )
            done += count
    except OSError as error:
        raise HostCopyError(f"cannot read {what} at byte {offset + done}: {error}") from error


class CheckpointCopy:
    """Bytes that a checkpoint file holds as they are; nothing is written."""

    kind = "checkpoint"

    def __init__(self, extents: Sequence[FileExtent], digest: str) -> None:
        """Remember where the bytes are and what the file looked like.

        Raises:
            HostCopyError: a file cannot be opened.
        """
        self.digest = digest
        self.nbytes = sum(extent.nbytes for extent in extents)
        self._extents = tuple(extents)
        self._stamps = {extent.path: file_stamp(extent.path) for extent in extents}

    def is_current(self) -> bool:
        """Whether every file still looks as it did when this copy was made."""
        # A look, not a proof: the digest is compared whenever the bytes are used.
        try:
            return all(file_stamp(path) == stamp for path, stamp in self._stamps.items())
        except HostCopyError:
            return False

    def is_exact(self) -> bool:
        """Whether the files hold these very bytes: reads all of them, once, from page cache."""
        try:
            return local_digest_of_parts(self._chunks()) == self.digest
        except HostCopyError:
            return False

    def read_into(self, target: memoryview) -> None:
        done = 0
        for extent in self._extents:
            with _opened(extent.path) as descriptor:
                part = target[done : done + extent.nbytes]
                read_exactly(descriptor, part, extent.offset, str(extent.path))
            done += extent.nbytes

    def _chunks(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(self.nbytes, 1))))
        for extent in self._extents:
            with _opened(extent.path) as descriptor:
                for done in range(0, extent.nbytes, len(buffer)):
                    chunk = buffer[: min(len(buffer), extent.nbytes - done)]
                    read_exactly(descriptor, chunk, extent.offset + done, str(extent.path))
                    yield chunk


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise HostCopyError(f"cannot open {path}: {error}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def file_stamp(path: Path) -> tuple[int, int, int, int]:
    """(device, inode, size, modification time in ns): changes when a file is replaced or written.

    Raises:
        HostCopyError: the file is gone.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise HostCopyError(f"cannot look at {path}: {error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _StoredCopy:
    """A copy that a store wrote; its room is given back when the last holder lets go."""

    def __init__(self, digest: str, nbytes: int, on_release: Callable[[], None]) -> None:
        self._on_release = on_release  # First: from here on the room is given back.
        self.digest = digest
        self.nbytes = nbytes

    def __del__(self) -> None:
        on_release = getattr(self, "_on_release", None)
        if on_release is not None:
            on_release()


class _FileCopy(_StoredCopy):
    kind = "file"

    def __init__(self, spill: SpillFile, offset: int, digest: str, nbytes: int) -> None:
        super().__init__(digest, nbytes, lambda: spill.free(offset, nbytes))
        self._spill = spill
        self._offset = offset

    def is_current(self) -> bool:
        return self._spill.is_open

    def read_into(self, target: memoryview) -> None:
        read_exactly(self._spill.descriptor, target, self._offset, self._spill.what)


class _MemoryCopy(_StoredCopy):
    kind = "memory"

    def __init__(
        self, region: mmap.mmap, digest: str, nbytes: int, on_release: Callable[[], None]
    ) -> None:
        super().__init__(digest, nbytes, on_release)
        self._region = region

    def is_current(self) -> bool:
        return True

    def read_into(self, target: memoryview) -> None:
        target[:] = memoryview(self._region)[: self.nbytes]


def _folder(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(f"spill_dir={given!r} is no path; pass the path of a folder")
    return Path(given)


class HostStore:
    """Keeps copies by content. Can be shared by several sleepers; thread-safe."""

    def __init__(
        self,
        *,
        spill_dir: Path | str | None = None,
        medium: str = "file",
        host_memory_limit: int | None = None,
    ) -> None:
        """Choose where copies go; nothing is opened before the first one.

        Args:
            spill_dir: folder of the spill file; default ``$TORPOR_SPILL_DIR``, else /var/tmp.
            medium: ``file`` or ``memory``.
            host_memory_limit: bytes that copies in memory may take together; None is no limit.

        Raises:
            ArgumentError: an unknown medium, a negative limit, or no path.
        """
        if medium not in MEDIA:
            raise ArgumentError(f"host copy medium {medium!r} is none of {MEDIA}")
        if host_memory_limit is not None and host_memory_limit < 0:
            raise ArgumentError(f"host_memory_limit={host_memory_limit} must be 0 or more bytes")
        self.medium = medium
        self.host_memory_limit = host_memory_limit
        self.memory_bytes = 0
        self._folder = default_folder() if spill_dir is None else _folder(spill_dir)
        self._spill: SpillFile | None = None
        self._copies: weakref.WeakValueDictionary[tuple[str, int], HostCopy] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    @property
    def file_bytes(self) -> int:
        """Length of the spill file."""
        return 0 if self._spill is None else self._spill.size_bytes

    def find(self, digest: str, nbytes: int) -> HostCopy | None:
        """The copy of these bytes that somebody keeps already, if any."""
        return self._copies.get((digest, nbytes))

    def keep(self, digest: str, data: memoryview) -> tuple[HostCopy, int]:
        """Keep a copy of bytes whose digest is known.

        Returns:
            The copy, and how many bytes had to be copied for it (0 when one existed).

        Raises:
            HostFullError: no room; nothing was kept.
            HostCopyError: the copy cannot be written.
        """
        with self._lock:
            copy = self.find(digest, len(data))
            if copy is not None:
                return copy, 0
            copy = (
                self._to_file(digest, data)
                if self.medium == "file"
                else self._to_memory(digest, data)
            )
            self._copies[digest, len(data)] = copy
            return copy, len(data)

    def withdraw(self, copy: HostCopy) -> None:
        """Stop giving a copy out: it was found damaged. Whoever holds it keeps it."""
        with self._lock:
            if self.find(copy.digest, copy.nbytes) is copy:
                del self._copies[copy.digest, copy.nbytes]

    def close(self) -> None:
        """Close the spill file. Copies still held can no longer be read, and say so."""
        with self._lock:
            if self._spill is not None:
                self._spill.close()
                self._spill = None
            self._copies.clear()

    def _to_file(self, digest: str, data: memoryview) -> HostCopy:
        if self._spill is None or not self._spill.is_ours:
            # A forked child keeps reading what its parent stored, and stores in a file of its own.
            self._spill = SpillFile(self._folder)
        return _FileCopy(self._spill, self._spill.write(data), digest, len(data))

    def _to_memory(self, digest: str, data: memoryview) -> HostCopy:
        nbytes = len(data)
        limit = self.host_memory_limit
        if limit is not None and self.memory_bytes + nbytes > limit:
            raise HostFullError(
                f"a host copy of {nbytes} bytes does not fit under host_memory_limit={limit}: "
                f"{self.memory_bytes} are in use; raise the limit or sleep at level 2"
            )
        try:
            region = mmap.mmap(-1, max(nbytes, 1))
        except OSError as error:
            raise HostFullError(
                f"no host memory for a copy of {nbytes} bytes: {error}; free some or sleep at "
                "level 2"
            ) from error
        memoryview(region)[:nbytes] = data
        self.memory_bytes += nbytes
        return _MemoryCopy(region, digest, nbytes, lambda: self._forget(nbytes))

    def _forget(self, nbytes: int) -> None:
        with self._lock:
            self.memory_bytes -= nbytes
