"""Progress while a model is found, converted, checked and loaded; for a person who watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.text import Text

from torpor.serve.words import size

if TYPE_CHECKING:
    from rich.progress import Task

    from torpor.serve.terminal import Terminal

_STAGES = {
    "check": "checking the model's file",
    "convert": "converting, this once",
    "verify": "checking the converted model",
    "load": "loading the weights",
}


class _Bytes(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{size(task.completed)} of {size(task.total)}")


class LoadingBar:
    """One bar that shows one stage after another; the ``progress`` argument of ``LLM``."""

    def __init__(self, progress: Progress) -> None:
        """Begin with a bar that knows no end."""
        self._progress = progress
        self._stage = "starting"
        self._task = progress.add_task(self._stage, total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage has come; see ``torpor.model.checkpoints.files.Progress``."""
        # The step after a finished stage may be long before it says anything.
        shown = "loading" if done >= total else stage
        if shown != self._stage:
            self._begin(shown, None if done >= total else total)
        if done < total:
            self._progress.update(self._task, completed=done)

    def say(self, words: str) -> None:
        """Show something that has no known end."""
        self._begin(words, None)

    def refresh(self) -> None:
        """Draw it now instead of at the next tick."""
        self._progress.refresh()

    def _begin(self, stage: str, total: int | None) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(_STAGES.get(stage, stage), total=total)
        self._stage = stage


@contextmanager
def loading(terminal: Terminal) -> Iterator[LoadingBar | None]:
    """Show a bar on stderr during the body; None, and no bar, when nobody watches."""
    if not terminal.is_watched:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), _Bytes())
    with Progress(
        *columns, console=terminal.err, transient=True, redirect_stdout=False
    ) as progress:
        yield LoadingBar(progress)
