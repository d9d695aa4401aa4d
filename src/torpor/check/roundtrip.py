"""One sleep and wake of a model, with everything measured and compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torpor.check.oracle import Comparison
from torpor.check.timeline import Recorder, resident_by_class
from torpor.errors import VerificationError
from torpor.sleep.classes import POLICIES, OwnershipClass
from torpor.sleep.procfs import process_rss_bytes

if TYPE_CHECKING:
    from torpor.check.oracle import Oracle
    from torpor.engine.llm import LLM
    from torpor.sleep.reports import SleepReport, VerifyReport, WakeReport
    from torpor.sleep.status import OwnerRow


def is_verifiable(row: OwnerRow) -> bool:
    """Whether sleep and wake must compare a tensor's digest."""
    return POLICIES[OwnershipClass(row.cls)].verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Nap:
    """The first half: what falling asleep did, and what was resident around it."""

    level: int
    cycle: int
    """From 1."""
    report: SleepReport
    sleep_s: float
    """Seconds of the call, all of it."""
    awake_rss_bytes: int
    """Of the whole process, just before."""
    asleep_rss_bytes: int
    """Of the whole process, at the end of the nap."""
    host_copy_bytes: Mapping[str, int]
    """Verified bytes by where their host copy is; ``none`` for those that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The second half: what waking did."""

    report: WakeReport
    wake_s: float
    """Seconds of the call, all of it."""
    rss_bytes: int
    """Of the whole process, just after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A whole sleep and wake, and whether the model came back as it was."""

    nap: Nap
    rise: Rise
    check: VerifyReport
    """All digests once more, after the answers."""
    comparison: Comparison
    num_verifiable: int
    """Owned tensors that must have a digest, counted from the ownership table."""

    @property
    def verified(self) -> bool:
        """Whether every owned tensor's digest was compared, and equal, at sleep, wake and after."""
        counts = (
            (self.nap.report.verified, self.nap.report.total_verifiable),
            (self.rise.report.verified, self.rise.report.total_verifiable),
            (self.check.verified, self.check.total_verifiable),
        )
        return self.check.ok and all(
            verified == total == self.num_verifiable for verified, total in counts
        )

    @property
    def intact(self) -> bool:
        """Whether digests, tokens and log probabilities are all equal."""
        return self.verified and self.comparison.tokens_equal and self.comparison.logprobs_equal

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        nap = self.nap
        return {
            "level": nap.level,
            "cycle": nap.cycle,
            "tokens_equal": self.comparison.tokens_equal,
            "logprobs_equal": self.comparison.logprobs_equal,
            "verified": self.verified,
            "num_verifiable": self.num_verifiable,
            "sleep_s": nap.sleep_s,
            "wake_s": self.rise.wake_s,
            "generate_s": self.comparison.generate_s,
            "verify_s": self.check.total_s,
            "rss_bytes": {
                "before": nap.awake_rss_bytes,
                "asleep": nap.asleep_rss_bytes,
                "after": self.rise.rss_bytes,
            },
            "host_copy_bytes": dict(nap.host_copy_bytes),
            "sleep_report": nap.report.to_dict(),
            "wake_report": self.rise.report.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A transition that found other bytes than it should have."""

    level: int
    cycle: int
    type: str
    message: str
    names: tuple[str, ...]
    """The tensors that differ."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "level": self.level,
            "cycle": self.cycle,
            "type": self.type,
            "message": self.message,
            "names": list(self.names),
        }


class Listener(Protocol):
    """Is told of each step once it is done, for a person who watches."""

    def slept(self, nap: Nap) -> None:
        """The model is asleep."""
        ...

    def woke(self, nap: Nap, rise: Rise) -> None:
        """The model is awake again and has not answered yet."""
        ...

    def proved(self, trip: RoundTrip) -> None:
        """The model has answered again and was compared."""
        ...


class RoundTripper:
    """Sends one model to sleep and wakes it, again and again."""

    def __init__(
        self,
        llm: LLM,
        oracle: Oracle,
        *,
        nap_s: float = 0.0,
        recorder: Recorder | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Prepare.

        Args:
            nap_s: how long the model stays asleep, for a memory chart that can be read.
            recorder: where spans and memory go.
            listener: told of each step.
        """
        self._llm = llm
        self._oracle = oracle
        self._nap_s = nap_s
        self._recorder = recorder if recorder is not None else Recorder()
        self._listener = listener
        self._num_verifiable = sum(map(is_verifiable, llm.sleeper.table()))

    def run(self, level: int, cycle: int) -> RoundTrip | Failure:
        """Sleep, stay asleep, wake, answer, compare.

        Before: awake. After: awake, or, when it fails, whatever the transition left.

        Raises:
            TorporError: a transition failed for another reason than content that differs.
        """
        try:
            return self._run(level, cycle)
        except VerificationError as error:
            return Failure(
                level=level,
                cycle=cycle,
                type=type(error).__name__,
                message=str(error),
                names=error.names,
            )

    def _run(self, level: int, cycle: int) -> RoundTrip:
        nap = self._sleep(level, cycle)
        if self._listener:
            self._listener.slept(nap)
        rise = self._wake(level, cycle)
        if self._listener:
            self._listener.woke(nap, rise)
        with self._recorder.span("answer", level=level, cycle=cycle):
            comparison = self._oracle.ask_again()
        with self._recorder.span("verify", level=level, cycle=cycle):
            check = self._llm.verify()
        trip = RoundTrip(
            nap=nap,
            rise=rise,
            check=check,
            comparison=comparison,
            num_verifiable=self._num_verifiable,
        )
        if self._listener:
            self._listener.proved(trip)
        return trip

    def _sleep(self, level: int, cycle: int) -> Nap:
        before = resident_by_class(self._llm.status())
        awake_rss_bytes = process_rss_bytes()
        start_s = time.perf_counter()
        with self._recorder.span("sleep", level=level, cycle=cycle) as span:
            report = self._llm.sleep(level=level)
            sleep_s = time.perf_counter() - start_s
            span.phase_s = report.seconds
        after = resident_by_class(self._llm.status())
        self._recorder.mark_transition(before, after, "release")
        with self._recorder.span("asleep", level=level, cycle=cycle):
            time.sleep(self._nap_s)
            asleep_rss_bytes = process_rss_bytes()
        return Nap(
            level=level,
            cycle=cycle,
            report=report,
            sleep_s=sleep_s,
            awake_rss_bytes=awake_rss_bytes,
            asleep_rss_bytes=asleep_rss_bytes,
            host_copy_bytes=self._host_copies(),
        )

    def _wake(self, level: int, cycle: int) -> Rise:
        before = resident_by_class(self._llm.status())
        start_s = time.perf_counter()
        with self._recorder.span("wake", level=level, cycle=cycle) as span:
            report = self._llm.wake_up()
            wake_s = time.perf_counter() - start_s
            span.phase_s = report.seconds
        after = resident_by_class(self._llm.status())
        self._recorder.mark_transition(before, after, "map")
        return Rise(report=report, wake_s=wake_s, rss_bytes=process_rss_bytes())

    def _host_copies(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in filter(is_verifiable, self._llm.sleeper.table()):
            kind = row.host_copy or "none"
            sums[kind] = sums.get(kind, 0) + row.nbytes
        return sums
