"""The half of an engine that sleeps: pause, sleep, wake, update, verify, close.

Everything takes its turn between two steps, and each step asks ``require_ready`` first. Pausing
and sleeping are two things: a pause decides what becomes of requests, a sleep moves memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torpor.engine.options import check_mode, resolve_level
from torpor.engine.steps.turns import Turns
from torpor.errors import ArgumentError, AsleepError, StateError, TorporError, shown
from torpor.sleep.choices import tags_from
from torpor.sleep.reports import SleepReport

if TYPE_CHECKING:
    import torch

    from torpor.cache.manager import KVCacheManager
    from torpor.engine.steps.core import EngineCore
    from torpor.sleep.reports import UpdateReport, VerifyReport, WakeReport
    from torpor.sleep.sleeper import Sleeper
    from torpor.sleep.source import WeightSource

    Pairs = Iterable[tuple[str, torch.Tensor]]

NEEDED_TAGS = ("weights", "kv_cache", "graphs")
"""Which memory a step computes with."""


class SleepControl:
    """Sleeps and wakes one model. Calls may come from any thread."""

    def __init__(
        self, name: str, sleeper: Sleeper, core: EngineCore, cache: KVCacheManager
    ) -> None:
        """Take control of a sleeper that is awake; ``name`` is for messages."""
        self.core = core
        self.cache = cache
        # Re-entrant: an update's pairs may come from a generator that asks for the status.
        self.turns = Turns()
        self._name = name
        self._sleeper = sleeper
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
            mode: what becomes of requests in flight. "abort" ends them, with finish reason
                "abort"; "wait" computes them to their end first, and later ones wait; "keep"
                freezes them: they go on after the wake, their prompts and tokens recomputed when
                the KV cache was released.

        Raises:
            ArgumentError: unknown level, tag or mode; nothing has changed.
            AsleepError, WeightsIncompleteError: mode "wait", but the requests cannot go on; use
                another mode.
            ForeignWriteError: a weight was written outside the door; the model stays awake.
        """
        number = resolve_level(level)
        check_mode(mode)
        if number == 0 and tags is not None:
            raise ArgumentError(
                f"tags is {shown(tags, 80)}; level 0 pauses everything, leave tags out"
            )
        tags_from(tags)
        with self.turns.take():
            self._require_open()
            self._settle_requests(mode)
            if number == 0:
                return self._pause()
            self._give_back()
            try:
                return self._sleeper.sleep(level=number, tags=tags)
            finally:
                self.core.notice_epochs()

    def _give_back(self) -> None:
        """Let go of what can be made anew, before a sleep."""

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop stepping until ``resume_generation``; memory stays as it is.

        Args:
            mode: what becomes of requests in flight, as for ``sleep``.
            clear_cache: forget cached prefixes; kept requests are then recomputed.

        Raises:
            ArgumentError: unknown mode.
            AsleepError, WeightsIncompleteError: mode "wait", but the requests cannot go on.
        """
        check_mode(mode)
        with self.turns.take():
            self._require_open()
            self._settle_requests(mode)
            self._paused = True
            if clear_cache:
                self.core.scheduler.preempt_all()
                self.cache.reset_prefix_cache()

    def resume_generation(self) -> None:
        """Step again, if nothing sleeps; fine when not paused."""
        with self.turns.take():
            self._require_open()
            self._paused = False

    def is_paused(self) -> bool:
        """Whether generation is paused, by ``pause_generation`` or ``sleep(0)``. Never waits."""
        return self._paused

    def wake_up(
        self, tags: Sequence[str] | None = None, *, reload: bool | None = None
    ) -> WakeReport:
        """Take memory back, restore and verify it; generation resumes once nothing sleeps.

        Args:
            tags: which memory to bring back, None for all.
            reload: whether weights without a host copy are read from the checkpoint again; None
                does so only if no tags are named, and while the checkpoint is where the present
                weights came from. Weights that are not read are yours to fill, with
                ``reload_weights()`` or an update of all of them; until then no step runs.

        Raises:
            ArgumentError: unknown tag; nothing has changed.
            OutOfMemoryError: not enough memory; still asleep, can be retried.
            StateError: a reload would undo an update.
        """
        with self.turns.take():
            self._require_open()
            try:
                report = self._sleeper.wake_up(tags, reload=reload)
            finally:
                self.core.notice_epochs()
            if self._paused and not self._sleeper.is_sleeping:
                self._paused = False
                notices = (*report.notices, "generation resumed")
                report = dataclasses.replace(report, changed=True, notices=notices)
            return report

    def is_sleeping(self) -> bool:
        """Whether any memory is released, or generation is paused. Never waits."""
        return not self._closed and (self._paused or self._sleeper.is_sleeping)

    def release_kv_cache_memory(self, mode: str = "abort") -> SleepReport:
        """Release the KV cache alone; ``wake_up(["kv_cache"])`` brings it back. ``mode`` and errors
        as for ``sleep``."""
        return self.sleep(level=1, tags=["kv_cache"], mode=mode)

    def reload_weights(self) -> UpdateReport:
        """Read every weight from the model's own checkpoint again; undoes all updates."""
        with self.turns.take():
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
            ArgumentError: the version is no string, or the source holds something else than pairs.
            WeightsError: a name, shape or dtype does not fit, or a value is NaN; the old weights
                are back, or the error names what is invalid.
        """
        with self.turns.take():
            self._require_open()
            return self._sleeper.update_weights(source, version)

    def begin_update(self, version: str | None = None) -> None:
        """Open an update for ``load_weights``; needed only to name it, or after one failed.

        Raises:
            ArgumentError: the version is no string.
            StateError: one is open already, or the weights are asleep.
        """
        with self.turns.take():
            self._require_open()
            self._sleeper.begin_update(version)

    def finish_update(self) -> UpdateReport:
        """Make what ``load_weights`` wrote official.

        Raises:
            WeightsIncompleteError: the update leaves weights without content; more may follow.
            StateError: no update is open.
        """
        with self.turns.take():
            self._require_open()
            return self._sleeper.finish_update()

    def load_weights(self, pairs: Pairs) -> set[str]:
        """Write some pairs, beginning an update if none is open.

        It stays open until ``finish_update``, ``reset_prefix_cache``, a sleep or the next step,
        each of which finishes it.

        Returns:
            The names of the parameters written.

        Raises:
            WeightsError: as ``update_weights``; the whole update is undone.
            StateError: an earlier pair failed; ``begin_update`` says that this is a new start.
        """
        with self.turns.take():
            self._require_open()
            return self._sleeper.load_weights(pairs)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix, and finish an open update.

        Not needed for correctness: what is cached is known by the epochs of weights and cache, and
        is never found under others.

        Args:
            reset_running_requests: take the blocks from requests that run; they are recomputed.

        Returns:
            True, always: it succeeds or raises.

        Raises:
            CacheInUseError: live requests hold blocks; the message says how many.
            WeightsIncompleteError: the update leaves weights without content.
        """
        with self.turns.take():
            self._require_open()
            if self._sleeper.update_is_open:
                self._sleeper.finish_update()
            self.core.notice_epochs()
            self.core.sweep()
            if reset_running_requests:
                self.core.scheduler.preempt_all()
            self.cache.reset_prefix_cache()
            return True

    def verify(self) -> VerifyReport:
        """Compare every owned tensor with the digest taken when its content became official."""
        with self.turns.take():
            self._require_open()
            return self._sleeper.verify()

    def status(self) -> dict[str, Any]:
        """Facts about the model and its memory, JSON-able; sizes in bytes. Never waits for a
        generation."""
        self._require_not_closed()
        return {"model": self._name, "is_paused": self._paused, **self._sleeper.status()}

    def close(self) -> None:
        """Let go of the model and its memory. Further calls raise StateError; closing again is
        fine."""
        with self.turns.take():
            if self._closed:
                return
            self._require_open()
            self._sleeper.refuse_while_writing()
            self.core.abort_all()
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

    def _settle_requests(self, mode: str) -> None:
        self.core.sweep()
        if mode == "abort":
            self.core.abort_all()
        elif mode == "wait":
            self._drain()

    def _drain(self) -> None:
        """Compute the present requests to their end; later ones wait."""
        waited = self.core.requests
        with self.core.scheduler.holding_back_new():
            while not all(request.finished for request in waited):
                self.core.step()
                self.turns.pass_on()
                self._require_open()

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

    def _require_not_closed(self) -> None:
        if self._closed:
            raise StateError(f"this LLM ({self._name}) is closed; make a new one")

    def _require_open(self) -> None:
        """Raise if closed, or in the middle of a step: the turn is this thread's then, and waiting
        for the step's end would be waiting for oneself."""
        self._require_not_closed()
        if self.core.is_stepping:
            raise StateError(
                f"this LLM ({self._name}) is in the middle of a step of the same thread, as when a "
                "signal handler calls it; let the handler note what is wanted, and call when "
                "generate() has returned, or raise an exception from it to end generate()"
            )

    def may_step(self) -> bool:
        """Whether a step may run now: nothing is paused, asleep, invalid or being updated.

        Raises:
            StateError: closed, or the last wake could not prove its content.
        """
        self._require_open()
        return not self._paused and self._sleeper.is_ready(*NEEDED_TAGS)

    def _require_ready(self) -> None:
        self._require_open()
        if self._paused:
            raise AsleepError(
                "generation is paused; call resume_generation(), or wake_up() after sleep(0)"
            )
        self._sleeper.require_ready(*NEEDED_TAGS)
