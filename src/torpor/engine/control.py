"""The half of an engine that sleeps: pause, sleep, wake, update, verify, close.

Everything goes through one lock, and generation asks ``require_ready`` before every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torpor.engine.options import check_mode, resolve_level
from torpor.errors import ArgumentError, AsleepError, StateError, TorporError
from torpor.sleep.reports import SleepReport

if TYPE_CHECKING:
    import torch

    from torpor.sleep.reports import UpdateReport, VerifyReport, WakeReport
    from torpor.sleep.sleeper import Sleeper
    from torpor.sleep.source import WeightSource

    Pairs = Iterable[tuple[str, torch.Tensor]]

_NEEDED_TAGS = ("weights", "kv_cache")


class SleepControl:
    """Sleeps and wakes one model. Calls may come from any thread."""

    def __init__(self, name: str, sleeper: Sleeper) -> None:
        """Take control of a sleeper that is awake; ``name`` is for messages."""
        self._name = name
        self._sleeper = sleeper
        # Re-entrant: an update's pairs may come from a generator that asks for the status.
        self._lock = threading.RLock()
        self._paused = False
        self._closed = False

    @property
    def sleeper(self) -> Sleeper:
        """What owns the memory, for its table, audit and digests. Sleep and wake through this
        engine, which also knows of pauses and steps."""
        return self._sleeper

    def sleep(
        self, level: int | str = 1, tags: Sequence[str] | None = None, mode: str = "abort"
    ) -> SleepReport:
        """Give memory back.

        Args:
            level: 0 pauses generation only; 1 keeps host copies of the weights; 2 discards them.
            tags: which memory to release, None for all.
            mode: what vLLM does with requests in flight. By the time this call has the lock
                there are none, so all modes come to the same.

        Raises:
            ArgumentError: unknown level, tag or mode; nothing has changed.
            ForeignWriteError: a weight was written outside the door; the model stays awake.
        """
        number = resolve_level(level)
        check_mode(mode)
        with self._lock:
            self._require_open()
            if number > 0:
                return self._sleeper.sleep(level=number, tags=tags)
            if tags is not None:
                raise ArgumentError(f"tags is {tags!r}; level 0 pauses everything, leave tags out")
            return self._pause()

    def wake_up(
        self, tags: Sequence[str] | None = None, *, reload: bool | None = None
    ) -> WakeReport:
        """Take memory back, restore and verify it; generation resumes once nothing sleeps.

        Args:
            tags: which memory to bring back, None for all.
            reload: whether weights without a host copy are read from the checkpoint again; None
                does so only while the checkpoint is where the present weights came from.

        Raises:
            ArgumentError: unknown tag; nothing has changed.
            OutOfMemoryError: not enough memory; still asleep, can be retried.
            StateError: a reload would undo an update.
        """
        with self._lock:
            self._require_open()
            report = self._sleeper.wake_up(tags, reload=reload)
            if self._paused and not self._sleeper.is_sleeping:
                self._paused = False
                notices = (*report.notices, "generation resumed")
                report = dataclasses.replace(report, changed=True, notices=notices)
            return report

    def is_sleeping(self) -> bool:
        """Whether any memory is released, or generation is paused. Never waits."""
        return not self._closed and (self._paused or self._sleeper.is_sleeping)

    def release_kv_cache_memory(self) -> SleepReport:
        """Release the KV cache alone; ``wake_up(["kv_cache"])`` brings it back."""
        return self.sleep(level=1, tags=["kv_cache"])

    def reload_weights(self) -> UpdateReport:
        """Read every weight from the model's own checkpoint again; undoes all updates."""
        with self._lock:
            self._require_open()
            return self._sleeper.reload_weights()

    def update_weights(
        self, source: WeightSource | Pairs, version: str | None = None
    ) -> UpdateReport:
        """Replace weights, all of them or some, in one step.

        Args:
            source: a checkpoint or (name, tensor) pairs, with the checkpoint's names.
            version: a name for the new weights, told in every output computed with them.

        Raises:
            WeightsError: a name, shape or dtype does not fit, or a value is NaN; the old weights
                are back, or the error names what is invalid.
        """
        with self._lock:
            self._require_open()
            return self._sleeper.update_weights(source, version)

    def begin_update(self, version: str | None = None) -> None:
        """Open an update for ``load_weights``; needed only to name it, or after one failed.

        Raises:
            StateError: one is open already, or the weights are asleep.
        """
        with self._lock:
            self._require_open()
            self._sleeper.begin_update(version)

    def finish_update(self) -> UpdateReport:
        """Make what ``load_weights`` wrote official.

        Raises:
            WeightsIncompleteError: the update leaves weights without content; more may follow.
            StateError: no update is open.
        """
        with self._lock:
            self._require_open()
            return self._sleeper.finish_update()

    def load_weights(self, pairs: Pairs) -> set[str]:
        """Write some pairs, beginning an update if none is open.

        It stays open until ``finish_update``, ``reset_prefix_cache`` or the next step.

        Returns:
            The names of the parameters written.

        Raises:
            WeightsError: as ``update_weights``; the whole update is undone.
            StateError: an earlier pair failed; ``begin_update`` says that this is a new start.
        """
        with self._lock:
            self._require_open()
            return self._sleeper.load_weights(pairs)

    def reset_prefix_cache(self) -> bool:
        """Finish an open update. Every request computes its whole prompt, so no prefix is kept.

        Returns:
            True, always: there is nothing that could stay behind.

        Raises:
            WeightsIncompleteError: the update leaves weights without content.
        """
        with self._lock:
            self._require_open()
            if self._sleeper.update_is_open:
                self._sleeper.finish_update()
            return True

    def verify(self) -> VerifyReport:
        """Compare every owned tensor with the digest taken when its content became official."""
        with self._lock:
            self._require_open()
            return self._sleeper.verify()

    def status(self) -> dict[str, Any]:
        """Facts about the model and its memory, JSON-able; sizes in bytes. Never waits for a
        generation."""
        self._require_open()
        return {"model": self._name, "is_paused": self._paused, **self._sleeper.status()}

    def close(self) -> None:
        """Let go of the model and its memory. Further calls raise StateError; closing again is
        fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Nobody else holds the weights, so they need not move out of the memory that sleeps:
            # releasing it first makes closing a matter of milliseconds.
            with contextlib.suppress(TorporError):
                self._sleeper.sleep(level=2)
            self._sleeper.close(discard=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _pause(self) -> SleepReport:
        changed, self._paused = not self._paused, True
        return SleepReport(
            level=0,
            tags=(),
            changed=changed,
            notices=() if changed else ("generation is paused already",),
            weights_epoch=self._sleeper.weights_epoch,
            kv_epoch=self._sleeper.kv_epoch,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"this LLM ({self._name}) is closed; make a new one")

    def _require_ready(self) -> None:
        self._require_open()
        if self._paused:
            raise AsleepError("generation is paused by sleep(0); call wake_up() first")
        self._sleeper.require_ready(*_NEEDED_TAGS)
