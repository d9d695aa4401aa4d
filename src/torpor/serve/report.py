"""``torpor demo --report``: one page that needs nothing but itself."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from torpor.serve import svg
from torpor.serve.chart_memory import RIGHT, kind_legend, memory_chart, memory_legend
from torpor.serve.chart_phases import (
    phase_chart,
    phase_legend,
    shown_spans,
    transition_chart,
)
from torpor.serve.figures import figure_rows
from torpor.serve.words import count, duration, size
from torpor.sleep.classes import LEVELS

if TYPE_CHECKING:
    from torpor.check.result import CycleResult
    from torpor.check.roundtrip import RoundTrip
    from torpor.check.timeline import Timeline

_WIDE, _NARROW = 960.0, 360.0
"""Pixels; the page shows the one that fits, so that text keeps its size."""

_VERDICTS = {
    "intact": ("INTACT", "Every digest, every token and every bit of every log probability is the "
               "same after every sleep."),
    "incomplete": ("INTACT, BUT", "The content is the same after every sleep, but not everything "
                   "is as it should be:"),
    "differs": ("DIFFERS", "The model did not come back as it was."),
}  # fmt: skip


def render(result: CycleResult) -> str:
    """The page as HTML. Whatever a model or a machine says in it is escaped."""
    title = f"{result.model}: sleep and wake"
    body = "\n".join(
        (
            _head(result),
            _tiles(result),
            _memory(result),
            _transitions(result),
            _phases(result),
            _figures(result),
            _answers(result),
            _round_trips(result),
            _rig(result),
        )
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_asset('report.css')}</style>\n</head>\n"
        f"<body>\n{body}\n{_script(result.timeline)}\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("torpor.serve").joinpath(name).read_text(encoding="utf-8")


# -- parts of the page ----------------------------------------------------------------------------


def _head(result: CycleResult) -> str:
    badge, sentence = _VERDICTS[result.verdict]
    owned = sum(result.owned_bytes.values())
    parts = [
        f"<h1>{html.escape(result.model)}: sleep and wake</h1>",
        f'<p class="verdict"><span class="badge {result.verdict}">{badge}</span>'
        f"<span>{html.escape(sentence)}</span></p>",
        _paragraph(
            f"The model owns {size(owned)}. It answered, then fell asleep and woke "
            f"{count(result.cycles, 'time')} at level 1, where its bytes wait in files, and "
            f"{count(result.cycles, 'time')} at level 2, where its weights are thrown away and "
            "read from the checkpoint again. After each wake it answered again, and was compared "
            "with its first answer."
        ),
    ]
    if result.failure is not None:
        failure = f"{result.failure.type}: {result.failure.message}"
        parts.append(_paragraph(failure))
    if result.shortcomings:
        items = "".join(f"<li>{html.escape(item)}</li>" for item in result.shortcomings)
        parts.append(f"<ul>{items}</ul>")
    return "\n".join(parts)


def _tiles(result: CycleResult) -> str:
    facts = result.to_dict()
    asleep, awake = facts["rss_bytes"]["asleep_level1"], facts["rss_bytes"]["awake"]
    tiles = [
        (f"{size(awake)} → {size(asleep)}", "the process awake → asleep"),
        (duration(facts["sleep_s"]["level1"]), "to fall asleep, level 1"),
        (duration(facts["wake_s"]["level1"]), "to wake and verify, level 1"),
        (duration(facts["wake_s"]["level2"]), "to wake and verify, level 2"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{html.escape(figure)}</b><span>{html.escape(meaning)}</span></div>'
        for figure, meaning in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _memory(result: CycleResult) -> str:
    chart = _both(memory_chart(result, _WIDE), memory_chart(result, _NARROW))
    idle = (
        "Coloured: bytes that the model owns and that are mapped. The line is what the system "
        "counts for the whole process."
    )
    return _section(
        "Memory over time",
        f"<figure>{chart}{_legend(memory_legend(result))}{_legend(kind_legend(result))}</figure>",
        f'<p class="soft readout" id="readout">{html.escape(idle)}</p>',
    )


def _transitions(result: CycleResult) -> str:
    parts = []
    for kind, heading in (("sleep", "Falling asleep"), ("wake", "Waking")):
        if not shown_spans(result.timeline, kind):
            continue
        chart = _both(
            transition_chart(result.timeline, kind, _WIDE),
            transition_chart(result.timeline, kind, _NARROW),
        )
        legend = _legend(phase_legend(result.timeline, kind))
        parts.append(f"<h3>{heading}</h3>\n<figure>{chart}{legend}</figure>")
    if not parts:
        return ""
    note = _paragraph(
        "Every transition from its own beginning, its phases in their order. What lies between "
        "them, such as the look for tensors that have left and the guards, is drawn last.",
        "soft",
    )
    return _section("Phases of each transition", note, *parts)


def _phases(result: CycleResult) -> str:
    if not any(span.phases for span in result.timeline.spans):
        return ""
    chart = _both(phase_chart(result.timeline, _WIDE), phase_chart(result.timeline, _NARROW))
    legend = _legend([(f"level-{level}", f"level {level}") for level in LEVELS])
    note = (
        '<p class="soft">One mark for each transition, on a logarithmic axis.'
        '<span class="wide-only"> The figures are medians.</span></p>'
    )
    return _section("How long each phase takes", note, f"<figure>{chart}{legend}</figure>")


def _figures(result: CycleResult) -> str:
    headings = ["", *(f"level {level}" for level in LEVELS)]
    rows = [[label, *cells] for label, cells in figure_rows(result)]
    spent = result.spent_s()
    parts = [f"{name} {duration(seconds)}" for name, seconds in spent.items() if name != "total"]
    note = (
        f"Medians of {count(result.cycles, 'cycle')}. {duration(spent['total'])} in all: "
        f"{', '.join(parts)}. Each time the model was left asleep for {duration(result.nap_s)}."
    )
    return _section("Figures", _table(headings, rows), _paragraph(note, "soft"))


def _answers(result: CycleResult) -> str:
    parts = []
    for answer in result.reference:
        parts.append(_paragraph(answer.prompt, "soft"))
        parts.append(f"<blockquote>{html.escape(answer.text)}…</blockquote>")
    note = (
        f"Greedy, {result.max_tokens} tokens, cut there. The tokens and the log probabilities of "
        "the likeliest candidates at every position are compared bit for bit."
    )
    return _section("What the model says", *parts, _paragraph(note, "soft"))


def _round_trips(result: CycleResult) -> str:
    headings = ["level, no.", "asleep in", "awake in", "copied", "restored", "digests equal",
                "tokens", "log probabilities"]  # fmt: skip
    rows = [_trip_cells(trip) for trip in result.trips]
    table = f'<div class="scroll">{_table(headings, rows)}</div>'
    return f"<details>\n<summary>Every round trip</summary>\n{table}\n</details>"


def _trip_cells(trip: RoundTrip) -> list[str]:
    nap, report = trip.nap, trip.rise.report
    return [
        f"{nap.level}, {nap.cycle}",
        duration(nap.sleep_s),
        duration(trip.rise.wake_s),
        size(nap.report.copied_bytes),
        "checkpoint" if report.reloaded else size(report.restored_bytes),
        f"{report.verified} of {trip.num_verifiable}",
        "equal" if trip.comparison.tokens_equal else "DIFFERENT",
        "equal" if trip.comparison.logprobs_equal else "DIFFERENT",
    ]


def _rig(result: CycleResult) -> str:
    rig = result.rig
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    rows = [
        ["torpor", rig.torpor],
        ["PyTorch", f"{rig.torch}, {count(rig.torch_threads, 'thread')}"],
        ["Python", rig.python],
        ["processor", f"{rig.processor}, {rig.usable_cpus} of {rig.logical_cpus} CPUs usable"],
        ["memory", size(rig.memory_bytes)],
        ["system", rig.system],
        ["made", made],
    ]
    return f"<footer>{_section('Measured with', _table([], rows, 'facts'))}</footer>"


# -- small pieces ---------------------------------------------------------------------------------


def _section(heading: str, *parts: str) -> str:
    return "\n".join((f"<section>\n<h2>{html.escape(heading)}</h2>", *parts, "</section>"))


def _paragraph(words: str, class_: str = "") -> str:
    attribute = f' class="{class_}"' if class_ else ""
    return f"<p{attribute}>{html.escape(words)}</p>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    attribute = f' class="{class_}"' if class_ else ""
    head = f"<thead>{line('th', headings)}</thead>" if headings else ""
    return (
        f"<table{attribute}>{head}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"
    )


def _both(wide: str, narrow: str) -> str:
    """The same chart at two widths; the style sheet shows the one that fits."""
    return f"{_classed(wide, 'wide')}{_classed(narrow, 'narrow')}"


def _classed(chart: str, class_: str) -> str:
    if ' class="memory"' in chart[:400]:
        return chart.replace(' class="memory"', f' class="memory {class_}"', 1)
    return chart.replace("<svg", f'<svg class="{class_}"', 1)


def _legend(items: Iterable[tuple[str, str]]) -> str:
    entries = "".join(f"<li>{_swatch(class_)}{html.escape(words)}</li>" for class_, words in items)
    return f'<ul class="legend">{entries}</ul>'


def _swatch(class_: str) -> str:
    if class_ in ("rss", "baseline"):
        mark = svg.line(0, 6, 18, 6, class_)
        return svg.picture(18, 12, "line", mark)
    if class_ == "level-1":
        return svg.picture(12, 12, "circle", svg.element("circle", cx=6, cy=6, r=4, class_=class_))
    if class_ == "level-2":
        mark = svg.element("path", d="M6 1 l5 5 l-5 5 l-5 -5 z", class_=class_)
        return svg.picture(12, 12, "diamond", mark)
    return svg.picture(12, 12, "colour", svg.rectangle(0, 0, 12, 12, class_))


def _script(timeline: Timeline) -> str:
    points: dict[str, Any] = {
        "duration_s": round(timeline.duration_s, 4),
        "right": RIGHT,
        "rss": [[round(point.at_s, 4), point.rss_bytes] for point in timeline.rss_points],
        "classes": [
            [round(point.at_s, 4), dict(point.class_bytes)] for point in timeline.class_points
        ],
    }
    data = json.dumps(points, separators=(",", ":"))
    return (
        f'<script type="application/json" id="points">{data}</script>\n'
        f"<script>\n{_asset('report.js')}</script>"
    )
