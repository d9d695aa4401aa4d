"""The figures of a benchmark as a person reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from torpor.serve.words import count, duration, size

if TYPE_CHECKING:
    from torpor.check.bench_figures import Spread
    from torpor.check.bench_generation import LatencyResult, ThroughputResult
    from torpor.check.bench_options import Repeats
    from torpor.check.bench_scene import Scene
    from torpor.check.bench_sleep import LevelResult, SleepResult
    from torpor.serve.terminal import Terminal

Row = tuple[str, "Spread", Callable[[float], str]]
"""A label, a figure, and how one value of it is written."""

_INDENT = "  "
_WORTH_A_ROW = 0.01
_RANDOM = "random prompts, new ones each time, greedy, past end tokens"


def show_throughput(terminal: Terminal, result: ThroughputResult) -> None:
    """Write the figures of a throughput benchmark."""
    options = result.options
    prompts = count(options.num_prompts, "prompt")
    each = f"{count(options.input_len, 'token')} in, {options.output_len} out"
    _headline(terminal, f"Throughput of {result.model}", f"{prompts} at once, {each}")
    rows: list[Row] = [
        ("tokens/s generated", result.output_tokens_per_s, rate),
        ("tokens/s in all", result.total_tokens_per_s, rate),
        ("requests/s", result.requests_per_s, rate),
        ("all prompts in", result.elapsed_s, duration),
    ]
    terminal.out.print(_table(rows))
    _closing(terminal, result.scene, options.repeats, [result.elapsed_s], _RANDOM)


def show_latency(terminal: Terminal, result: LatencyResult) -> None:
    """Write the figures of a latency benchmark."""
    options = result.options
    each = f"{count(options.input_len, 'token')} in, {options.output_len} out"
    _headline(terminal, f"Latency of {result.model}", f"a batch of {options.num_prompts}, {each}")
    rows: list[Row] = [
        ("first token in", result.first_token_s, duration),
        ("whole batch in", result.elapsed_s, duration),
        ("tokens/s generated", result.output_tokens_per_s, rate),
    ]
    terminal.out.print(_table(rows))
    if result.step_s is not None:
        words = f"{duration(result.step_s)} for each token after the first one."
        terminal.out.print(Text(words, style="dim"))
    figures = [result.first_token_s, result.elapsed_s]
    _closing(terminal, result.scene, options.repeats, figures, _RANDOM)


def show_sleep(terminal: Terminal, result: SleepResult) -> None:
    """Write the figures of a sleep benchmark."""
    owned = size(sum(result.owned_bytes.values()))
    _headline(terminal, f"Sleep of {result.model}", f"{owned} owned")
    for level in result.levels:
        _show_level(terminal, level)
    how = "clean sleeps" + (", poisoned memory, which costs time" if result.poisoned else "")
    figures = [figure for level in result.levels for figure in (level.sleep_s, level.wake_s)]
    _closing(terminal, result.scene, result.options.repeats, figures, how)


def rate(value: float) -> str:
    """A number per second, with three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _show_level(terminal: Terminal, level: LevelResult) -> None:
    sleep, wake = level.last.sleep, level.last.wake
    fall = f"{size(sleep.arena_rss_before_bytes)} → {size(sleep.arena_rss_after_bytes)}"
    copied = f"{size(sleep.copied_bytes)} copied"
    terminal.out.print()
    terminal.out.print(Text.assemble((f"Level {level.level}", "bold cyan"), f"  {fall}, {copied}"))
    rows: list[Row] = [
        ("falls asleep in", level.sleep_s, duration),
        *_phase_rows(level.sleep_phase_s, level.sleep_s.median),
        ("wakes up in", level.wake_s, duration),
        *_phase_rows(level.wake_phase_s, level.wake_s.median),
    ]
    terminal.out.print(_table(rows))
    how = "by reading the checkpoint again" if wake.reloaded else "from its host copies"
    digests = f"{wake.verified} of {wake.total_verifiable} digests equal"
    terminal.out.print(Text(f"Woke {how}: {digests}.", style="dim"))


def _phase_rows(phases: Mapping[str, Spread], whole_s: float) -> Iterable[Row]:
    """The phases that one would look at; JSON has all of them."""
    for name, figure in phases.items():
        if figure.median >= _WORTH_A_ROW * whole_s:
            yield f"{_INDENT}{name}", figure, duration


def _headline(terminal: Terminal, what: str, how: str) -> None:
    terminal.out.print(Text.assemble((what, "bold"), f": {how}"))


def _table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for heading in ("median", "min", "max"):
        table.add_column(heading, justify="right", header_style="dim")
    for label, figure, worded in rows:
        inner = label.startswith(_INDENT)
        style = "dim" if inner else ""
        table.add_row(
            Text(label, style="dim"),
            Text(worded(figure.median), style=style or "bold"),
            *(Text(worded(value), style=style) for value in (figure.min, figure.max)),
        )
    return table


def _closing(
    terminal: Terminal, scene: Scene, repeats: Repeats, figures: Iterable[Spread], how: str
) -> None:
    """How the figures were made, and what speaks against them."""
    rig = scene.rig
    warmup = f" after {repeats.num_iters_warmup} to warm up" if repeats.num_iters_warmup else ""
    made = f"Medians of {count(repeats.num_iters, 'run')}{warmup}: {how}."
    commit = f" ({scene.commit})" if scene.commit else ""
    threads = f"{count(rig.torch_threads, 'thread')} on {count(rig.usable_cpus, 'CPU')}"
    rigged = (
        f"{rig.processor}, {threads}; "
        f"torpor {rig.torpor}{commit}, torch {rig.torch}, Python {rig.python}; "
        f"load {scene.load_before:.2f} before, {scene.load_after:.2f} after."
    )
    terminal.out.print()
    terminal.out.print(Text(f"{made} {rigged}", style="dim"))
    if not scene.was_quiet:
        words = f"The machine was busy (load {scene.load_before:.2f}): a quiet one is faster."
        terminal.out.print(Text(words, style="yellow"))
    if any(figure.is_wide for figure in figures):
        words = "The runs differ by more than a tenth: small differences mean nothing here."
        terminal.out.print(Text(words, style="yellow"))
