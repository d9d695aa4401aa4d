"""The one lock of an engine: whoever steps lets other callers in between two steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torpor.engine.steps.news import News
from torpor.errors import StateError

_CHILD_WAIT_S = 1.0
"""For a lock in a forked process: another thread of that process may be looking at it too."""


class Turns:
    """A re-entrant lock that is handed over in turn, and news to wait for.

    Python's own locks may give a thread that releases and asks again the next turn too, so that a
    loop of steps would starve a caller of ``sleep``. Here everyone passes a gate before waiting
    for the lock, and the one who waits holds the gate: a loop that comes round finds it shut.

    An interrupt may come between any two lines. So nothing here remembers who has the turn: the
    locks know it themselves, and whoever leaves asks them.
    """

    def __init__(self) -> None:
        """Nobody has the turn."""
        self._gate = threading.RLock()
        self._lock = threading.RLock()
        # Apart from the turn, so that telling news never waits for a step.
        self._news = News()
        self._process = os.getpid()

    @property
    def held(self) -> bool:
        """Whether the calling thread has the turn."""
        return is_held(self._lock)

    @contextmanager
    def take(self) -> Iterator[None]:
        """Have the turn for the length of a with block; may be nested in one thread.

        After an interrupt in `wait_until` or `pass_on` the block is left without the turn; what has
        to be undone under it takes it again.
        """
        if self.held:
            yield
            return
        try:
            try:
                self._acquire()
                yield
            finally:
                self._release()
        finally:
            self._release()  # the first may have been interrupted

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Give the turn away until a condition holds, and have it again.

        ``holds`` is asked with the turn, first at once, then after each piece of news: the end of
        anyone's turn, or `tell`.
        """
        # What was done in this turn so far is news to others; asking once more and finding it as it
        # was is none, or two who wait would wake each other for ever.
        is_news = True
        while True:
            seen = self._news.count
            if holds():
                return
            self._release(is_news=is_news)
            self._news.wait_beyond(seen + is_news)
            self._acquire()
            is_news = False

    def pass_on(self) -> None:
        """Let whoever waits for the turn have it, and take it again."""
        assert self.held, "giving away a turn that is not held"
        self._release()
        self._acquire()

    def tell(self) -> None:
        """Have every condition that is waited for asked again. Never waits."""
        self._news.tell()

    def _acquire(self) -> None:
        if os.getpid() != self._process:
            self._enter_child()
        try:
            try:
                self._gate.acquire()
                self._lock.acquire()
            finally:
                _let_go(self._gate)
        finally:
            _let_go(self._gate)

    def _enter_child(self) -> None:
        """In a forked process, which has the locks as they were and none of the other threads."""
        for lock in (self._gate, self._lock):
            if not lock.acquire(timeout=_CHILD_WAIT_S):
                raise StateError(
                    "this process was forked while another thread of its parent used the engine, "
                    "whose state is unknown here; fork while it is idle, or load the model anew"
                )
            lock.release()
        self._process = os.getpid()

    def _release(self, *, is_news: bool = True) -> None:
        if self.held:
            _let_go(self._lock)
            if is_news:
                self.tell()


def is_held(lock: threading.RLock) -> bool:
    """Whether the calling thread holds a lock."""
    held: bool = lock._is_owned()  # type: ignore[attr-defined]
    return held


def _let_go(lock: threading.RLock) -> None:
    if is_held(lock):
        lock.release()
