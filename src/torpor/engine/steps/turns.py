"""The one lock of an engine: whoever steps lets other callers in between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """A re-entrant lock that is handed over in turn, and news to wait for.

    Python's own locks may give a thread that releases and asks again the next turn too, so that a
    loop of steps would starve a caller of ``sleep``. Here everyone passes a gate before waiting
    for the lock, and the one who waits holds the gate: a loop that comes round finds it shut.
    """

    def __init__(self) -> None:
        """Nobody has the turn."""
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        # Apart from the turn, so that telling news never waits for a step.
        self._news = threading.Condition()
        self._num_news = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Have the turn for the length of a with block; may be nested in one thread."""
        if self._owner == threading.get_ident():
            yield
            return
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Give the turn away until a condition holds, and have it again.

        ``holds`` is asked with the turn, first at once, then after each piece of news: the end of
        anyone's turn, or `tell`.
        """
        # What was done in this turn so far is news to others; asking once more and finding it as it
        # was is none, or two who wait would wake each other for ever.
        is_news = True
        while True:
            with self._news:
                seen = self._num_news
            if holds():
                return
            self._release(is_news=is_news)
            try:
                self._wait_for_news(seen + is_news)
            finally:
                self._acquire()
            is_news = False

    def pass_on(self) -> None:
        """Let whoever waits for the turn have it, and take it again."""
        self._release()
        self._acquire()

    def tell(self) -> None:
        """Have every condition that is waited for asked again. Never waits."""
        with self._news:
            self._num_news += 1
            self._news.notify_all()

    def _acquire(self) -> None:
        with self._gate:
            self._lock.acquire()
        self._owner = threading.get_ident()

    def _release(self, *, is_news: bool = True) -> None:
        assert self._owner == threading.get_ident(), "giving away a turn that is not held"
        self._owner = None
        self._lock.release()
        if is_news:
            self.tell()

    def _wait_for_news(self, seen: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._num_news > seen)
