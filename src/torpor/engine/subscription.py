"""Where one asynchronous request's outputs wait for their reader."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torpor.engine.requests.answers import Teller
from torpor.outputs import RequestOutput
from torpor.params import RequestOutputKind

if TYPE_CHECKING:
    from torpor.engine.requests.request import Request


@dataclass(slots=True, eq=False)
class Coming:
    """A request from its call until it is taken in: nobody else knows of it so early."""

    request_id: str | None
    """As the caller chose it; None to have one found that is not in use."""
    is_aborted: bool = False
    """Whether somebody aborted it meanwhile; it then ends as soon as it is taken in."""


class Subscription:
    """Filled from the step thread, read in the event loop.

    A reader that is slower than the steps finds what is newest: cumulative outputs replace each
    other, those that tell only what is new are kept one by one.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, coming: Coming) -> None:
        """Wait for a request's outputs, of the kind that its parameters ask for.

        Args:
            request: not taken in yet.
            loop: where the outputs are read.
            coming: the id that its caller chose, and whether it is to be aborted.
        """
        self.request = request
        self.coming = coming
        self.ended = False
        """Whether the last output, or the error, was read."""
        self._loop = loop
        self._teller = Teller(request)
        self._replaces = request.params.output_kind is RequestOutputKind.CUMULATIVE
        self._items: deque[RequestOutput | BaseException] = deque()
        self._arrived = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items)

    async def wait(self) -> None:
        """Wait until there is something to take."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> RequestOutput:
        """The next output; there must be one.

        Raises:
            TorporError: why the request was refused or failed.
        """
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self.ended = True
            raise item
        self.ended = item.finished
        return item

    def tell(self) -> None:
        """Hand over what is new of the request; from the step thread, with the turn."""
        if self.request.error is not None:
            self.put(self.request.error)
            return
        output = self._teller.tell()
        if output is not None:
            self.put(output)

    def put(self, item: RequestOutput | BaseException) -> None:
        """Hand over one thing; from any thread."""
        # A loop that is closed has no reader.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._receive, item)

    def _receive(self, item: RequestOutput | BaseException) -> None:
        if self._replaces and self._items:
            self._items.pop()
        self._items.append(item)
        self._arrived.set()
