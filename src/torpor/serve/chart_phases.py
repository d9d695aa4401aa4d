"""The report's charts of transitions: each one zoomed to its own length, and all phases side by
side on a logarithmic axis, where two milliseconds can be read beside two seconds."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torpor.serve import svg
from torpor.serve.words import duration
from torpor.sleep.classes import LEVELS

if TYPE_CHECKING:
    from torpor.check.timeline import Span, Timeline

PHASES: Mapping[str, str] = {
    "quiesce": "wait for the device",
    "fingerprint": "compare every digest before memory goes",
    "copy": "write host copies of what has none",
    "measure": "count resident pages",
    "release": "give the memory back",
    "trim": "return what allocators keep",
    "map": "acquire all memory",
    "poison": "fill it with NaN, where asked for",
    "restore": "copy host copies back",
    "verify": "compare every digest",
    "reload": "read the checkpoint, digests included",
    "clear": "zero the caches",
    "rebuild": "compute derived tensors",
    "other": "what no phase accounts for",
}
"""Phases of both transitions in their order, with what each does."""

_ROW = 20.0
_MAX_CYCLES = 6
"""Rows of one level: more would be a wall."""
_LEFT, _RIGHT = 88.0, 10.0
_FASTEST_S = 1e-6
_ROOMY = 600.0
_MEDIAN_WIDTH = 72.0
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


def transition_chart(timeline: Timeline, kind: str, width: float) -> str:
    """Draw every sleep (or wake) as one row of its phases, on a common axis in ms."""
    spans = shown_spans(timeline, kind)
    longest_ms = 1e3 * max(span.duration_s for span in spans)
    x = svg.Linear(0.0, longest_ms, _LEFT, width - _RIGHT)
    bottom = 4 + _ROW * len(spans)
    parts = []
    for index, span in enumerate(spans):
        top = 4 + _ROW * index
        label = f"level {span.level}, no. {span.cycle}"
        parts.append(svg.text(label, _LEFT - 8, top + 13, anchor="end"))
        parts += _row(span, x, top)
    for value in x.ticks(int((width - _LEFT) / 56)):
        parts.append(svg.line(x(value), bottom, x(value), bottom + 4, "tick"))
        parts.append(_tick_label(f"{value:.6g}", x(value), bottom + 17, width))
    parts.append(svg.text("ms", _LEFT - 8, bottom + 17, anchor="end", class_="axis"))
    words = "falls asleep" if kind == "sleep" else "wakes"
    label = f"Phases of every time the model {words}, in milliseconds"
    return svg.picture(width, bottom + 24, label, *parts)


def shown_spans(timeline: Timeline, kind: str) -> list[Span]:
    """The transitions of one kind that have a row."""
    return [
        span for span in timeline.spans
        if span.kind == kind and span.phases and span.cycle <= _MAX_CYCLES
    ]  # fmt: skip


def _row(span: Span, x: svg.Linear, top: float) -> list[str]:
    parts = []
    for phase in span.phases:
        start = x(1e3 * (phase.start_s - span.start_s))
        end = x(1e3 * (phase.end_s - span.start_s))
        hint = f"{phase.name}, {duration(phase.end_s - phase.start_s)}"
        parts.append(svg.rectangle(start, top, end - start, _ROW - 4, f"phase-{phase.name}", hint))
        if svg.CHAR_WIDTH * len(phase.name) + 6 < end - start:
            middle = (start + end) / 2
            parts.append(svg.text(phase.name, middle, top + 12, anchor="middle", class_="on"))
    return parts


def _tick_label(label: str, at: float, y: float, width: float) -> str:
    half = svg.CHAR_WIDTH * len(label) / 2
    return svg.text(label, min(at, width - half), y, anchor="middle")


def phase_chart(timeline: Timeline, width: float) -> str:
    """Draw the duration of every phase of every transition as a dot on a logarithmic axis.

    On the right stand the medians of both levels, where there is room.
    """
    rows = _phase_rows(timeline)
    all_s = [seconds for _, _, by_level in rows for times in by_level.values() for seconds in times]
    low, high = svg.decades_around(all_s, _FASTEST_S)
    roomy = width > _ROOMY
    x = svg.Logarithmic(low, high, _LEFT, width - (len(LEVELS) * _MEDIAN_WIDTH if roomy else 14))
    parts: list[str] = []
    top, previous = 8.0, ""
    for kind, name, by_level in rows:
        if kind != previous:
            heading = "falling asleep" if kind == "sleep" else "waking"
            parts.append(svg.text(heading, 0, top + 12, class_="axis"))
            top += _ROW
            previous = kind
        parts += _dots(name, by_level, x, top)
        if roomy:
            parts += _medians(by_level, width, top)
        top += _ROW
    if roomy:
        for level in LEVELS:
            label = f"level {level}"
            parts.append(svg.text(label, _median_x(level, width), 20, anchor="end", class_="axis"))
    label = "Duration of every phase, logarithmic"
    return svg.picture(width, top + 22, label, *_decades(x, top), *parts)


def _decades(x: svg.Logarithmic, bottom: float) -> list[str]:
    parts = []
    for value in x.ticks():
        parts.append(svg.line(x(value), 8, x(value), bottom, "grid"))
        unit, factor = next(unit for unit in _UNITS if value * unit[1] > 0.5)
        label = f"{value * factor:.0f} {unit}"
        parts.append(svg.text(label, x(value), bottom + 15, anchor="middle"))
    return parts


PhaseRow = tuple[str, str, dict[int, list[float]]]
"""Kind of transition, phase, seconds by level."""


def _phase_rows(timeline: Timeline) -> list[PhaseRow]:
    rows: dict[tuple[str, str], dict[int, list[float]]] = {}
    for span in timeline.spans:
        for phase in span.phases:
            by_level = rows.setdefault((span.kind, phase.name), {})
            by_level.setdefault(span.level, []).append(phase.end_s - phase.start_s)
    order = list(PHASES)
    keys = sorted(rows, key=lambda key: (key[0] != "sleep", _place(order, key[1])))
    return [(kind, name, rows[kind, name]) for kind, name in keys]


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _dots(
    name: str, by_level: Mapping[int, Sequence[float]], x: svg.Logarithmic, top: float
) -> list[str]:
    middle = top + _ROW / 2
    parts = [svg.text(name, _LEFT - 8, middle + 4, anchor="end")]
    parts.append(svg.line(_LEFT, middle, x.high_at, middle, "grid"))
    for level in LEVELS:
        for seconds in by_level.get(level, ()):
            hint = f"level {level}: {duration(seconds)}"
            # Level 1 a little above the line and level 2 below, so that neither hides the other.
            at_y = middle + (-3 if level == LEVELS[0] else 3)
            parts.append(_dot(x(seconds), at_y, level, hint))
    return parts


def _medians(by_level: Mapping[int, Sequence[float]], width: float, top: float) -> list[str]:
    return [
        svg.text(
            duration(statistics.median(seconds)),
            _median_x(level, width),
            top + _ROW / 2 + 4,
            anchor="end",
        )
        for level, seconds in by_level.items()
    ]


def _median_x(level: int, width: float) -> float:
    return width - _MEDIAN_WIDTH * (LEVELS[-1] - level)


def _dot(x: float, y: float, level: int, hint: str) -> str:
    title = svg.element("title", html.escape(hint))
    if level == LEVELS[0]:
        return svg.element("circle", title, cx=x, cy=y, r=3.6, class_="level-1")
    path = f"M{x:.2f} {y - 4.4:.2f} l4.4 4.4 l-4.4 4.4 l-4.4 -4.4 z"
    return svg.element("path", title, d=path, class_="level-2")


def phase_legend(timeline: Timeline, kind: str) -> list[tuple[str, str]]:
    """(CSS class, words) of the phases that took place."""
    present = {phase.name for span in timeline.spans if span.kind == kind for phase in span.phases}
    return [
        (f"phase-{name}", f"{name}: {meaning}")
        for name, meaning in PHASES.items()
        if name in present
    ]
