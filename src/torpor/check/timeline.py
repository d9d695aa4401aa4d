"""What happened when, and how much memory was resident: recorded while a cycle runs.

Times are seconds since the recorder was made. Two kinds of memory are kept apart: bytes of owned
tensors by ownership class, known from the tags that are mapped, and the resident set of the whole
process, sampled from the kernel by a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torpor.sleep.classes import POLICIES, OwnershipClass
from torpor.sleep.procfs import process_rss_bytes

SAMPLE_INTERVAL_S = 0.005
_SMALLEST_STEP_BYTES = 256 * 1024
"""Smaller changes are not worth a point."""
_LONGEST_GAP_S = 0.25

OTHER = "other"
"""Time of a transition that lies in none of its reported phases."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a transition."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that was done."""

    kind: str
    """``load``, ``answer``, ``sleep``, ``asleep``, ``wake`` or ``verify``."""
    start_s: float
    end_s: float
    level: int = 0
    cycle: int = 0
    phases: tuple[Phase, ...] = ()
    """In order. Reports give durations, so each begins where the one before it ends."""

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class RssPoint:
    """Resident bytes of the process at one moment."""

    at_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class ClassPoint:
    """Resident bytes of owned tensors at one moment, by ownership class."""

    at_s: float
    class_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A finished recording."""

    spans: tuple[Span, ...]
    class_points: tuple[ClassPoint, ...]
    rss_points: tuple[RssPoint, ...]
    duration_s: float

    def longest(self, kind: str, level: int) -> Span | None:
        """The longest span of a kind at a level, or None."""
        spans = (span for span in self.spans if (span.kind, span.level) == (kind, level))
        return max(spans, key=lambda span: span.duration_s, default=None)


@dataclass(slots=True)
class OpenSpan:
    """Filled in while it lasts."""

    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in the order in which they began."""


class Recorder:
    """Records spans and memory. One per run; used by one thread."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter()
        self._spans: list[Span] = []
        self._class_points: list[ClassPoint] = []
        self._rss_points: list[RssPoint] = []
        self._stop = threading.Event()

    @property
    def now_s(self) -> float:
        """Seconds since this recorder was made."""
        return time.perf_counter() - self._origin_s

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the process's resident set in a thread while the body runs."""
        self._sample(keep=True)
        thread = threading.Thread(target=self._sample_until_stopped, name="torpor-rss")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._sample(keep=True)

    @contextmanager
    def span(self, kind: str, *, level: int = 0, cycle: int = 0) -> Iterator[OpenSpan]:
        """Record what the body does, if it succeeds."""
        opened = OpenSpan()
        start_s = self.now_s
        yield opened
        end_s = self.now_s
        phases = _laid_out(opened.phase_s, start_s, end_s)
        self._spans.append(Span(kind, start_s, end_s, level, cycle, phases))

    def mark(self, class_bytes: Mapping[str, int], at_s: float | None = None) -> None:
        """Record the resident bytes by class at a moment (default: now)."""
        moment_s = self.now_s if at_s is None else at_s
        self._class_points.append(ClassPoint(moment_s, dict(class_bytes)))

    def mark_transition(
        self, before: Mapping[str, int], after: Mapping[str, int], phase_name: str
    ) -> None:
        """Record that one phase of the last span changed the resident bytes."""
        span = self._spans[-1]
        phase = next((phase for phase in span.phases if phase.name == phase_name), None)
        start_s, end_s = (phase.start_s, phase.end_s) if phase else (span.start_s, span.end_s)
        self.mark(before, start_s)
        self.mark(after, end_s)

    def finish(self) -> Timeline:
        """Everything recorded so far."""
        return Timeline(
            tuple(self._spans), tuple(self._class_points), tuple(self._rss_points), self.now_s
        )

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self, *, keep: bool = False) -> None:
        point = RssPoint(self.now_s, process_rss_bytes())
        points = self._rss_points
        level = len(points) > 1 and _is_close(points[-2], points[-1])
        if not keep and level and _is_close(points[-2], point):
            # Still level: the newest point stands for all since the one before it.
            points[-1] = point
        else:
            points.append(point)


def _is_close(earlier: RssPoint, later: RssPoint) -> bool:
    return (
        abs(later.rss_bytes - earlier.rss_bytes) < _SMALLEST_STEP_BYTES
        and later.at_s - earlier.at_s < _LONGEST_GAP_S
    )


def _laid_out(phase_s: Mapping[str, float], start_s: float, end_s: float) -> tuple[Phase, ...]:
    """Phases one after another from the start; what no phase accounts for comes last."""
    phases, at_s = [], start_s
    for name, seconds in phase_s.items():
        phases.append(Phase(name, at_s, at_s + seconds))
        at_s += seconds
    if phases and end_s > at_s:
        phases.append(Phase(OTHER, at_s, end_s))
    return tuple(phases)


def resident_by_class(status: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of owned tensors whose tag is mapped, by class, from ``LLM.status()``."""
    return {
        name: nbytes if status["tags"].get(POLICIES[OwnershipClass(name)].tag) != "released" else 0
        for name, nbytes in status["owned_bytes"].items()
    }
