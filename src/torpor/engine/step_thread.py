"""The thread that runs an asynchronous engine's steps."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torpor.engine.standstill import Standstill
from torpor.engine.steps.core import step_error
from torpor.errors import StateError, TorporError

if TYPE_CHECKING:
    from torpor.engine.engine import Engine
    from torpor.engine.requests.request import Request
    from torpor.engine.subscription import Subscription


class StepThread:
    """Steps while there is work and the model is awake; waits without using the processor else."""

    def __init__(self, engine: Engine) -> None:
        """Prepare; ``start`` runs it."""
        self.standstill = Standstill(engine)
        self._engine = engine
        self._inbox: deque[Subscription] = deque()
        self._subscriptions: dict[int, Subscription] = {}
        """By the request's number."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="torpor-steps", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Run."""
        self._engine.core.listener = self._tell
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs; what is unfinished is aborted."""
        self._stopping = True
        self._engine.turns.tell()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Note whether steps may run now; from whoever has the turn."""
        self._may_step()

    def submit(self, subscription: Subscription) -> None:
        """Have a request taken in before the next step. Never waits."""
        self._inbox.append(subscription)
        self._engine.turns.tell()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests as aborted, those that wait to be taken in too; with the turn."""
        self._take_in()
        self._engine.core.abort(request_ids)

    def cancel(self, subscription: Subscription) -> None:
        """The reader is gone: abort the request if it is not finished. Never waits."""
        if not subscription.request.finished:
            self._engine.core.abandon(subscription.request)
            self._engine.turns.tell()

    def _run(self) -> None:
        turns = self._engine.turns
        with turns.take():
            try:
                while True:
                    turns.wait_until(self._has_news)
                    if self._stopping:
                        break
                    self._go_round()
                    turns.pass_on()
            finally:
                # Nobody steps from here on, whatever the reason: those who wait are told.
                self._stopping = True
                self._end()

    def _go_round(self) -> None:
        core = self._engine.core
        try:
            self._take_in()
            core.sweep()
            if core.can_step and self._may_step():
                core.step()
        except Exception as error:
            # Not of any single request, or the core had kept it to that one.
            reason = error if isinstance(error, TorporError) else step_error(error)
            for request in core.requests:
                core.finish(request, "error", reason)

    def _has_news(self) -> bool:
        core = self._engine.core
        return (
            self._stopping
            or bool(self._inbox)
            or core.has_abandoned
            or (core.can_step and self._may_step())
        )

    def _may_step(self) -> bool:
        try:
            may_step = self._engine.may_step()
        except StateError:
            # Faulted: the requests have to be told, which the step does.
            may_step = True
        self.standstill.note(may_step=may_step)
        return may_step

    def _take_in(self) -> None:
        while self._inbox:
            subscription = self._inbox.popleft()
            request = subscription.request
            if subscription.coming.request_id is None:
                request.request_id = self._free_name(request.request_id)
            self._subscriptions[request.number] = subscription
            try:
                self._engine.submit(request)
                if subscription.coming.is_aborted:
                    self._engine.core.finish(request, "abort", None)
            except Exception as error:
                del self._subscriptions[request.number]
                subscription.put(error if isinstance(error, TorporError) else step_error(error))

    def _free_name(self, name: str) -> str:
        """A name, or the first of name-1, name-2 and so on that no unfinished request has."""
        # With the turn, so that nobody takes it meanwhile. The number itself stays: it is the
        # request's place in the order, and its seed.
        knows = self._engine.core.knows
        others = (f"{name}-{index}" for index in itertools.count(1))
        return next(free for free in itertools.chain([name], others) if not knows(free))

    def _tell(self, request: Request) -> None:
        subscription = self._subscriptions.get(request.number)
        if subscription is None:
            return
        subscription.tell()
        if request.finished:
            del self._subscriptions[request.number]

    def _end(self) -> None:
        self._take_in()
        self._engine.core.abort_all()
