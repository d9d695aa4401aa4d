"""What the scheduler decides for one step. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torpor.engine.requests.request import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step."""

    sequence: Sequence
    start: int
    """Position of the first new token: so many are in the cache."""
    num_new_tokens: int
    """At least 1."""

    @property
    def end(self) -> int:
        """Position after the last new token."""
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Whether this step reaches the sequence's end, so that it draws a token."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one forward pass."""

    rows: Seq[Row]
    fresh_blocks: Seq[int] = ()
    """Blocks to clear before the step, for backends that read beyond lengths."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.num_new_tokens for row in self.rows)
