"""Progress while a model is found, converted, checked and loaded; for a person who watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from torpor.serve.words import size

if TYPE_CHECKING:
    from rich.progress import Task, TaskID

    from torpor.model.files import Progress as Told
    from torpor.serve.terminal import Terminal

_STAGES = {
    "check": "checking the model's file",
    "convert": "converting, this once",
    "verify": "checking the converted model",
    "load": "loading weights",
}


class _Bytes(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> str:  # type: ignore[override]
        return "" if task.total is None else f"{size(task.completed)} of {size(task.total)}"


class _Told:
    """Moves one bar through the stages."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done >= total:
            # The next stage may be long before it says anything.
            self._bar.update(self._task, description="loading", total=None)
            return
        self._bar.update(
            self._task, description=_STAGES.get(stage, stage), completed=done, total=total
        )


@contextmanager
def loading(terminal: Terminal) -> Iterator[Told | None]:
    """Show a bar on stderr during the body; None, and no bar, when nobody watches."""
    if not terminal.is_watched:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30), _Bytes(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=terminal.err, transient=True) as bar:
        yield _Told(bar, bar.add_task("starting", total=None))
