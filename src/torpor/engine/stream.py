"""Text as it comes, for code that pulls it piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torpor.errors import AsleepError

if TYPE_CHECKING:
    from torpor.engine.engine import Engine
    from torpor.engine.requests.request import Request
    from torpor.outputs import RequestOutput


class Stream:
    """An iterator of pieces of text; ``StopIteration.value`` and ``output`` are the answer.

    Each piece is computed when it is asked for, together with whatever else runs. While the model
    is paused or asleep, asking raises AsleepError; when the request was kept, asking again after
    the wake goes on. A request that was aborted ends the text, with finish reason "abort".
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        """Read a request that was submitted."""
        self._engine = engine
        self._request = request

    @property
    def output(self) -> RequestOutput:
        """The answer so far; final once the iteration has ended."""
        with self._engine.turns.take():
            return self._engine.output(self._request)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty.

        Raises:
            AsleepError: the model is paused, asleep, or without valid weights.
            RequestError: the request failed.
        """
        request = self._request
        (sequence,) = request.sequences
        with self._engine.turns.take():
            while True:
                text = sequence.completion.take_text()
                if text:
                    return text
                if request.error is not None:
                    raise request.error
                if request.finished:
                    raise StopIteration(self._engine.output(request))
                if not self._engine.may_step():
                    raise AsleepError(
                        "the model is paused, asleep or waiting for weights; wake it up and ask "
                        "for the next piece again"
                    )
                if self._engine.core.can_step:
                    self._engine.core.step()
                    self._engine.turns.pass_on()
                else:
                    # Somebody drains the engine, and this request came too late for that.
                    self._engine.turns.wait_until(self._has_news)

    def _has_news(self) -> bool:
        engine = self._engine
        return self._request.finished or engine.core.can_step or not engine.may_step()

    def close(self) -> None:
        """Abort the request if it is not finished."""
        with self._engine.turns.take():
            self._engine.core.abort([self._request.request_id])

    def __del__(self) -> None:
        # Abandoned: nobody will read the rest. The turn may be another thread's, so only a mark is
        # left, and the next step sweeps.
        self._engine.core.abandon(self._request)
