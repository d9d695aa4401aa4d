"""``torpor demo``: a model answers, sleeps, wakes, and proves that it is whole."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torpor.errors import ArgumentError
from torpor.serve.exits import FAILED, MISMATCH, OK
from torpor.serve.loading import loading
from torpor.serve.report_file import check_report_file, write_report_file

if TYPE_CHECKING:
    from torpor.check.result import CycleResult
    from torpor.serve.terminal import Terminal

_EXIT_CODES = {"intact": OK, "differs": MISMATCH, "incomplete": FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asks for."""

    model: str
    cycles: int
    max_tokens: int
    prompts: tuple[str, ...]
    """None named: the built-in ones."""
    threads: int
    nap_s: float
    report: Path | None


def demo(terminal: Terminal, options: DemoOptions) -> int:
    """Run the cycle, tell it, write the report; the exit code.

    Raises:
        TorporError: see ``run_cycle``; or the report cannot be written.
    """
    if options.report is not None:
        check_report_file(options.report)
    if not all(options.prompts):
        raise ArgumentError("a prompt is empty; give at least one character")
    result = _run(terminal, options)
    if options.report is not None:
        from torpor.serve.report import render

        write_report_file(options.report, render(result))
    if terminal.json_wanted:
        facts = result.to_dict()
        if options.report is not None:
            facts["report_file"] = str(options.report)
        terminal.emit(facts)
    elif options.report is not None:
        terminal.out.print(f"\nThe report is in {options.report}", soft_wrap=True, markup=False)
    return _EXIT_CODES[result.verdict]


def _run(terminal: Terminal, options: DemoOptions) -> CycleResult:
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(loading(terminal))
        # Imported here, under the bar: torch takes seconds.
        from torpor.check.cycle import CycleOptions, run_cycle
        from torpor.check.oracle import DEFAULT_PROMPTS
        from torpor.serve.story import Silence, Story

        story = None if terminal.json_wanted else Story(terminal, stack.close)
        wanted = CycleOptions(
            cycles=options.cycles,
            max_tokens=options.max_tokens,
            prompts=options.prompts or DEFAULT_PROMPTS,
            num_threads=options.threads,
            nap_s=options.nap_s,
        )
        try:
            result = run_cycle(
                options.model, wanted, listener=story or Silence(stack.close), progress=bar
            )
        finally:
            if story is not None:
                story.close()
    if story is not None:
        story.finished(result)
    return result
