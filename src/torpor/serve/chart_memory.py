"""The report's first chart: memory over time, stacked by class, above what happened when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torpor.serve import svg
from torpor.serve.words import duration, size

if TYPE_CHECKING:
    from torpor.check.result import CycleResult
    from torpor.check.timeline import ClassPoint, Span

STACK = ("parameter", "buffer", "derived", "cache", "scratch", "sync")
"""Ownership classes from the bottom up."""

KINDS: Mapping[str, str] = {
    "load": "loading",
    "answer": "answering",
    "sleep": "falling asleep",
    "asleep": "asleep",
    "wake": "waking",
    "verify": "comparing digests",
}
"""What happens in a cycle, in the words of the legend."""

_TOP, _LEFT = 22.0, 48.0
RIGHT = 8.0
"""Margin on the right, in SVG units."""
_PLOT_HEIGHT = 230.0
_STRIP_HEIGHT = 18.0
_MB = 1e6


def memory_chart(result: CycleResult, width: float) -> str:
    """Draw the chart ``width`` pixels wide."""
    timeline = result.timeline
    highest = max(
        [point.rss_bytes for point in timeline.rss_points]
        + [sum(point.class_bytes.values()) for point in timeline.class_points]
    )
    bottom = _TOP + _PLOT_HEIGHT
    x = svg.Linear(0.0, timeline.duration_s, _LEFT, width - RIGHT)
    y = svg.Linear(0.0, 1.06 * highest / _MB, bottom, _TOP)
    rss = [(x(point.at_s), y(point.rss_bytes / _MB)) for point in timeline.rss_points]
    strip_y = bottom + 28
    height = strip_y + 2 * _STRIP_HEIGHT + 10
    return svg.picture(
        width,
        height,
        "Memory over time, stacked by ownership class, with the resident set of the process",
        svg.polygon([(x(0.0), y(0.0)), *rss, (x(timeline.duration_s), y(0.0))], "process"),
        *_grid(x, y, width, bottom),
        *_areas(timeline.class_points, x, y),
        *_baseline(result, x, y, width),
        svg.polyline(rss, "rss"),
        *_strip(timeline.spans, x, strip_y),
        *_levels(timeline.spans, x, strip_y + _STRIP_HEIGHT + 4),
        svg.line(_LEFT, _TOP, _LEFT, bottom, "cursor"),
        class_="memory",
    )


def _grid(x: svg.Linear, y: svg.Linear, width: float, bottom: float) -> list[str]:
    parts = [svg.text("MB", _LEFT - 6, 12, anchor="end", class_="axis")]
    for value in y.ticks(7):
        parts.append(svg.line(_LEFT, y(value), width - RIGHT, y(value), "grid"))
        parts.append(svg.text(f"{value:.6g}", _LEFT - 6, y(value) + 4, anchor="end"))
    ticks = x.ticks(int((width - _LEFT) / 70))
    for value in ticks:
        last = value == ticks[-1]
        parts.append(svg.line(x(value), bottom, x(value), bottom + 4, "tick"))
        # The unit stands at the last tick; near the edge the label would leave the picture.
        label = f"{value:.6g} s" if last else f"{value:.6g}"
        edge = last and width - x(value) < svg.CHAR_WIDTH * len(label) / 2
        position = width if edge else x(value)
        anchor = "end" if edge else "middle"
        parts.append(svg.text(label, position, bottom + 17, anchor=anchor))
    return parts


def _areas(points: Sequence[ClassPoint], x: svg.Linear, y: svg.Linear) -> list[str]:
    areas = []
    below = [0.0] * len(points)
    for name in STACK:
        above = [
            base + point.class_bytes.get(name, 0) for base, point in zip(below, points, strict=True)
        ]
        if above != below:
            upper = [(x(p.at_s), y(value / _MB)) for p, value in zip(points, above, strict=True)]
            lower = [(x(p.at_s), y(value / _MB)) for p, value in zip(points, below, strict=True)]
            areas.append(svg.polygon([*upper, *reversed(lower)], f"class-{name}"))
        below = above
    return areas


def _baseline(result: CycleResult, x: svg.Linear, y: svg.Linear, width: float) -> list[str]:
    """How much the process took before it had a model."""
    level = y(result.before_load_rss_bytes / _MB)
    return [svg.line(x.low_at, level, width - RIGHT, level, "baseline")]


def _strip(spans: Sequence[Span], x: svg.Linear, top: float) -> list[str]:
    parts = []
    for span in spans:
        start, end = x(span.start_s), x(span.end_s)
        what = f"{KINDS[span.kind]}, {duration(span.duration_s)}"
        where = f"level {span.level}, cycle {span.cycle}: " if span.cycle else ""
        # A hair is left between neighbours, and even the shortest one can be seen.
        shown = max(end - start - 0.5, 1.5)
        parts.append(
            svg.rectangle(start, top, shown, _STRIP_HEIGHT, f"kind-{span.kind}", where + what)
        )
        label = span.kind
        if svg.CHAR_WIDTH * len(label) + 6 < shown:
            middle = start + shown / 2
            parts.append(svg.text(label, middle, top + 13, anchor="middle", class_="on"))
    return parts


def _levels(spans: Sequence[Span], x: svg.Linear, top: float) -> list[str]:
    """A bracket under all cycles of a level."""
    parts = []
    for level in sorted({span.level for span in spans if span.level}):
        mine = [span for span in spans if span.level == level]
        start, end = x(mine[0].start_s), x(mine[-1].end_s) - 2
        parts.append(svg.line(start, top, end, top, "tick"))
        label = f"level {level}"
        parts.append(svg.text(label, (start + end) / 2, top + 14, anchor="middle", class_="axis"))
    return parts


def memory_legend(result: CycleResult) -> list[tuple[str, str]]:
    """(CSS class, words) of everything in the upper part of the chart."""
    items = [
        (f"class-{name}", f"{name} {size(nbytes)}")
        for name in STACK
        if (nbytes := result.owned_bytes.get(name, 0))
    ]
    items.append(("rss", "resident set of the process"))
    before = size(result.before_load_rss_bytes)
    items.append(("baseline", f"the same before loading, {before}"))
    return items


def kind_legend(result: CycleResult) -> list[tuple[str, str]]:
    """(CSS class, words) of the strip below it."""
    present = {span.kind for span in result.timeline.spans}
    return [(f"kind-{kind}", words) for kind, words in KINDS.items() if kind in present]
