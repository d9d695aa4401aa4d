"""The seven ownership classes and what sleep does to each, as data.

A class is a fact about a tensor that its owner declares. Where or when the memory was allocated is
never evidence of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OwnershipClass(Enum):
    """How a tensor comes back after sleep. The seven classes of the ownership contract."""

    PARAMETER = "parameter"
    """Checkpoint weights. Valid again after level 2 only once reloaded or updated."""
    BUFFER = "buffer"
    """Static state that must survive every level: rope tables, scales, zero sink values."""
    DERIVED = "derived"
    """Computed from other owned tensors by a declared rebuild."""
    CACHE = "cache"
    """Discardable content such as KV blocks; cleared when it comes back."""
    SCRATCH = "scratch"
    """Workspaces that are always written before they are read."""
    SYNC = "sync"
    """Counters, flags and peer pointers that their owner resets in place."""
    RUNTIME = "runtime"
    """Everything else: stays resident, is counted and reported."""


class AtSleep(Enum):
    """What sleep does with the bytes of a class."""

    COPY = "copy"
    """Keep a host copy, then release the memory."""
    DISCARD = "discard"
    """Release the memory; the content is gone."""
    STAY = "stay"
    """Leave the memory alone."""


class AtWake(Enum):
    """What wake does with the bytes of a class, once the memory is back."""

    RESTORE = "restore"
    """Copy the host copy back and compare digests; without one the content stays invalid."""
    REBUILD = "rebuild"
    """Restore when there is a host copy, else call the declared rebuild after its sources."""
    CLEAR = "clear"
    """Zero, bump ``kv_epoch``, then run a declared refill."""
    NOTHING = "nothing"
    """Leave as it is: the owner writes before it reads."""
    RESET = "reset"
    """Call the declared reset."""


TAGS = ("weights", "kv_cache", "graphs", "optimizer")
"""Every tag a caller may name at sleep and wake."""

LEVELS = (1, 2)
"""Sleep levels that move memory: 1 keeps host copies, 2 discards what can be had again."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the transitions do with one ownership class."""

    tag: str | None
    """The tag the class belongs to unless its owner names another; None is never released."""
    level1: AtSleep
    level2: AtSleep
    at_wake: AtWake
    verified: bool
    """Whether a digest is kept and compared at every sleep and wake."""


POLICIES: dict[OwnershipClass, Policy] = {
    OwnershipClass.PARAMETER: Policy(
        "weights", AtSleep.COPY, AtSleep.DISCARD, AtWake.RESTORE, verified=True
    ),
    OwnershipClass.BUFFER: Policy(
        "weights", AtSleep.COPY, AtSleep.COPY, AtWake.RESTORE, verified=True
    ),
    OwnershipClass.DERIVED: Policy(
        "weights", AtSleep.COPY, AtSleep.DISCARD, AtWake.REBUILD, verified=True
    ),
    OwnershipClass.CACHE: Policy(
        "kv_cache", AtSleep.DISCARD, AtSleep.DISCARD, AtWake.CLEAR, verified=False
    ),
    OwnershipClass.SCRATCH: Policy(
        "graphs", AtSleep.DISCARD, AtSleep.DISCARD, AtWake.NOTHING, verified=False
    ),
    OwnershipClass.SYNC: Policy(
        "graphs", AtSleep.DISCARD, AtSleep.DISCARD, AtWake.RESET, verified=False
    ),
    OwnershipClass.RUNTIME: Policy(
        None, AtSleep.STAY, AtSleep.STAY, AtWake.NOTHING, verified=False
    ),
}
