"""States, the transition table, and the record of what happened.

    AWAKE -> DRAINING -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE

A transition that fails goes back along its arrow. FAULTED means that content could not be proven:
only a wake that fills from elsewhere, or close, leads out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from torpor.errors import StateError

HISTORY_LENGTH = 512
"""Transitions kept in the ring."""


class State(Enum):
    """Where a sleeper is."""

    AWAKE = "awake"
    DRAINING = "draining"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAULTED = "faulted"


class TagState(Enum):
    """What a caller may expect of one tag's memory."""

    RESIDENT = "resident"
    """Mapped, and every byte of it valid."""
    RELEASED = "released"
    """No physical memory."""
    MAPPED_INVALID = "mapped_invalid"
    """Mapped, but some content has to be reloaded or updated first."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.AWAKE: frozenset({State.DRAINING}),
    # Back to where it came from when it rolls back: awake, or asleep with some tags resident.
    State.DRAINING: frozenset({State.FALLING_ASLEEP, State.AWAKE, State.ASLEEP}),
    State.FALLING_ASLEEP: frozenset({State.ASLEEP, State.AWAKE}),
    # A partly asleep sleeper can put further tags to sleep.
    State.ASLEEP: frozenset({State.WAKING, State.DRAINING}),
    # A partial wake ends asleep, and so does one that rolls back.
    State.WAKING: frozenset({State.AWAKE, State.ASLEEP, State.FAULTED}),
    State.FAULTED: frozenset({State.WAKING}),
}


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of the state machine."""

    source: State
    target: State
    at_s: float
    """Seconds since the epoch."""
    duration_s: float
    """Seconds spent in ``source``."""
    moved_bytes: int
    """Bytes released or acquired by the step."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "source": self.source.value, "target": self.target.value}


class StateMachine:
    """The present state and how it came about."""

    def __init__(self) -> None:
        # (transition, monotonic clock at its end). The last one is the state, so that appending is
        # the whole move and an interrupt cannot leave half of one behind.
        self._log: deque[tuple[Transition, float]] = deque(maxlen=HISTORY_LENGTH)
        self._start_s = time.monotonic()

    @property
    def state(self) -> State:
        """The present state."""
        return self._log[-1][0].target if self._log else State.AWAKE

    @property
    def history(self) -> tuple[Transition, ...]:
        """The last few hundred transitions, oldest first."""
        return tuple(transition for transition, _ in tuple(self._log))

    def move(self, target: State, *, moved_bytes: int = 0) -> None:
        """Perform one transition: the only way the state changes.

        Raises:
            StateError: the table has no such transition.
        """
        source = self.state
        if target not in TRANSITIONS[source]:
            legal = ", ".join(sorted(state.value for state in TRANSITIONS[source]))
            raise StateError(f"{source.value} cannot become {target.value}; it can become: {legal}")
        now_s = time.monotonic()
        since_s = self._log[-1][1] if self._log else self._start_s
        record = Transition(source, target, time.time(), now_s - since_s, moved_bytes)
        self._log.append((record, now_s))
