"""Falling asleep: prepare everything that can fail, then release, then commit.

prepare   look for writes outside the door, make host copies        nothing has changed on failure
release   guard the modules, unmap the arenas                       rolled back on failure
commit    one assignment
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torpor.errors import TorporError
from torpor.sleep.classes import AtSleep, OwnershipClass
from torpor.sleep.derive import rebuild_stale
from torpor.sleep.foreign import answer_foreign_writes
from torpor.sleep.keeping import ensure_copy
from torpor.sleep.reports import SleepReport, Stopwatch
from torpor.sleep.restore import count_as_lost, recover
from torpor.sleep.states import State

if TYPE_CHECKING:
    from torpor.sleep.arena import Arena
    from torpor.sleep.context import Context
    from torpor.sleep.guard import Guard
    from torpor.sleep.ledger import Entry


def sleep(
    context: Context, guard: Guard, level: int, tags: tuple[str, ...], escaped: tuple[str, ...]
) -> SleepReport:
    """Release what is not released yet of some tags, and report; see ``Sleeper.sleep``."""
    stopwatch = Stopwatch()
    mine = [tag for tag in tags if tag in context.ledger.tags()]
    falling = tuple(tag for tag in mine if tag not in context.released)
    asleep = {tag: context.released[tag] for tag in mine if tag in context.released}
    fall = Fall(
        level, falling, context.ledger.in_tags(falling), context.ledger.arenas(falling), stopwatch
    )
    if falling:
        try:
            fall_asleep(context, guard, fall)
        except TorporError as error:
            missing = context.missing(context.ledger.tags())
            if missing:
                error.add_note(f"invalid until updated or reloaded: {', '.join(missing[:8])}")
            raise
    # Only now: a sleep that fails must not have dropped anything.
    notices = _deepen(context, level, asleep)
    if not mine:
        notices = [f"nothing to release: {', '.join(tags)} own no memory here"]
    changed = bool(falling) or any(before < level for before in asleep.values())
    return _report(context, fall, changed, notices, escaped)


def _deepen(context: Context, level: int, asleep: dict[str, int]) -> list[str]:
    """Answer a sleep for tags that sleep already: level 1 to 2 drops host copies of weights."""
    notices = [
        f"{tag} is asleep already, at level {before}"
        for tag, before in asleep.items()
        if level <= before
    ]
    deeper = [tag for tag, before in asleep.items() if level > before]
    # The commit; what follows can be interrupted and done again.
    context.released = {**context.released, **dict.fromkeys(deeper, level)}
    for tag in asleep:
        dropped = _forget_discarded(context, [tag])
        if tag in deeper:
            notices.append(f"{tag} is at level {level} now; host copies of {dropped} bytes dropped")
    return notices


def _report(
    context: Context, fall: Fall, changed: bool, notices: list[str], escaped: tuple[str, ...]
) -> SleepReport:
    ledger = context.ledger
    return SleepReport(
        level=fall.level,
        tags=fall.tags,
        changed=changed,
        notices=tuple(notices),
        released_bytes=ledger.bytes_by_class(fall.entries),
        copied_bytes=fall.copied_bytes,
        resident_bytes=ledger.residents.nbytes,
        residents=tuple(ledger.residents),
        escaped=escaped,
        arena_rss_before_bytes=fall.rss_before_bytes,
        arena_rss_after_bytes=fall.rss_after_bytes,
        verified=fall.verified,
        total_verifiable=fall.verifiable,
        adopted=fall.adopted,
        seconds=dict(fall.stopwatch.seconds),
        total_s=fall.stopwatch.total_s,
        weights_epoch=context.epochs.weights,
        kv_epoch=context.epochs.kv,
    )


@dataclass(slots=True)
class Fall:
    """One sleep under way, and what its report will say."""

    level: int
    tags: tuple[str, ...]
    entries: list[Entry]
    arenas: list[Arena]
    stopwatch: Stopwatch
    copied_bytes: int = 0
    rss_before_bytes: int = 0
    rss_after_bytes: int = 0
    verified: int = 0
    verifiable: int = 0
    adopted: tuple[str, ...] = ()
    mapped: list[int] = field(default_factory=list)
    """Bytes mapped in each arena before the release."""
    releasing: bool = False
    """Whether memory may be gone already."""


def at_sleep(entry: Entry, level: int) -> AtSleep:
    """What a level does to one entry.

    A buffer that the checkpoint holds counts as a parameter; a parameter with bytes that no
    checkpoint name leads to counts as a buffer, and so does a derived tensor that somebody wrote by
    hand: nothing would bring them back.
    """
    if level == 1 or entry.by_hand:
        return entry.policy.level1
    if entry.cls is OwnershipClass.PARAMETER or entry.in_checkpoint:
        return AtSleep.DISCARD if entry.in_checkpoint else AtSleep.COPY
    return entry.policy.level2


def fall_asleep(context: Context, guard: Guard, fall: Fall) -> None:
    """Release the memory of ``fall.tags``.

    Before: the tags are mapped. After: released, and committed. On any failure: as before, or,
    where a discarded tensor had no host copy, mapped and invalid by name.

    Raises:
        ForeignWriteError: content was changed outside the door and the policy is ``error``.
        HostFullError: no room for a host copy.
        ArenaError: the system refused to release memory.
    """
    machine = context.machine
    origin = machine.state
    try:
        machine.move(State.DRAINING)
        with fall.stopwatch.phase("quiesce"):
            context.device.synchronize()
        _prepare(context, fall)
        fall.mapped = [arena.mapped_bytes for arena in fall.arenas]
        machine.move(State.FALLING_ASLEEP)
        _release(context, guard, fall)
        context.released = {**context.released, **dict.fromkeys(fall.tags, fall.level)}
        machine.move(State.ASLEEP, moved_bytes=sum(fall.mapped))
    except BaseException:
        if machine.state in (State.DRAINING, State.FALLING_ASLEEP):
            _roll_back(context, fall, origin)
        raise
    _forget_discarded(context, fall.tags)


def _prepare(context: Context, fall: Fall) -> None:
    verified = [entry for entry in fall.entries if entry.policy.verified and entry.valid]
    with fall.stopwatch.phase("fingerprint"):
        digests = context.device.fingerprint([entry.range for entry in verified])
    pairs = list(zip(verified, digests, strict=True))
    for entry, digest in pairs:
        if entry.tag == "optimizer":  # Its owner writes at every step; there is no door to it.
            entry.digest = digest
    foreign = [(entry, digest) for entry, digest in pairs if entry.digest != digest]
    fall.verifiable = fall.verified = len(verified)
    if foreign:
        with fall.stopwatch.phase("foreign writes"):
            fall.adopted = answer_foreign_writes(context, foreign)
    with fall.stopwatch.phase("copy"):
        for entry in fall.entries:
            if (
                entry.policy.verified
                and entry.valid
                and at_sleep(entry, fall.level) is AtSleep.COPY
            ):
                fall.copied_bytes += ensure_copy(context, entry)


def _release(context: Context, guard: Guard, fall: Fall) -> None:
    ranges = [arena.range for arena in fall.arenas]
    with fall.stopwatch.phase("measure"):
        fall.rss_before_bytes = context.device.resident_bytes(ranges)
    guard.install()
    if "kv_cache" in fall.tags:
        context.epochs.kv += 1
    with fall.stopwatch.phase("release"):
        fall.releasing = True
        for arena in fall.arenas:
            arena.unmap()
    with fall.stopwatch.phase("trim"):
        context.device.trim()
    with fall.stopwatch.phase("measure"):
        fall.rss_after_bytes = context.device.resident_bytes(ranges)


def _forget_discarded(context: Context, tags: Iterable[str]) -> int:
    """Give up what the level of some sleeping tags discards; returns the bytes of copies dropped.

    Derived from the books alone, so that doing it again after an interrupt finishes it.
    """
    dropped = 0
    for entry in context.ledger.in_tags(tags):
        entry.covered.clear()
        discards = at_sleep(entry, context.released[entry.tag]) is AtSleep.DISCARD
        if discards and entry.policy.verified:
            dropped += 0 if entry.host is None else entry.nbytes
            entry.host = None
            entry.valid = False
    return dropped


def _roll_back(context: Context, fall: Fall, origin: State) -> None:
    """Bring everything back from host copies; what had none and is gone becomes invalid by name."""
    before = {tag: level for tag, level in context.released.items() if tag not in fall.tags}
    after = {**before, **dict.fromkeys(fall.tags, fall.level)}
    target = State.ASLEEP if fall.releasing else origin
    try:
        if not fall.releasing:
            # Rebuilds after a foreign write may have been cut short.
            with contextlib.suppress(TorporError):
                rebuild_stale(context)
            return
        context.released = after  # Counts as asleep until all of it is mapped again.
        if _map_again(fall):
            for entry in fall.entries:
                count_as_lost(entry)
            context.released = before
            target = origin
            recover(context, fall.entries)
        else:
            # Somebody took the memory meanwhile; staying asleep loses nothing more.
            _forget_discarded(context, fall.tags)
    finally:
        context.machine.move(target)


def _map_again(fall: Fall) -> bool:
    """Map what was mapped before; on failure release all of it."""
    try:
        for arena, mapped_bytes in zip(fall.arenas, fall.mapped, strict=True):
            arena.remap(mapped_bytes)
    except TorporError:
        for arena in fall.arenas:
            arena.give_up()
        return False
    return True
