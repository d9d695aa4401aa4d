"""The demo cycle: a model answers, sleeps, wakes and answers again, at both levels."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torpor.check.oracle import DEFAULT_PROMPTS, Oracle
from torpor.check.result import CycleResult
from torpor.check.rig import this_rig
from torpor.check.roundtrip import Failure, Listener, RoundTrip, RoundTripper
from torpor.check.timeline import Recorder, resident_by_class
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError
from torpor.sleep.classes import LEVELS
from torpor.sleep.procfs import process_rss_bytes

if TYPE_CHECKING:
    from torpor.check.oracle import Answer
    from torpor.model.checkpoints.files import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleOptions:
    """How a cycle is run.

    Raises:
        ArgumentError: an impossible value.
    """

    cycles: int = 3
    """Sleeps and wakes at each level."""
    max_tokens: int = 16
    """Tokens of each answer."""
    prompts: Sequence[str] = DEFAULT_PROMPTS
    num_threads: int | None = None
    """Threads torch computes with; None leaves them alone."""
    nap_s: float = 0.0
    """How long the model stays asleep each time."""

    def __post_init__(self) -> None:
        for name, value in (("cycles", self.cycles), ("max_tokens", self.max_tokens)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}; give at least 1")
        if not self.prompts or not all(self.prompts):
            raise ArgumentError(f"prompts is {self.prompts!r}; give at least one, none of it empty")
        if not 0 <= self.nap_s <= 60:
            raise ArgumentError(f"nap_s is {self.nap_s}; give seconds from 0 to 60")


class CycleListener(Listener, Protocol):
    """Is also told of loading and of the first answers."""

    def loaded(self, llm: LLM, load_s: float) -> None:
        """The model is awake for the first time."""
        ...

    def answered(self, answers: tuple[Answer, ...], generate_s: float) -> None:
        """The reference is taken."""
        ...

    def failed(self, failure: Failure) -> None:
        """A transition found other bytes; the cycle ends here."""
        ...


def run_cycle(
    model: str | os.PathLike[str],
    options: CycleOptions | None = None,
    *,
    listener: CycleListener | None = None,
    progress: Progress | None = None,
) -> CycleResult:
    """Load a model, then let it sleep and wake ``cycles`` times at level 1 and at level 2.

    Args:
        model: a name or a folder, as for ``LLM``.
        options: None for the defaults.
        listener: told of each step.
        progress: told of slow parts of loading.

    Returns:
        What was measured and compared. It ends early at the first round trip that is not intact.

    Raises:
        TorporError: the model cannot be loaded, or a transition failed for another reason than
            content that differs.
    """
    options = CycleOptions() if options is None else options
    recorder = Recorder()
    start_s = time.perf_counter()
    before_load_bytes = process_rss_bytes()
    with contextlib.ExitStack() as closing, recorder.sampling():
        with recorder.span("load"):
            llm = closing.enter_context(
                LLM(model, num_threads=options.num_threads, progress=progress)
            )
            load_s = time.perf_counter() - start_s
        if listener:
            listener.loaded(llm, load_s)
        # What is owned is known from here on; loading fills it bit by bit before.
        recorder.mark({})
        recorder.mark(resident_by_class(llm.status()))
        with recorder.span("answer"):
            oracle = Oracle(llm, options.prompts, max_tokens=options.max_tokens)
        if listener:
            listener.answered(oracle.reference, oracle.reference_s)
        tripper = RoundTripper(
            llm, oracle, nap_s=options.nap_s, recorder=recorder, listener=listener
        )
        trips, failure = _run_all(tripper, options.cycles)
        if failure is not None and listener:
            listener.failed(failure)
        status = llm.status()
        recorder.mark(resident_by_class(status))
    return CycleResult(
        model=str(model),
        cycles=options.cycles,
        max_tokens=options.max_tokens,
        nap_s=options.nap_s,
        reference=oracle.reference,
        reference_s=oracle.reference_s,
        trips=tuple(trips),
        failure=failure,
        owned_bytes=status["owned_bytes"],
        before_load_rss_bytes=before_load_bytes,
        load_s=load_s,
        total_s=time.perf_counter() - start_s,
        timeline=recorder.finish(),
        rig=this_rig(),
    )


def _run_all(tripper: RoundTripper, cycles: int) -> tuple[list[RoundTrip], Failure | None]:
    trips: list[RoundTrip] = []
    for level in LEVELS:
        for cycle in range(1, cycles + 1):
            outcome = tripper.run(level, cycle)
            if isinstance(outcome, Failure):
                return trips, outcome
            trips.append(outcome)
            if not outcome.intact:
                return trips, None
    return trips, None
