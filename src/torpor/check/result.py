"""What a cycle measured and compared, and the verdict drawn from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torpor.sleep.classes import LEVELS

if TYPE_CHECKING:
    from torpor.check.oracle import Answer
    from torpor.check.rig import Rig
    from torpor.check.roundtrip import Failure, RoundTrip
    from torpor.check.timeline import Timeline

T = TypeVar("T")

MIN_RELEASED_FRACTION = 0.95
"""Of the arena bytes that were resident just before a sleep, at least this much must go."""

_IN_FILES = frozenset({"checkpoint", "file"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleResult:
    """A finished cycle. Sizes in bytes, times in seconds; medians over the cycles of a level."""

    model: str
    cycles: int
    """Asked for, at each level."""
    max_tokens: int
    nap_s: float
    reference: tuple[Answer, ...]
    reference_s: float
    trips: tuple[RoundTrip, ...]
    failure: Failure | None
    owned_bytes: Mapping[str, int]
    """By ownership class."""
    before_load_rss_bytes: int
    load_s: float
    total_s: float
    timeline: Timeline
    rig: Rig

    def trips_at(self, level: int) -> tuple[RoundTrip, ...]:
        """The round trips made at one level."""
        return tuple(trip for trip in self.trips if trip.nap.level == level)

    def median(self, level: int, figure: Callable[[RoundTrip], float]) -> float | None:
        """The median of a figure over the round trips of a level; None without any."""
        figures = [figure(trip) for trip in self.trips_at(level)]
        return statistics.median(figures) if figures else None

    def median_bytes(self, level: int, figure: Callable[[RoundTrip], int]) -> int | None:
        """As ``median``, for sizes."""
        middle = self.median(level, figure)
        return None if middle is None else int(middle)

    def holds(self, level: int, fact: Callable[[RoundTrip], bool]) -> bool:
        """Whether a fact is true of every cycle of a level, and every cycle was made."""
        trips = self.trips_at(level)
        return len(trips) == self.cycles and all(map(fact, trips))

    @property
    def intact(self) -> bool:
        """Whether tokens, log probabilities and digests were equal in every cycle."""
        return self.failure is None and all(
            self.holds(level, lambda trip: trip.intact) for level in LEVELS
        )

    @property
    def shortcomings(self) -> tuple[str, ...]:
        """What is not as it should be although the content is: one sentence each."""
        found = []
        for trip in self.trips:
            where = f"level {trip.nap.level}, cycle {trip.nap.cycle}"
            fraction = released_fraction(trip)
            if fraction < MIN_RELEASED_FRACTION:
                found.append(
                    f"{where}: sleep released {100 * fraction:.1f} % of the arenas' resident "
                    f"memory, less than {100 * MIN_RELEASED_FRACTION:.0f} %"
                )
            elsewhere = trip.nap.host_copy_bytes.keys() - _IN_FILES
            if trip.nap.level == 1 and elsewhere:
                found.append(f"{where}: host copies are not all in files ({sorted(elsewhere)})")
        return tuple(found)

    @property
    def verdict(self) -> str:
        """``intact``, ``differs``, or ``incomplete`` where only memory fell short."""
        if not self.intact:
            return "differs"
        return "incomplete" if self.shortcomings else "intact"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys, or the keys above them, carry units."""
        return {
            "model": self.model,
            "device": "cpu",
            "verdict": self.verdict,
            "weights_bytes": self.owned_bytes.get("parameter", 0),
            "cycles": self.cycles,
            "cycles_done": _by_level(lambda level: len(self.trips_at(level))),
            "tokens_equal": self._all(lambda trip: trip.comparison.tokens_equal),
            "logprobs_equal": self._all(lambda trip: trip.comparison.logprobs_equal),
            "verified": self._all(lambda trip: trip.verified),
            "verified_tensors": _by_level(
                lambda level: self.median_bytes(level, lambda trip: trip.rise.report.verified)
            ),
            "rss_bytes": self._rss_bytes(),
            "arena_rss_bytes": self._arena_rss_bytes(),
            "owned_bytes": dict(self.owned_bytes),
            "copied_bytes": self._total(lambda trip: trip.nap.report.copied_bytes),
            "restored_bytes": self._total(lambda trip: trip.rise.report.restored_bytes),
            "host_copy_bytes": _by_level(self._host_copy_bytes),
            "sleep_s": self._median_s(lambda trip: trip.nap.sleep_s),
            "wake_s": self._median_s(lambda trip: trip.rise.wake_s),
            "load_s": self.load_s,
            "spent_s": self.spent_s(),
            "max_tokens": self.max_tokens,
            "nap_s": self.nap_s,
            "answers": [
                {
                    "prompt": answer.prompt,
                    "text": answer.text,
                    "token_ids": list(answer.token_ids),
                }
                for answer in self.reference
            ],
            "shortcomings": list(self.shortcomings),
            "failure": None if self.failure is None else self.failure.to_dict(),
            "round_trips": [trip.to_dict() for trip in self.trips],
            "rig": self.rig.to_dict(),
        }

    def spent_s(self) -> dict[str, float]:
        """Where the time went, in seconds."""
        trips = self.trips
        parts = {
            "load": self.load_s,
            "answer": self.reference_s + sum(trip.comparison.generate_s for trip in trips),
            "sleep": sum(trip.nap.sleep_s for trip in trips),
            "asleep": self.nap_s * len(trips),
            "wake": sum(trip.rise.wake_s for trip in trips),
            "verify": sum(trip.check.total_s for trip in trips),
        }
        return {**parts, "total": self.total_s}

    def _rss_bytes(self) -> dict[str, int | None]:
        awake = [trip.nap.awake_rss_bytes for trip in self.trips]
        return {
            "before_load": self.before_load_rss_bytes,
            "awake": int(statistics.median(awake)) if awake else None,
            **self._asleep(lambda trip: trip.nap.asleep_rss_bytes),
        }

    def _arena_rss_bytes(self) -> dict[str, int | None]:
        awake = [trip.nap.report.arena_rss_before_bytes for trip in self.trips]
        return {
            "awake": int(statistics.median(awake)) if awake else None,
            **self._asleep(lambda trip: trip.nap.report.arena_rss_after_bytes),
        }

    def _asleep(self, figure: Callable[[RoundTrip], int]) -> dict[str, int | None]:
        return {f"asleep_level{level}": self.median_bytes(level, figure) for level in LEVELS}

    def _host_copy_bytes(self, level: int) -> dict[str, int]:
        trips = self.trips_at(level)
        return dict(trips[-1].nap.host_copy_bytes) if trips else {}

    def _all(self, fact: Callable[[RoundTrip], bool]) -> dict[str, bool]:
        return _by_level(lambda level: self.holds(level, fact))

    def _median_s(self, figure: Callable[[RoundTrip], float]) -> dict[str, float | None]:
        return _by_level(lambda level: self.median(level, figure))

    def _total(self, figure: Callable[[RoundTrip], int]) -> dict[str, int]:
        return _by_level(lambda level: sum(map(figure, self.trips_at(level))))


def released_fraction(trip: RoundTrip) -> float:
    """How much of the arenas' resident memory one sleep gave back: 0 to 1."""
    before = trip.nap.report.arena_rss_before_bytes
    return 1.0 if before == 0 else 1 - trip.nap.report.arena_rss_after_bytes / before


def _by_level(figure: Callable[[int], T]) -> dict[str, T]:
    return {f"level{level}": figure(level) for level in LEVELS}
