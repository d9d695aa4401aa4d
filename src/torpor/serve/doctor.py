"""``torpor doctor``: the ownership table, what stays resident, the round trips, a verdict."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from torpor.serve.exits import FAILED, MISMATCH, OK
from torpor.serve.loading import loading
from torpor.serve.words import count, duration, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torpor.check.doctor import Diagnosis
    from torpor.check.roundtrip import RoundTrip
    from torpor.serve.loading import LoadingBar
    from torpor.serve.terminal import Terminal
    from torpor.sleep.status import OwnerRow

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MAX_ELSEWHERE = 5
_BADGES = {
    "healthy": (" HEALTHY ", "bold black on green"),
    "findings": (" FINDINGS ", "bold black on yellow"),
    "mismatch": (" MISMATCH ", "bold white on red"),
}


def examine(
    terminal: Terminal,
    model: str,
    *,
    max_tokens: int,
    threads: int,
    sink_placement: str,
    every: bool,
    strict: bool,
) -> int:
    """Examine a model and show the diagnosis; the exit code.

    Args:
        every: list every tensor, not groups of layers.
        strict: fail when anything stays resident.

    Raises:
        TorporError: the model cannot be loaded, or a transition failed.
    """
    with loading(terminal) as bar:
        from torpor.check.doctor import doctor

        diagnosis = doctor(
            model,
            max_tokens=max_tokens,
            num_threads=threads,
            sink_placement=sink_placement,
            listener=None if bar is None else _Announcer(bar),
            progress=bar,
        )
    if terminal.json_wanted:
        terminal.emit(diagnosis.to_dict())
    else:
        show(terminal, diagnosis, every=every)
    if diagnosis.verdict == "mismatch":
        return MISMATCH
    return FAILED if strict and diagnosis.verdict == "findings" else OK


class _Announcer:
    """Says which round trip is under way."""

    def __init__(self, bar: LoadingBar) -> None:
        self._bar = bar

    def examining(self, poison: int, level: int) -> None:
        self._bar.say(f"sleep and wake at level {level}, poisoned with {poison:#04x}")


def show(terminal: Terminal, diagnosis: Diagnosis, *, every: bool) -> None:
    """Write a diagnosis for a person."""
    out = terminal.out
    out.print(Text.assemble(("Owners", "bold"), f" of {diagnosis.model}"))
    _show_owners(terminal, diagnosis.owners, every=every)
    out.print()
    _show_residents(terminal, diagnosis)
    out.print()
    out.print(Text("Round trips, with memory poisoned before it is restored", "bold"))
    out.print(_round_trips(diagnosis))
    for entry in diagnosis.examinations:
        if entry.failure is not None:
            out.print(Text(f"{entry.failure.type}: {entry.failure.message}", "red"))
    out.print()
    out.print(_verdict(diagnosis))


def _show_owners(terminal: Terminal, rows: Sequence[OwnerRow], *, every: bool) -> None:
    """A heading for all that is kept alike, and a line per tensor, or per group of layers.

    Names come last and are never split: whatever the width, they can be read and copied.
    """
    kinds: dict[tuple[str, str, str | None], list[OwnerRow]] = {}
    for row in rows:
        kinds.setdefault((row.cls, row.tag, row.host_copy), []).append(row)
    for (cls, tag, host_copy), kept in kinds.items():
        kind = f"{cls}, tag {tag}, {_amount(kept)}, "
        host = "no host copy" if host_copy is None else f"host copy: {host_copy}"
        terminal.out.print(Text.assemble((kind, "cyan"), (host, "dim cyan")))
        groups: dict[tuple[str, tuple[str, ...]], list[OwnerRow]] = {}
        for row in kept:
            name, sources = row.name, row.sources
            if not every:
                name = _NUMBER.sub("*", name)
                sources = tuple(dict.fromkeys(_NUMBER.sub("*", source) for source in sources))
            groups.setdefault((name, sources), []).append(row)
        for (name, sources), group in groups.items():
            nbytes = sum(row.nbytes for row in group)
            line = Text.assemble(
                ("" if every else f"{len(group):>6} x", "dim"), f"{size(nbytes):>9}  ", name
            )
            if sources:
                line.append(f"  computed from {', '.join(sources)}", "dim")
            terminal.out.print(line, soft_wrap=True)
    terminal.out.print(Text(f"{_amount(rows)} in all", "bold"))


def _amount(rows: Sequence[OwnerRow]) -> str:
    return f"{count(len(rows), 'tensor')} of {size(sum(row.nbytes for row in rows))}"


def _show_residents(terminal: Terminal, diagnosis: Diagnosis) -> None:
    out = terminal.out
    out.print(Text("What stays in memory while the model sleeps", "bold"))
    if not diagnosis.residents and not diagnosis.escaped:
        out.print("nothing: every tensor of the model has an owner")
    for row in diagnosis.residents:
        facts = f"  {size(row.resident_bytes)}: {row.reason}"
        remedy = f"; {row.remedy}" if row.remedy else ""
        out.print(Text.assemble((row.name, "yellow"), facts, (remedy, "dim")))
    for name in diagnosis.escaped:
        out.print(Text.assemble((name, "yellow"), "  has left the memory that sleep can release"))
    elsewhere = diagnosis.audit.elsewhere
    if elsewhere:
        total = sum(item.nbytes for item in elsewhere)
        names = ", ".join(item.name for item in elsewhere[:_MAX_ELSEWHERE])
        out.print(
            Text(
                f"{count(len(elsewhere), 'tensor')} of {size(total)} elsewhere in this process: "
                f"{names}",
                "dim",
            )
        )
    out.print(Text(f"The audit cannot see {'; '.join(diagnosis.audit.blind_spots)}.", "dim"))


def _round_trips(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("poison", "level", "asleep in", "awake in", "digests", "tokens", "logprobs"):
        table.add_column(heading, justify="right", header_style="dim")
    for entry in diagnosis.examinations:
        for trip in entry.trips:
            table.add_row(f"{entry.poison:#04x}", *_cells(trip))
    return table


def _cells(trip: RoundTrip) -> list[Text]:
    comparison, report = trip.comparison, trip.rise.report
    return [
        Text(str(trip.nap.level)),
        Text(duration(trip.nap.sleep_s)),
        Text(duration(trip.rise.wake_s)),
        _fact(trip.verified, f"{report.verified} of {trip.num_verifiable} equal"),
        _fact(comparison.tokens_equal, "equal"),
        _fact(comparison.logprobs_equal, "equal"),
    ]


def _fact(holds: bool, words: str) -> Text:
    return Text(words, "green") if holds else Text("DIFFERENT", "bold red")


def _verdict(diagnosis: Diagnosis) -> Text:
    badge = _BADGES[diagnosis.verdict]
    if diagnosis.verdict == "mismatch":
        what = (
            "The model did not come back as it was."
            if diagnosis.fresh_load_equal
            else "Two loads of the model gave different answers."
        )
        return Text.assemble(badge, " ", what)
    kept = sum(row.resident_bytes for row in diagnosis.residents)
    what = "It woke as it fell asleep, at both levels and under both poison patterns"
    if diagnosis.verdict == "findings":
        return Text.assemble(badge, f" {what}; {size(kept)} stay in memory while it sleeps.")
    return Text.assemble(badge, f" {what}. {duration(diagnosis.total_s)} in all.")
