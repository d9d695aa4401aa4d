"""What the ledger said of one entry, so that a transition that fails can make it say so again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.sleep.ledger import Entry


class Page:
    """Validity, official digest, host copy and staleness of one entry at one moment."""

    __slots__ = ("by_hand", "digest", "entry", "host", "stale", "valid")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.valid = entry.valid
        self.digest = entry.digest
        self.host = entry.host
        self.stale = entry.stale
        self.by_hand = entry.by_hand

    def put_back(self) -> None:
        """Write it all back. The bytes are another matter."""
        self.entry.valid = self.valid
        self.entry.digest = self.digest
        self.entry.host = self.host
        self.entry.stale = self.stale
        self.entry.by_hand = self.by_hand
