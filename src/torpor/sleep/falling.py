"""Falling asleep: prepare everything that can fail, then release, then commit.

prepare   look for writes outside the door, make host copies        nothing has changed on failure
release   guard the modules, unmap the arenas                       rolled back on failure
commit    one assignment
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torpor.errors import ForeignWriteError, TorporError, VerificationError
from torpor.sleep.classes import AtSleep
from torpor.sleep.derive import dependants, rebuild_stale
from torpor.sleep.door import keep
from torpor.sleep.host import CheckpointCopy
from torpor.sleep.reports import SleepReport, Stopwatch
from torpor.sleep.restore import clear_caches, restore, settle
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
    notices = _deepen(context, level, [tag for tag in mine if tag not in falling])
    changed = bool(falling) or any("dropped" in notice for notice in notices)
    if not falling:
        notices = notices or ["nothing to release"]
        return _report(context, Fall(level, (), [], [], stopwatch), changed, notices, escaped)
    fall = Fall(
        level, falling, context.ledger.in_tags(falling), context.ledger.arenas(falling), stopwatch
    )
    try:
        fall_asleep(context, guard, fall)
    except TorporError as error:
        missing = context.missing(context.ledger.tags())
        if missing:
            error.add_note(f"rolled back, but invalid until reloaded: {', '.join(missing[:8])}")
        raise
    return _report(context, fall, changed, notices, escaped)


def _deepen(context: Context, level: int, asleep: list[str]) -> list[str]:
    """Answer a sleep for tags that sleep already: level 1 to 2 drops host copies of weights."""
    notices = []
    for tag in asleep:
        before = context.released[tag]
        if level <= before:
            notices.append(f"{tag} is asleep already, at level {before}")
            continue
        dropped = 0
        for entry in context.ledger.in_tags([tag]):
            if at_sleep(entry, level) is AtSleep.DISCARD and entry.host is not None:
                entry.host = None
                dropped += entry.nbytes
        context.released = {**context.released, tag: level}
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
    dropped: list[Entry] = field(default_factory=list)
    mapped: list[int] = field(default_factory=list)
    """Bytes mapped in each arena before the release."""


def at_sleep(entry: Entry, level: int) -> AtSleep:
    """What a level does to one entry; a buffer that the checkpoint holds counts as a parameter."""
    if level == 1:
        return entry.policy.level1
    return AtSleep.DISCARD if entry.in_checkpoint else entry.policy.level2


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
    except BaseException:
        if machine.state is State.DRAINING:
            machine.move(origin)
        raise
    before = context.released
    after = {**before, **dict.fromkeys(fall.tags, fall.level)}
    fall.mapped = [arena.mapped_bytes for arena in fall.arenas]
    try:
        machine.move(State.FALLING_ASLEEP)
        _release(context, guard, fall)
        context.released = after
        machine.move(State.ASLEEP, moved_bytes=sum(fall.mapped))
    except BaseException:
        if machine.state is State.FALLING_ASLEEP:
            _roll_back(context, fall, origin, before, after)
        raise
    _forget_discarded(fall)


def _prepare(context: Context, fall: Fall) -> None:
    verified = [entry for entry in fall.entries if entry.policy.verified and entry.valid]
    with fall.stopwatch.phase("fingerprint"):
        digests = context.device.fingerprint([entry.range for entry in verified])
    pairs = list(zip(verified, digests, strict=True))
    for entry, digest in pairs:
        if entry.tag == "optimizer":  # Its owner writes at every step; there is no door to it.
            entry.digest = digest
    foreign = [entry for entry, digest in pairs if entry.digest != digest]
    fall.verifiable = len(verified)
    fall.verified = fall.verifiable - len(foreign)
    if foreign:
        _answer_foreign_writes(context, fall, foreign, {id(e): d for e, d in pairs})
    with fall.stopwatch.phase("copy"):
        for entry in fall.entries:
            if entry.valid and at_sleep(entry, fall.level) is AtSleep.COPY:
                fall.copied_bytes += _ensure_copy(context, entry)


def _ensure_copy(context: Context, entry: Entry) -> int:
    trusted = not isinstance(entry.host, CheckpointCopy) or entry.host.is_current()
    if not entry.is_dirty and trusted:
        return 0
    # The old copy is let go only after the new one is whole.
    entry.host, copied = keep(context, entry)
    return copied


def _answer_foreign_writes(
    context: Context, fall: Fall, foreign: list[Entry], digests: dict[int, str]
) -> None:
    names = [entry.name for entry in foreign]
    shown = ", ".join(names[:8])
    if context.on_foreign_write == "error":
        raise ForeignWriteError(
            f"{len(names)} tensors were changed outside update_weights/load_weights: {shown}; send "
            "changes through the door, or choose on_foreign_write='adopt' or 'restore'",
            names,
        )
    if context.on_foreign_write == "restore":
        without = [entry.name for entry in foreign if entry.is_dirty]
        if without:
            raise ForeignWriteError(
                f"{len(without)} tensors were changed outside the door and have no host copy to "
                f"restore: {', '.join(without[:8])}; choose on_foreign_write='adopt'",
                without,
            )
        restore(context, foreign)
        failed = settle(context, foreign)
        if failed:
            names = [entry.name for entry in failed]
            raise VerificationError(
                f"the host copies of {', '.join(names)} are damaged; reload the weights", names
            )
        fall.verified += len(foreign)
        return
    _adopt_foreign(context, foreign, digests)
    fall.adopted = tuple(names)
    fall.verified += len(foreign)


def _adopt_foreign(context: Context, foreign: list[Entry], digests: dict[int, str]) -> None:
    """Take what somebody wrote as official: a new epoch; derived tensors follow their sources."""
    context.epochs.weights += 1
    context.epochs.from_checkpoint = False
    changed = [entry for entry in foreign if entry.rebuild is None]
    for entry in dependants(context, changed):
        entry.stale = True
    rebuilt = rebuild_stale(context)
    again = [entry for entry in rebuilt if entry.policy.verified]
    for entry, digest in zip(
        again, context.device.fingerprint([entry.range for entry in again]), strict=True
    ):
        entry.digest = digest
    for entry in foreign:
        if entry not in again:
            entry.digest = digests[id(entry)]


def _release(context: Context, guard: Guard, fall: Fall) -> None:
    with fall.stopwatch.phase("measure"):
        ranges = [arena.range for arena in fall.arenas]
        fall.rss_before_bytes = context.device.resident_bytes(ranges)
    guard.install()
    if "kv_cache" in fall.tags:
        context.epochs.kv += 1
    with fall.stopwatch.phase("release"):
        for entry in fall.entries:
            if at_sleep(entry, fall.level) is AtSleep.DISCARD or not entry.valid:
                # Noted before the memory goes: whatever happens next, the content counts as lost.
                fall.dropped.append(entry)
        for arena in fall.arenas:
            arena.unmap()
    with fall.stopwatch.phase("trim"):
        context.device.trim()
    with fall.stopwatch.phase("measure"):
        fall.rss_after_bytes = context.device.resident_bytes(ranges)


def _forget_discarded(fall: Fall) -> None:
    for entry in fall.dropped:
        if entry.policy.verified:
            entry.host = None
            entry.valid = False


def _roll_back(
    context: Context,
    fall: Fall,
    origin: State,
    before: dict[str, int],
    after: dict[str, int],
) -> None:
    """Bring everything back from host copies; what had none and is gone becomes invalid by name."""
    try:
        for arena, mapped_bytes in zip(fall.arenas, fall.mapped, strict=True):
            arena.remap(mapped_bytes)
    except TorporError:
        # Somebody took the memory meanwhile: finish falling asleep, which loses nothing more.
        for arena in fall.arenas:
            arena.unmap()
        context.released = after
        context.machine.move(State.ASLEEP)
        return
    context.released = before
    clear_caches(context, fall.entries, fresh=False)
    restore(context, fall.entries)
    settle(context, fall.entries)
    rebuild_stale(context)
    context.machine.move(origin)
