"""News that threads wait for: a number that grows."""

from __future__ import annotations

import threading


class News:
    """Something may have changed; whoever waits should look again."""

    def __init__(self) -> None:
        """No news yet."""
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How often there was news."""
        with self._changed:
            return self._count

    def tell(self) -> None:
        """Wake everyone who waits. Never waits itself."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_beyond(self, count: int) -> None:
        """Wait until there was news more often than ``count``."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > count)
