"""Pages of the KV cache before a step needs them.

The system gives a page at its first touch, and clears it then; on a virtual machine it must often
first get it from its host. For a prompt of a thousand tokens that is up to a tenth of a second of
its first token, so it is done when the model is loaded, or when a processor is free, as far ahead
as the cache is used at all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from weakref import ref

import torch

from torpor.errors import OutOfMemoryError
from torpor.sleep.cpu import HUGE_PAGE_BYTES, CpuDevice

if TYPE_CHECKING:
    from torpor.cache.manager import KVCacheManager
    from torpor.engine.steps.kv_cache import KVCacheMemory
    from torpor.sleep.sleeper import Sleeper

MOST_BYTES = 64 << 20
"""That are touched and not yet used."""
CHUNK_BYTES = 2 << 20
"""At a time: whoever changes the mapping waits no longer than for these."""

Touch = Callable[[int, int], bool]
"""Gets the pages of a range, by address and bytes, and leaves their content; False if it cannot."""


class PagesAhead:
    """One cache whose blocks are used from its beginning on."""

    def __init__(self, kv: torch.Tensor, touch: Touch) -> None:
        """Touch nothing yet.

        Args:
            kv: the cache; begins at the border of a huge page.
            touch: called by a thread of its own, also when the cache has no memory any more.
        """
        # Held, so that nothing else gets these addresses while they are touched.
        self._kv = kv
        self._address, self._nbytes, self._touch = kv.data_ptr(), kv.nbytes, touch
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._done = 0
        self._target = 0
        self._busy = False

    def take_all(self, epoch: int, threads: int) -> None:
        """Touch the whole cache now, before any use.

        Args:
            epoch: as for `reach`.
            threads: that touch at the same time; one alone often waits for the host.
        """
        starts = range(0, self._nbytes, MOST_BYTES)
        with ThreadPoolExecutor(threads, "torpor-pages") as pool:
            # Where it does not work, the steps get the pages.
            done = pool.map(
                lambda start: self._touch(
                    self._address + start, min(MOST_BYTES, self._nbytes - start)
                ),
                starts,
            )
            if all(done):
                self._epoch, self._done, self._target = epoch, self._nbytes, self._nbytes

    def reach(self, used: int, epoch: int) -> None:
        """Say how much is used; returns at once.

        Args:
            used: bytes from the beginning on that have been in use since the cache got its memory.
            epoch: grows whenever the cache loses its memory.
        """
        target = min(used + min(used, MOST_BYTES), self._nbytes)
        if epoch == self._epoch and target - self._target < CHUNK_BYTES:
            return
        # Steps wait for nobody, least of all for a thread that a forked process does not have.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if epoch != self._epoch:
                self._epoch, self._done = epoch, 0
            # What is used has its pages, or gets them in the step that comes.
            first = -(-used // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._done, self._target = max(self._done, first), target
            if self._busy or self._target - self._done < CHUNK_BYTES:
                return
            self._busy = True
        finally:
            self._lock.release()
        threading.Thread(target=_run, args=(ref(self),), name="torpor-pages", daemon=True).start()

    def touch_chunk(self) -> bool:
        """Touch what comes next; False when there is nothing to touch for the time being."""
        with self._lock:
            start, nbytes = self._done, min(CHUNK_BYTES, self._target - self._done)
            moved = self._kv.data_ptr() != self._address
            self._busy = nbytes > 0 and not moved
            if not self._busy:
                return False
            self._done += nbytes
        touched = self._touch(self._address + start, nbytes)
        if not touched:
            with self._lock:
                self._busy = False
        return touched


def _run(pages: ref[PagesAhead]) -> None:
    # Where every processor computes, touching ahead only moves the time to another place.
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Between chunks nobody is held: a cache that nobody uses any more goes at once.
    while (found := pages()) is not None and found.touch_chunk():
        del found


def _require_room(device: CpuDevice, kv: torch.Tensor) -> None:
    # Touching more than there is ends the process, and perhaps others.
    missing = kv.nbytes - device.resident_bytes([(kv.data_ptr(), kv.nbytes)])
    available = device.available_bytes()
    if missing > available:
        raise OutOfMemoryError(
            f"a KV cache of {kv.nbytes} bytes takes {missing} more and {available} are available "
            "to this process; lower its size, or fill it as it is used with "
            "prefault_kv_cache=False"
        )


def pages_ahead(
    memory: KVCacheMemory, cache: KVCacheManager, sleeper: Sleeper, *, all_now: bool
) -> Callable[[], None]:
    """What is to be called before each step, for this cache.

    Args:
        memory: the cache.
        cache: says how much of it is used.
        sleeper: says when the memory came.
        all_now: touch all of it before this returns.

    Raises:
        OutOfMemoryError: it is to be touched, and this process cannot have so much.
    """
    if memory.kv.device.type != "cpu":
        return lambda: None
    device = CpuDevice()
    pages = PagesAhead(memory.kv, device.touch)
    if all_now:
        _require_room(device, memory.kv)
        pages.take_all(sleeper.kv_epoch, torch.get_num_threads())
    block_bytes = memory.layout.block_bytes
    return lambda: pages.reach((cache.pool.highest + 1) * block_bytes, sleeper.kv_epoch)
