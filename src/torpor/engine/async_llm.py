"""``AsyncLLM``: the engine for asyncio, with a thread of its own that runs the steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from torpor.engine.args import EngineOptions, engine_args
from torpor.engine.engine import Engine
from torpor.engine.options import check_on_asleep, check_timeout
from torpor.engine.requests.prompts import params_for
from torpor.engine.step_thread import StepThread
from torpor.engine.subscription import Coming, Subscription
from torpor.errors import ArgumentError, AsleepError, StateError, shown

if TYPE_CHECKING:
    import torch

    from torpor.engine.requests.request import Request
    from torpor.engine.text.tokenizer import Tokenizer
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams
    from torpor.sleep.reports import SleepReport, UpdateReport, VerifyReport, WakeReport
    from torpor.sleep.source import WeightSource

    Pairs = Iterable[tuple[str, torch.Tensor]]

P = ParamSpec("P")
T = TypeVar("T")

_SHORTEST_WAIT_S = 1e-3
"""Long enough for the loop to hand over what has come, even to a reader that is overdue."""


class AsyncLLM:
    """A model that answers many tasks of an event loop at once, sleeps and wakes.

    Steps run in one thread of its own; control calls take their turn between two steps, in threads
    of the loop's pool, so the loop never waits. Use it as ``async with``, or ``shutdown()`` it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        on_asleep: str = "queue",
        asleep_timeout_s: float = 600.0,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load a model and leave it awake; takes as long as loading takes.

        Args:
            model: a name such as "smollm2", or a model folder.
            on_asleep: what becomes of a request that comes while the model is asleep or paused:
                "queue" holds it until somebody wakes the model, "reject" refuses it with
                AsleepError, "wake" wakes the model. While it is awake with weights that nobody has
                filled yet, "reject" refuses with WeightsIncompleteError and the others hold it.
            asleep_timeout_s: how long a request may wait for the model to wake, or for its
                weights, in seconds; from when it fell asleep, or the request came if that is later.
            options: see `EngineArgs`.

        Raises:
            ArgumentError: as ``LLM``, or an unknown policy.
        """
        self._on_asleep = check_on_asleep(on_asleep)
        self._timeout_s = check_timeout("asleep_timeout_s", asleep_timeout_s)
        self._engine = Engine(engine_args(model, options))
        # Requests that want a wake wait here one behind the other, whatever loop they are of, and
        # not in the loop's pool, which others need.
        self._waker = ThreadPoolExecutor(1, thread_name_prefix="torpor-waker")
        self._coming: list[Coming] = []
        self._thread = StepThread(self._engine)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine behind this face; its calls block."""
        return self._engine

    async def generate(
        self,
        prompt: object,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt and yield its output whenever it has something new.

        Leaving the iteration early, or cancelling its task, aborts the request.

        Args:
            prompt: one prompt, as for ``LLM.generate``.
            sampling_params: None for the defaults; ``output_kind`` says whether outputs hold
                everything so far, what is new, or come once at the end.
            request_id: unique among unfinished requests; None for the next number, with a suffix
                such as "-1" if an unfinished request has that name.
            priority: lower first; read by the priority policy.
            cache_salt: prefixes are shared only with requests of the same salt.

        Raises:
            RequestError: this request is refused or failed; no other one is touched.
            AsleepError: asleep and refused, or not woken in time.
            WeightsIncompleteError: the same for a model that is awake without its weights.
        """
        self._require_alive()
        number = self._engine.next_number()
        coming = Coming(request_id)
        self._coming.append(coming)
        try:
            request = await asyncio.to_thread(
                self._prepare,
                prompt,
                sampling_params,
                request_id=request_id,
                number=number,
                priority=priority,
                cache_salt=cache_salt,
            )
            await self._answer_sleep()
            # A shutdown meanwhile would leave nobody to take it in.
            self._require_alive()
            loop = asyncio.get_running_loop()
            subscription = Subscription(request, loop, coming)
            self._thread.submit(subscription)
        finally:
            self._coming.remove(coming)
        try:
            while not subscription.ended:
                yield await self._next(subscription)
        finally:
            self._thread.cancel(subscription)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests, with finish reason "abort", whether they run, wait or are still being
        prepared; unknown ids are passed over.

        Raises:
            ArgumentError: neither an id nor several; nothing is aborted.
        """
        names = _names(request_id)
        for coming in tuple(self._coming):
            coming.is_aborted |= coming.request_id in names
        await self._in_turn(lambda: self._thread.abort(names))

    async def sleep(
        self, level: int | str = 1, tags: Sequence[str] | None = None, mode: str = "abort"
    ) -> SleepReport:
        """As ``LLM.sleep``."""
        return await asyncio.to_thread(self._engine.sleep, level, tags, mode)

    async def wake_up(
        self, tags: Sequence[str] | None = None, *, reload: bool | None = None
    ) -> WakeReport:
        """As ``LLM.wake_up``."""
        return await self._in_turn(lambda: self._engine.wake_up(tags, reload=reload))

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """As ``LLM.pause_generation``."""
        await asyncio.to_thread(self._engine.pause_generation, mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """As ``LLM.resume_generation``."""
        await self._in_turn(self._engine.resume_generation)

    async def is_sleeping(self) -> bool:
        """As ``LLM.is_sleeping``."""
        return self._engine.is_sleeping()

    async def is_paused(self) -> bool:
        """As ``LLM.is_paused``."""
        return self._engine.is_paused()

    async def release_kv_cache_memory(self, mode: str = "abort") -> SleepReport:
        """As ``LLM.release_kv_cache_memory``."""
        return await asyncio.to_thread(self._engine.release_kv_cache_memory, mode)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As ``LLM.reset_prefix_cache``."""
        return await asyncio.to_thread(self._engine.reset_prefix_cache, reset_running_requests)

    async def update_weights(
        self, source: WeightSource | Pairs, version: str | None = None
    ) -> UpdateReport:
        """As ``LLM.update_weights``; requests that run go on with the new weights."""
        return await self._in_turn(lambda: self._engine.update_weights(source, version))

    async def begin_update(self, version: str | None = None) -> None:
        """As ``LLM.begin_update``; no step runs until the update is finished."""
        await asyncio.to_thread(self._engine.begin_update, version)

    async def load_weights(self, pairs: Pairs) -> set[str]:
        """As ``LLM.load_weights``; no step runs until the update is finished."""
        return await asyncio.to_thread(self._engine.load_weights, pairs)

    async def finish_update(self) -> UpdateReport:
        """As ``LLM.finish_update``."""
        return await self._in_turn(self._engine.finish_update)

    async def reload_weights(self) -> UpdateReport:
        """As ``LLM.reload_weights``."""
        return await self._in_turn(self._engine.reload_weights)

    async def calibrate_kv_scales(self, prompts: object) -> UpdateReport:
        """As ``LLM.calibrate_kv_scales``."""
        return await self._in_turn(lambda: self._engine.calibrate_kv_scales(prompts))

    async def verify(self) -> VerifyReport:
        """As ``LLM.verify``."""
        return await asyncio.to_thread(self._engine.verify)

    async def check_health(self) -> None:
        """Return if requests are served, or will be after a wake.

        Raises:
            StateError: shut down.
            FaultedError: the last wake could not prove its content.
            WeightsIncompleteError: awake, but weights have to be reloaded or updated first.
        """
        self._require_alive()
        await asyncio.to_thread(self._require_content)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return self._engine.core.num_unfinished_requests

    def status(self) -> dict[str, Any]:
        """As ``LLM.status``."""
        return self._engine.status()

    def shutdown(self) -> None:
        """Abort everything, end the thread and give the memory back; repeating it is fine."""
        self._thread.stop()
        self._engine.close()
        # Whoever waits there finds the engine closed and does nothing.
        self._waker.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _prepare(
        self, prompt: object, sampling_params: SamplingParams | None, **options: Any
    ) -> Request:
        """Off the loop: long prompts and grammars take time."""
        read = self._engine.reader.read(prompt)
        (params,) = params_for(sampling_params, 1)
        return self._engine.prepare(read, params, **options)

    async def _next(self, subscription: Subscription) -> RequestOutput:
        while not subscription.is_ready:
            left_s = max(self._left_s(subscription.request), _SHORTEST_WAIT_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(subscription.wait(), left_s)
            self._refuse_overdue(subscription)
        return subscription.take()

    def _left_s(self, request: Request) -> float:
        """How long a request may still wait, should no step run until then."""
        since_s = self._thread.standstill.since_s
        if since_s is None:
            # A long queue or a long step, if anything. A standstill that begins later ends later.
            return self._timeout_s
        return max(since_s, request.arrival_s) + self._timeout_s - time.monotonic()

    def _refuse_overdue(self, subscription: Subscription) -> None:
        """Raise if a request's time is up, the model stands still, and nothing has just come."""
        if subscription.is_ready or self._left_s(subscription.request) > 0:
            return
        if self._engine.is_sleeping():
            raise AsleepError(
                f"the model is still asleep or paused after {self._timeout_s:g} s; wake it up, "
                "or raise asleep_timeout_s"
            )
        self._thread.standstill.require_content(f" after {self._timeout_s:g} s")

    async def _answer_sleep(self) -> None:
        if self._on_asleep == "reject":
            if self._engine.is_sleeping():
                raise AsleepError("the model is asleep or paused; wake it up, or ask again later")
            if self._thread.standstill.lacks_content:
                # Looked at again once it holds for sure: a wake or an update may be at work.
                await asyncio.to_thread(self._require_content)
        elif self._on_asleep == "wake" and self._engine.is_sleeping():
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._waker, self._wake_if_asleep)

    def _wake_if_asleep(self) -> None:
        with self._engine.turns.take():
            if self._engine.is_sleeping():
                self._engine.wake_up()

    def _require_content(self) -> None:
        """Raise if no step may run before weights are filled, or ever; waits for an update."""
        if not self._engine.may_step():
            self._thread.standstill.require_content()

    async def _in_turn(self, act: Callable[[], T]) -> T:
        def run() -> T:
            with self._engine.turns.take():
                result = act()
                # In the same turn: the next nap may begin before the thread comes to look.
                self._thread.look()
                return result

        return await asyncio.to_thread(run)

    def _require_alive(self) -> None:
        if not self._thread.is_alive:
            raise StateError("this AsyncLLM is shut down; make a new one")


def _names(request_id: Any) -> list[str]:
    """One id or several as a list."""
    if isinstance(request_id, str):
        return [request_id]
    names = list(request_id) if isinstance(request_id, Iterable) else [request_id]
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"request_id is {shown(request_id)}; give a string, or several in a list"
        )
    return names
