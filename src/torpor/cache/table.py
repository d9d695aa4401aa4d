"""The block table of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torpor.cache.pool import NULL_BLOCK
from torpor.cache.prefix import Epochs, PrefixChain


@dataclass(slots=True, kw_only=True, eq=False)
class BlockTable:
    """Which block holds which positions, and how much of it others can find."""

    token_ids: Sequence[int]
    """The request's own list, read live."""
    chain: PrefixChain
    block_ids: list[int] = field(default_factory=list)
    """By position: entry i covers tokens ``i * block_size`` and on. Grows at its end only (I6)."""
    num_skipped: int = 0
    """Entries at the start that are the null block, because no layer looks there any more."""
    num_registered: int = 0
    """Entries at the start whose keys went into the index, by this request or before its hit."""
    epochs: Epochs | None = None
    """What the table was begun under; None when it may register nothing."""

    def begin(self, hits: Sequence[int], epochs: Epochs) -> None:
        """Start an empty table with cached blocks, null blocks first."""
        assert not self.block_ids, "I6: a table is begun once"
        self.block_ids = list(hits)
        self.num_skipped = sum(block == NULL_BLOCK for block in hits)
        self.num_registered = len(hits)
        self.epochs = epochs

    def held(self) -> list[int]:
        """The blocks of the table, null blocks left out, by position."""
        return self.block_ids[self.num_skipped :]

    def skip_to(self, end: int) -> list[int]:
        """Put the null block into the first ``end`` entries; returns what was there."""
        if end <= self.num_skipped:
            return []
        start, self.num_skipped = self.num_skipped, end
        gone = self.block_ids[start:end]
        self.block_ids[start:end] = [NULL_BLOCK] * (end - start)
        return gone

    def clear(self) -> None:
        """Let go of every entry."""
        # A new list: whoever was handed the old one for a step keeps what that step saw.
        self.block_ids = []
        self.num_skipped = 0
        self.num_registered = 0
        self.epochs = None
