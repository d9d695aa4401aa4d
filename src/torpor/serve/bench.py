"""``torpor bench``: measure an engine, and show the figures to a person or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torpor.serve.exits import OK
from torpor.serve.loading import loading

if TYPE_CHECKING:
    from torpor.serve.loading import LoadingBar
    from torpor.serve.terminal import Terminal


class _Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Result)


class Announcer:
    """Says what is being measured."""

    def __init__(self, bar: LoadingBar) -> None:
        """Speak through a bar."""
        self._bar = bar

    def measuring(self, what: str, iteration: int, num_iters: int) -> None:
        """See ``torpor.check.bench_options.Listener``."""
        which = f"{iteration} of {num_iters}" if iteration else "warming up"
        self._bar.say(f"{what}: {which}")


def bench(
    terminal: Terminal,
    measure: Callable[[Announcer | None, LoadingBar | None], R],
    show: Callable[[Terminal, R], None],
) -> int:
    """Measure and show the result; the exit code.

    Args:
        terminal: where to.
        measure: told whom to tell what is measured, and how far loading has come; None for nobody.
        show: writes a result for a person.

    Raises:
        TorporError: what ``measure`` raises.
    """
    with loading(terminal) as bar:
        result = measure(None if bar is None else Announcer(bar), bar)
    if terminal.json_wanted:
        terminal.emit(result.to_dict())
    else:
        show(terminal, result)
    return OK
