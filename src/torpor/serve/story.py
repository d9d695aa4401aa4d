"""The demo as a person reads it: what the model says, how it sleeps, and the proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.status import Status
from rich.table import Table
from rich.text import Text

from torpor.check.version import torpor_version
from torpor.serve.figures import figure_rows
from torpor.serve.words import count, duration, printable, size
from torpor.sleep.classes import LEVELS

if TYPE_CHECKING:
    from torpor.check.oracle import Answer
    from torpor.check.result import CycleResult
    from torpor.check.roundtrip import Failure, Nap, Rise, RoundTrip
    from torpor.engine.llm import LLM
    from torpor.serve.terminal import Terminal

_INTRODUCTIONS = {
    1: "Level 1: keep a copy. Weights wait in their file, the rest is copied to one.",
    2: "Level 2: keep no weights. They are read from the checkpoint again.",
}
_MARGIN = 10
_BAR_CELLS = 24


class Silence:
    """Tells nothing: for JSON."""

    def __init__(self, on_loaded: Callable[[], None]) -> None:
        """Prepare; ``on_loaded`` is called when the model is there."""
        self._on_loaded = on_loaded

    def loaded(self, llm: LLM, load_s: float) -> None:
        """Only pass it on."""
        self._on_loaded()

    def answered(self, answers: tuple[Answer, ...], generate_s: float) -> None:
        """Nothing."""

    def slept(self, nap: Nap) -> None:
        """Nothing."""

    def woke(self, nap: Nap, rise: Rise) -> None:
        """Nothing."""

    def proved(self, trip: RoundTrip) -> None:
        """Nothing."""

    def failed(self, failure: Failure) -> None:
        """Nothing."""


class Story:
    """Tells a cycle while it runs, on the terminal's stdout."""

    def __init__(self, terminal: Terminal, on_loaded: Callable[[], None]) -> None:
        """Prepare; ``on_loaded`` is called first of all when the model is there."""
        self._terminal = terminal
        self._out = terminal.out
        self._on_loaded = on_loaded
        self._status: Status | None = None
        self._scale_bytes = 1

    def loaded(self, llm: LLM, load_s: float) -> None:
        """Begin: a headline, and what was loaded."""
        self._on_loaded()
        self._out.print(
            Text.assemble(
                ("torpor ", "bold"), (torpor_version(), "dim"),
                ("   a model sleeps, wakes, and proves that it woke intact", "italic"),
            )
        )  # fmt: skip
        status = llm.status()
        owned = status["owned_bytes"]
        facts = [f"{size(owned.get('parameter', 0))} of weights"]
        if "cache" in owned:
            facts.append(f"{size(owned['cache'])} of KV cache")
        self._out.print()
        words = f"{status['model']} loaded in {duration(load_s)}: {', '.join(facts)}."
        self._out.print(Text(words))
        self._wait("answering")

    def answered(self, answers: tuple[Answer, ...], generate_s: float) -> None:
        """Show the reference answers."""
        self._stop_waiting()
        for answer in answers:
            self._out.print()
            self._line("asked", Text(printable(answer.prompt)))
            self._line("answers", Text(_shown(answer), style="bold"))
        tokens = sum(len(answer.token_ids) for answer in answers)
        self._line("", Text(f"{count(tokens, 'token')} in {duration(generate_s)}", style="dim"))

    def slept(self, nap: Nap) -> None:
        """Show the memory before and during sleep."""
        if nap.cycle > 1:
            return
        self._out.print()
        self._out.print(Text(_INTRODUCTIONS[nap.level], style="bold cyan"))
        self._scale_bytes = max(nap.awake_rss_bytes, 1)
        self._memory("awake", nap.awake_rss_bytes, "green", "")
        copied = f"{size(nap.report.copied_bytes)} copied"
        self._memory(
            "asleep", nap.asleep_rss_bytes, "blue", f"in {duration(nap.sleep_s)}, {copied}"
        )

    def woke(self, nap: Nap, rise: Rise) -> None:
        """Show the memory after waking, and the digests."""
        if nap.cycle == 1:
            report = rise.report
            digests = f"{report.verified} of {report.total_verifiable} digests equal"
            remark = f"in {duration(rise.wake_s)}, {digests}"
            self._memory("awake", rise.rss_bytes, "green", remark)
        self._wait("answering again")

    def proved(self, trip: RoundTrip) -> None:
        """Show the answers after waking, or, in later cycles, one line."""
        self._stop_waiting()
        if trip.nap.cycle == 1:
            for answer in trip.comparison.answers:
                self._line("answers", Text(_shown(answer), style="bold"))
            self._line("", _proof(trip, "same tokens, log probabilities and digests"))
            return
        verdict = _proof(trip, "all the same again")
        times = f"asleep in {duration(trip.nap.sleep_s)}, awake in {duration(trip.rise.wake_s)}: "
        self._line("again", Text(times).append_text(verdict))

    def failed(self, failure: Failure) -> None:
        """Show what differed."""
        self._stop_waiting()
        self._out.print()
        self._out.print(Text(f"{failure.type}: {failure.message}", style="red"))

    def finished(self, result: CycleResult) -> None:
        """Show the figures and the verdict."""
        self._out.print()
        self._out.print(figures(result))
        self._out.print()
        self._out.print(_caption(result))
        self._out.print()
        self._out.print(verdict_line(result))
        for shortcoming in result.shortcomings:
            self._out.print(Text(f"- {shortcoming}", style="yellow"))

    def close(self) -> None:
        """Leave the terminal tidy, whatever has happened."""
        self._stop_waiting()

    def _memory(self, label: str, rss_bytes: int, style: str, remark: str) -> None:
        bar = self._terminal.bar(rss_bytes / self._scale_bytes, _BAR_CELLS, style)
        self._line(label, bar.append(f" {size(rss_bytes):>7}  ", "bold").append(remark, "dim"))

    def _line(self, label: str, text: Text) -> None:
        grid = Table.grid(padding=0)
        grid.add_column(width=_MARGIN)
        grid.add_column()
        grid.add_row(Text(f"  {label}", style="dim"), text)
        self._out.print(grid)

    def _wait(self, what: str) -> None:
        # Only where a terminal can take it back; and never during a sleep or a wake, which are
        # being timed.
        if self._out.is_terminal:
            self._status = self._out.status(f"[dim]{what}", spinner_style="dim")
            self._status.start()

    def _stop_waiting(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def figures(result: CycleResult) -> Table:
    """Medians of both levels, side by side."""
    table = Table(box=None, pad_edge=True, padding=(0, 3, 0, 0))
    table.add_column("")
    for level in LEVELS:
        table.add_column(f"level {level}", justify="right", header_style="bold")
    for label, cells in figure_rows(result):
        table.add_row(Text(label, style="dim"), *map(Text, cells))
    return table


def verdict_line(result: CycleResult) -> Text:
    """One line that says it all."""
    trips = len(result.trips)
    if result.verdict == "differs":
        return Text.assemble(
            (" DIFFERS ", "bold white on red"),
            " The model did not wake as it was; see above.",
        )
    badge = (
        (" INTACT ", "bold black on green")
        if result.verdict == "intact"
        else (" INTACT, BUT ", "bold black on yellow")
    )
    return Text.assemble(
        badge,
        f" {count(trips, 'sleep')}, {count(trips, 'wake')}: every digest, every token and every "
        "bit of every log probability is the same.",
    )


def _caption(result: CycleResult) -> Text:
    spent = result.spent_s()
    return Text(
        f"Medians of {count(result.cycles, 'cycle')}. Before loading, Python and PyTorch alone "
        f"took {size(result.before_load_rss_bytes)}; the arenas hold what the model owns. "
        f"{duration(spent['total'])} in all, {duration(spent['answer'])} of it answering, "
        f"{duration(spent['load'])} loading; {count(result.rig.torch_threads, 'thread')}.",
        style="dim",
    )


def _shown(answer: Answer) -> str:
    """An answer on one line; it ends where its tokens end."""
    return " ".join(printable(answer.text).split()) + "…"


def _proof(trip: RoundTrip, praise: str) -> Text:
    comparison = trip.comparison
    parts = (
        ("tokens", comparison.tokens_equal),
        ("log probabilities", comparison.logprobs_equal),
        ("digests", trip.verified),
    )
    differing = [name for name, equal in parts if not equal]
    if differing:
        return Text(f"DIFFERENT {' and '.join(differing)}", style="bold red")
    return Text(praise, style="green")
