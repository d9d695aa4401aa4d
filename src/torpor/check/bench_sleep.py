"""Sleep and wake: how long each phase takes, and how many bytes it moves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.check.bench_engine import run_engine
from torpor.check.bench_figures import Spread, spread
from torpor.check.bench_scene import Scene
from torpor.sleep.poison import poison_from

if TYPE_CHECKING:
    from torpor.check.bench_options import Listener, SleepOptions
    from torpor.engine.llm import LLM
    from torpor.model.checkpoints.files import Progress
    from torpor.sleep.reports import SleepReport, WakeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One sleep and the wake after it."""

    sleep_s: float
    """Of the call, all of it; so is ``wake_s``."""
    sleep: SleepReport
    wake_s: float
    wake: WakeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """What was measured at one level."""

    level: int
    cycles: tuple[Cycle, ...]

    @property
    def sleep_s(self) -> Spread:
        """Of the whole calls."""
        return spread([cycle.sleep_s for cycle in self.cycles])

    @property
    def wake_s(self) -> Spread:
        """Of the whole calls."""
        return spread([cycle.wake_s for cycle in self.cycles])

    @property
    def sleep_phase_s(self) -> dict[str, Spread]:
        """By the report's phases."""
        return _phases([cycle.sleep.seconds for cycle in self.cycles])

    @property
    def wake_phase_s(self) -> dict[str, Spread]:
        """By the report's phases."""
        return _phases([cycle.wake.seconds for cycle in self.cycles])

    @property
    def last(self) -> Cycle:
        """The last cycle, for what is the same in each."""
        return self.cycles[-1]

    def bytes_by_figure(self) -> dict[str, Any]:
        """Sizes as the last reports have them, and what their cycles copied and restored."""
        sleep, wake = self.last.sleep, self.last.wake
        return {
            "released_bytes": dict(sleep.released_bytes),
            "copied_bytes": [cycle.sleep.copied_bytes for cycle in self.cycles],
            "resident_bytes": sleep.resident_bytes,
            "arena_rss_bytes": {
                "awake": sleep.arena_rss_before_bytes,
                "asleep": sleep.arena_rss_after_bytes,
            },
            "mapped_bytes": wake.mapped_bytes,
            "restored_bytes": [cycle.wake.restored_bytes for cycle in self.cycles],
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        return {
            "sleep_s": self.sleep_s.to_dict(),
            "sleep_phase_s": {name: s.to_dict() for name, s in self.sleep_phase_s.items()},
            "wake_s": self.wake_s.to_dict(),
            "wake_phase_s": {name: s.to_dict() for name, s in self.wake_phase_s.items()},
            **self.bytes_by_figure(),
            "reloaded": self.last.wake.reloaded,
            "verified_tensors": self.last.wake.verified,
            "verifiable_tensors": self.last.wake.total_verifiable,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepResult:
    """What was measured."""

    model: str
    options: SleepOptions
    load_s: float
    owned_bytes: Mapping[str, int]
    """By ownership class."""
    poisoned: bool
    """Whether memory that came back was filled with a pattern first, which costs time."""
    levels: tuple[LevelResult, ...]
    scene: Scene

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        return {
            "benchmark": "sleep",
            "model": self.model,
            "engine": self.options.engine.given(),
            **self.options.repeats.to_dict(),
            "load_s": self.load_s,
            "owned_bytes": dict(self.owned_bytes),
            "poisoned": self.poisoned,
            **{f"level{result.level}": result.to_dict() for result in self.levels},
            **self.scene.to_dict(),
        }


def bench_sleep(
    model: str | os.PathLike[str],
    options: SleepOptions,
    *,
    listener: Listener | None = None,
    progress: Progress | None = None,
) -> SleepResult:
    """Load a model, then let it sleep and wake at each level in turn; every wake verifies.

    Nothing changes between two sleeps, so all but the first are clean: what a model costs that is
    put aside and taken up again. No time passes asleep.

    Args:
        model: a name or a folder, as for ``LLM``.
        listener: told of each iteration before it begins.
        progress: told of slow parts of loading.

    Raises:
        ArgumentError: an impossible value.
        VerificationError: a tensor came back with other bytes.
        TorporError: the model cannot be loaded, or cannot sleep or wake.
    """

    def measure(llm: LLM) -> tuple[dict[str, int], tuple[LevelResult, ...]]:
        owned_bytes = llm.status()["owned_bytes"]
        return owned_bytes, tuple(
            _measure(llm, level, options, listener) for level in options.levels
        )

    run = run_engine(model, options.engine, measure, progress)
    owned_bytes, levels = run.measured
    return SleepResult(
        model=str(model),
        options=options,
        load_s=run.load_s,
        owned_bytes=owned_bytes,
        poisoned=poison_from(None) is not None,
        levels=levels,
        scene=run.scene,
    )


def _measure(llm: LLM, level: int, options: SleepOptions, listener: Listener | None) -> LevelResult:
    cycles = []
    for counts in options.repeats.iterations(f"level {level}", listener):
        start_s = time.perf_counter()
        sleep = llm.sleep(level)
        asleep_s = time.perf_counter()
        wake = llm.wake_up()
        awake_s = time.perf_counter()
        if counts:
            cycles.append(
                Cycle(sleep_s=asleep_s - start_s, sleep=sleep, wake_s=awake_s - asleep_s, wake=wake)
            )
    return LevelResult(level=level, cycles=tuple(cycles))


def _phases(runs: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """By phase; a run that skipped a phase spent no time on it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread([run.get(name, 0.0) for run in runs]) for name in names}
