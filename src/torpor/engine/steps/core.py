"""The step loop: schedule, launch, collect, and what the tokens mean for their requests.

Not thread-safe: the engine's turn protects it. Between two calls no step is in flight, so a sleep
that has the turn finds the model at rest.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torpor.engine.requests.request import Request, Sequence
from torpor.engine.steps.turns import is_held
from torpor.errors import RequestError, StepError, TorporError

if TYPE_CHECKING:
    from torpor.engine.sampling.sampler import SampledToken
    from torpor.engine.steps.runner import Launched, ModelRunner
    from torpor.engine.steps.scheduler import Scheduler
    from torpor.engine.steps.step import Row, Step
    from torpor.outputs import FinishReason
    from torpor.sleep.sleeper import Sleeper


class EngineCore:
    """Every unfinished request of one model, and the steps that finish them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sleeper: Sleeper,
        *,
        ready: Callable[[], None],
        pages: Callable[[], None] = lambda: None,
        kv_scales: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: decides the steps.
            runner: computes them.
            sleeper: whose epochs say what the cache and the weights are worth.
            ready: called before each step; raises unless it may run.
            pages: called when the blocks of a step are known; may see to those of later ones.
            kv_scales: what cached keys and values are read with; asked when weights have changed.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._sleeper = sleeper
        self._ready = ready
        self._pages = pages
        self._requests: dict[str, Request] = {}
        self._kv_epoch = sleeper.kv_epoch
        self._kv_scales = kv_scales
        self._scaled: tuple[int, tuple[float, ...]] | None = None
        """The weights epoch of the last step, and the scales that it wrote and read with."""
        self._abandoned: deque[Request] = deque()
        # Held during a step. A lock, since it knows by itself who holds it: a note of ours would be
        # wrong for ever after an interrupt in the wrong place.
        self._stepping = threading.RLock()
        self.listener: Callable[[Request], None] | None = None
        """Told, with the turn, of every request that has something new."""

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The unfinished ones, by arrival."""
        return tuple(self._requests.values())

    @property
    def can_step(self) -> bool:
        """Whether a step would compute something, if the model were ready."""
        return self.scheduler.has_work

    @property
    def is_stepping(self) -> bool:
        """Whether the calling thread is in the middle of a step, as a signal handler may be."""
        return is_held(self._stepping)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Take in a request; its id must not be in use."""
        assert request.request_id not in self._requests, f"{request.request_id} is in use"
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def step(self) -> list[Request]:
        """Run one step.

        Returns:
            The requests that have something new: tokens, an end or an error. When the step itself
            failed, that is all of its requests.

        Raises:
            AsleepError, WeightsIncompleteError: no step may run; nothing has changed.
            KeyboardInterrupt: the step was interrupted; every request starts over at the next
                one, and keeps its tokens.
        """
        self._ready()
        with self._stepping:
            return self._step()

    def _step(self) -> list[Request]:
        step: Step | None = None
        try:
            self.notice_epochs()
            self._notice_scales()
            self.sweep()
            step = self.scheduler.schedule()
            if not step.rows:
                return []
            self._pages()
            launched = self._runner.launch(step)
            return self._apply(launched, self._runner.collect(launched))
        except Exception as error:
            if step is None:
                self._recover()
                raise
            self._undo(step)
            return self._fail_step(step, error)
        except BaseException:
            self._recover()
            raise

    def notice_epochs(self) -> None:
        """Drop what the cache held if its memory was released since the last step.

        The engine's own sleep does so at once. Coming here too makes it true whoever released the
        memory, as through the sleeper itself.
        """
        if self._sleeper.kv_epoch != self._kv_epoch:
            self.scheduler.drop_cache()
            self._kv_epoch = self._sleeper.kv_epoch

    def _notice_scales(self) -> None:
        """Let running requests start over if their keys and values were written by other scales.

        Nobody else can find them: prefixes are known by the epoch of the weights, which has moved.
        """
        epoch = self._sleeper.weights_epoch
        if self._scaled is not None and self._scaled[0] == epoch:
            return
        scales = self._kv_scales()
        if self._scaled is not None and self._scaled[1] != scales:
            self.scheduler.preempt_all()
        self._scaled = epoch, scales

    def finish(self, request: Request, reason: FinishReason, error: TorporError | None) -> None:
        """End a request from outside: an abort or a failure."""
        if self._end(request, reason, error):
            self._tell(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests as aborted; ids that are unknown or finished are passed over."""
        found = [self._requests[name] for name in request_ids if name in self._requests]
        for request in found:
            self.finish(request, "abort", None)
        return found

    def abandon(self, request: Request) -> None:
        """End a request at the next step; for finalisers, from any thread, never waiting."""
        self._abandoned.append(request)

    @property
    def has_abandoned(self) -> bool:
        """Whether there is something to sweep."""
        return bool(self._abandoned)

    def sweep(self) -> None:
        """End the requests that were abandoned."""
        while self._abandoned:
            # Gone from the list only once it has ended, or an interrupt would lose it.
            self.finish(self._abandoned[0], "abort", None)
            self._abandoned.popleft()

    def abort_all(self) -> list[Request]:
        """End every request as aborted."""
        return self.abort(tuple(self._requests))

    def _apply(
        self, launched: Launched, results: list[SampledToken | RequestError]
    ) -> list[Request]:
        touched: dict[str, Request] = {}
        now_s = time.monotonic()
        for row, result in zip(launched.rows, results, strict=True):
            request = row.sequence.request
            touched[request.request_id] = request
            if row.sequence.finished:
                continue  # a sibling failed, and took this one along
            if isinstance(result, RequestError):
                self._fail(row, result)
            else:
                self._accept(row.sequence, result, now_s)
        for request in touched.values():
            self._tell(request)
        return list(touched.values())

    def _end(self, request: Request, reason: FinishReason, error: TorporError | None) -> bool:
        """As ``finish``, and tell nobody; False when it has finished or was never taken in."""
        if self._requests.get(request.request_id) is not request:
            return False
        request.error = error
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.completion.end(reason)
                self.scheduler.finish(sequence)
        self._settle(request)
        return True

    def _tell(self, request: Request) -> None:
        if self.listener is not None:
            self.listener(request)

    def _accept(self, sequence: Sequence, token: SampledToken, now_s: float) -> None:
        request, completion = sequence.request, sequence.completion
        try:
            completion.accept(token)
        except RequestError as error:
            self._end(request, "error", self._named(request, error))
            return
        sequence.token_ids.append(token.token_id)
        request.weights_epoch = self._sleeper.weights_epoch
        request.weights_version = self._sleeper.weights_version
        if request.first_token_s is None:
            request.first_token_s = now_s
        if completion.finished:
            self.scheduler.finish(sequence)
            self._settle(request)

    def _undo(self, step: Step) -> None:
        sequences = [row.sequence for row in step.rows]
        _keep_accepted(sequences)
        self.scheduler.undo(step)
        self._finish_ended(sequences)

    def _recover(self) -> None:
        """After an interrupt between any two lines: what a half-done change left in the books is
        unknown, so they are emptied and everyone starts over."""
        requests = tuple(self._requests.values())
        sequences = [sequence for request in requests for sequence in request.sequences]
        _keep_accepted(sequences)
        self.scheduler.recover(sequences)
        self._finish_ended(sequences)

    def _finish_ended(self, sequences: Iterable[Sequence]) -> None:
        """Finish what was stopped between a completion's end and its sequence's."""
        for sequence in sequences:
            if sequence.completion.finished:
                self.scheduler.finish(sequence)
                self._settle(sequence.request)

    def _fail_step(self, step: Step, error: Exception) -> list[Request]:
        requests = {row.sequence.request.number: row.sequence.request for row in step.rows}
        reason = error if isinstance(error, TorporError) else step_error(error)
        for request in requests.values():
            self._end(request, "error", reason)
            self._tell(request)
        return list(requests.values())

    def _fail(self, row: Row, error: RequestError) -> None:
        # What made the logits unusable may be in the keys and values too: nobody may hit them.
        self.scheduler.distrust(row.sequence)
        self._end(row.sequence.request, "error", self._named(row.sequence.request, error))

    def _named(self, request: Request, error: RequestError) -> RequestError:
        named = type(error)(f"request {request.request_id}: {error}")
        named.__cause__ = error
        return named

    def _settle(self, request: Request) -> None:
        if request.finished:
            request.finished_s = time.monotonic()
            self._requests.pop(request.request_id, None)


def _keep_accepted(sequences: Iterable[Sequence]) -> None:
    """Bring sequences to the tokens of their completions, which alone are all or nothing."""
    for sequence in sequences:
        sequence.token_ids[sequence.num_prompt_tokens :] = sequence.completion.token_ids


def step_error(error: Exception) -> StepError:
    """The error of requests that were in a step when it failed."""
    named = StepError(
        f"a step failed with {type(error).__name__}: {error}; its requests may be sent again"
    )
    named.__cause__ = error
    return named
