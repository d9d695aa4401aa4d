"""``torpor bench``: measure an engine, and show the figures to a person or as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torpor.serve.bench_words import show_latency, show_sleep, show_throughput
from torpor.serve.exits import OK
from torpor.serve.loading import loading

if TYPE_CHECKING:
    from torpor.check.bench_latency import LatencyResult
    from torpor.check.bench_options import LatencyOptions, SleepOptions, ThroughputOptions
    from torpor.check.bench_sleep import SleepResult
    from torpor.check.bench_throughput import ThroughputResult
    from torpor.serve.loading import LoadingBar
    from torpor.serve.terminal import Terminal


class _Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=_Result)
Model = str | os.PathLike[str]


def throughput(terminal: Terminal, model: Model, options: ThroughputOptions) -> int:
    """Measure throughput; the exit code.

    Raises:
        TorporError: see ``bench_throughput``.
    """

    def measure(bar: LoadingBar | None) -> ThroughputResult:
        from torpor.check.bench_throughput import bench_throughput

        return bench_throughput(model, options, listener=_announcer(bar), progress=bar)

    return _run(terminal, measure, show_throughput)


def latency(terminal: Terminal, model: Model, options: LatencyOptions) -> int:
    """Measure latency; the exit code.

    Raises:
        TorporError: see ``bench_latency``.
    """

    def measure(bar: LoadingBar | None) -> LatencyResult:
        from torpor.check.bench_latency import bench_latency

        return bench_latency(model, options, listener=_announcer(bar), progress=bar)

    return _run(terminal, measure, show_latency)


def sleep(terminal: Terminal, model: Model, options: SleepOptions) -> int:
    """Measure sleep and wake; the exit code.

    Raises:
        TorporError: see ``bench_sleep``.
    """

    def measure(bar: LoadingBar | None) -> SleepResult:
        from torpor.check.bench_sleep import bench_sleep

        return bench_sleep(model, options, listener=_announcer(bar), progress=bar)

    return _run(terminal, measure, show_sleep)


def _run(
    terminal: Terminal,
    measure: Callable[[LoadingBar | None], R],
    show: Callable[[Terminal, R], None],
) -> int:
    with loading(terminal) as bar:
        result = measure(bar)
    if terminal.json_wanted:
        terminal.emit(result.to_dict())
    else:
        show(terminal, result)
    return OK


class _Announcer:
    """Says what is being measured."""

    def __init__(self, bar: LoadingBar) -> None:
        self._bar = bar

    def measuring(self, what: str, iteration: int, num_iters: int) -> None:
        which = f"{iteration} of {num_iters}" if iteration else "warming up"
        self._bar.say(f"{what}: {which}")


def _announcer(bar: LoadingBar | None) -> _Announcer | None:
    return None if bar is None else _Announcer(bar)
