"""Samples and what is told of them: the median, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDE_SPREAD = 0.1
"""Samples further apart than this share of their median say little about small differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Repeated measurements of one figure, all in the unit that the figure's name carries."""

    samples: tuple[float, ...]
    """In the order they were taken; at least one."""

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.samples)

    @property
    def min(self) -> float:
        """The smallest."""
        return min(self.samples)

    @property
    def max(self) -> float:
        """The largest."""
        return max(self.samples)

    @property
    def is_wide(self) -> bool:
        """Whether the samples lie far apart."""
        return self.max - self.min > WIDE_SPREAD * self.median

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, for a key that carries the unit."""
        return {
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "samples": list(self.samples),
        }


def spread(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    assert samples, "nothing was measured"
    return Spread(samples=tuple(samples))


def rates(amount: float, seconds: Spread) -> Spread:
    """How much per second, when each sample of ``seconds`` went on the same ``amount``."""
    return spread([amount / sample for sample in seconds.samples])
