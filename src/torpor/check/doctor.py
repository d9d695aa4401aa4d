"""The doctor: who owns what in a model, what stays resident, and does it survive sleep.

Round trips run at both levels with poison on, once with each pattern: a byte that is read before it
was written again turns the answers into nonsense or changes a digest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torpor.check.oracle import DEFAULT_PROMPTS, Oracle
from torpor.check.rig import this_rig
from torpor.check.roundtrip import Failure, RoundTrip, RoundTripper
from torpor.engine.llm import LLM
from torpor.sleep.classes import LEVELS
from torpor.sleep.poison import PATTERNS
from torpor.sleep.residents import UNDECLARED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torpor.check.oracle import Answer
    from torpor.check.rig import Rig
    from torpor.model.checkpoints.files import Progress
    from torpor.sleep.audit import AuditReport
    from torpor.sleep.status import OwnerRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow:
    """Bytes of the model that sleep leaves in memory."""

    name: str
    resident_bytes: int
    reason: str
    remedy: str
    """Empty where it stays because its owner wants it to."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "name": self.name,
            "resident_bytes": self.resident_bytes,
            "reason": self.reason,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The round trips made with one poison pattern, one of each level."""

    poison: int
    """The byte that filled memory before it was restored."""
    reference: tuple[Answer, ...]
    trips: tuple[RoundTrip, ...]
    failure: Failure | None

    @property
    def intact(self) -> bool:
        """Whether every level came back with equal digests, tokens and log probabilities."""
        return (
            self.failure is None
            and len(self.trips) == len(LEVELS)
            and all(trip.intact for trip in self.trips)
        )

    def same_answers(self, other: Examination) -> bool:
        """Whether a fresh load of the model gave bit for bit the same answers."""
        return all(
            mine.token_ids == theirs.token_ids and mine.same_logprobs(theirs)
            for mine, theirs in zip(self.reference, other.reference, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "poison": f"{self.poison:#04x}",
            "intact": self.intact,
            "round_trips": [trip.to_dict() for trip in self.trips],
            "failure": None if self.failure is None else self.failure.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found."""

    model: str
    owners: tuple[OwnerRow, ...]
    owned_bytes: Mapping[str, int]
    """By ownership class."""
    residents: tuple[ResidentRow, ...]
    escaped: tuple[str, ...]
    """Names whose bytes left the memory that sleep can release."""
    audit: AuditReport
    examinations: tuple[Examination, ...]
    load_s: float
    total_s: float
    rig: Rig

    @property
    def fresh_load_equal(self) -> bool:
        """Whether every fresh load of the model answered the same, bit for bit."""
        first, *others = self.examinations
        return all(other.same_answers(first) for other in others)

    @property
    def intact(self) -> bool:
        """Whether the model came back as it was from every round trip."""
        return self.fresh_load_equal and all(entry.intact for entry in self.examinations)

    @property
    def verdict(self) -> str:
        """``healthy``; ``findings`` where bytes stay resident; ``mismatch`` where content differs.

        Tensors that the audit finds elsewhere in the process belong to somebody else and do not
        count.
        """
        if not self.intact:
            return "mismatch"
        return "findings" if self.residents or self.escaped else "healthy"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys, or the keys above them, carry units."""
        return {
            "model": self.model,
            "device": "cpu",
            "verdict": self.verdict,
            "owned_bytes": dict(self.owned_bytes),
            "owners": [_owner(row) for row in self.owners],
            "residents": [row.to_dict() for row in self.residents],
            "escaped": list(self.escaped),
            "audit": self.audit.to_dict(),
            "fresh_load_equal": self.fresh_load_equal,
            "examinations": [entry.to_dict() for entry in self.examinations],
            "load_s": self.load_s,
            "total_s": self.total_s,
            "rig": self.rig.to_dict(),
        }


class DoctorListener(Protocol):
    """Is told what the doctor is about to do, for a person who waits."""

    def examining(self, poison: int, level: int) -> None:
        """A round trip begins."""
        ...


def doctor(
    model: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = DEFAULT_PROMPTS,
    max_tokens: int = 16,
    num_threads: int | None = None,
    sink_placement: str = "merged",
    listener: DoctorListener | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Examine a model.

    Args:
        model: a name or a folder, as for ``LLM``. Undeclared tensors are reported, not refused.
        prompts: what the model is asked before and after each sleep.
        max_tokens: tokens of each answer.
        num_threads: threads torch computes with; None leaves them alone.
        sink_placement: where static sinks are, as for ``LLM``.
        listener: told of each round trip before it begins.
        progress: told of slow parts of loading.

    Raises:
        TorporError: the model cannot be loaded, or a transition failed for another reason than
            content that differs.
    """
    start_s = time.perf_counter()
    view: _View | None = None
    examinations = []
    for poison in PATTERNS:
        with LLM(
            model,
            strict=False,
            poison=poison,
            num_threads=num_threads,
            sink_placement=sink_placement,
            progress=progress,
        ) as llm:
            load_s = time.perf_counter() - start_s
            oracle = Oracle(llm, prompts, max_tokens=max_tokens)
            # Once: the second load differs in its poison alone, and the audit may take seconds.
            view = view or _look(llm, load_s)
            examinations.append(_examine(llm, oracle, poison, listener))
    assert view is not None, "there is at least one poison pattern"
    return Diagnosis(
        model=str(model),
        owners=view.owners,
        owned_bytes=view.owned_bytes,
        residents=_residents(view.audit, examinations[0]),
        escaped=_escaped(examinations),
        audit=view.audit,
        examinations=tuple(examinations),
        load_s=view.load_s,
        total_s=time.perf_counter() - start_s,
        rig=this_rig(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A model as it lies in memory, awake."""

    owners: tuple[OwnerRow, ...]
    owned_bytes: Mapping[str, int]
    audit: AuditReport
    load_s: float


def _look(llm: LLM, load_s: float) -> _View:
    return _View(
        owners=tuple(llm.sleeper.table()),
        owned_bytes=llm.status()["owned_bytes"],
        audit=llm.sleeper.audit(),
        load_s=load_s,
    )


def _residents(audit: AuditReport, examination: Examination) -> tuple[ResidentRow, ...]:
    """What the audit found in the model, and what sleep said it left, each once."""
    reported = [item for trip in examination.trips for item in trip.nap.report.residents]
    reasons = {item.name: item.reason for item in reported}
    rows = {item.name: (item.nbytes, item.reason, "") for item in reported}
    for item in audit.unowned:
        reason = reasons.get(item.name, UNDECLARED)
        made = f"; made at {item.creator}" if item.creator is not None else ""
        remedy = audit.remedy if reason == UNDECLARED else ""
        rows[item.name] = (item.nbytes, reason + made, remedy)
    return tuple(
        ResidentRow(name=name, resident_bytes=nbytes, reason=reason, remedy=remedy)
        for name, (nbytes, reason, remedy) in rows.items()
    )


def _examine(llm: LLM, oracle: Oracle, poison: int, listener: DoctorListener | None) -> Examination:
    tripper = RoundTripper(llm, oracle)
    trips: list[RoundTrip] = []
    failure = None
    for level in LEVELS:
        if listener:
            listener.examining(poison, level)
        outcome = tripper.run(level, 1)
        if isinstance(outcome, Failure):
            failure = outcome
            break
        trips.append(outcome)
        if not outcome.intact:
            break
    return Examination(
        poison=poison, reference=oracle.reference, trips=tuple(trips), failure=failure
    )


def _escaped(examinations: Sequence[Examination]) -> tuple[str, ...]:
    names = (
        name for entry in examinations for trip in entry.trips for name in trip.nap.report.escaped
    )
    return tuple(dict.fromkeys(names))


def _owner(row: OwnerRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "aliases": list(row.aliases),
        "class": row.cls,
        "tag": row.tag,
        "owned_bytes": row.nbytes,
        "sources": list(row.sources),
        "host_copy": row.host_copy,
        "valid": row.valid,
        "digest": row.digest,
    }
