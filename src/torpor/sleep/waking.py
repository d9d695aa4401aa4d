"""Waking: reserve all memory, fill it, verify it, then commit.

    reserve   map every arena; a shortage shows here
    fill      poison, host copies, reload, rebuilds, cleared caches
    verify    every digest against the official one
    commit    one assignment

Any failure before the commit releases what was mapped, keeps the host copies, and leaves the
sleeper asleep: the call can be made again.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torpor.errors import StateError, VerificationError
from torpor.sleep.books import Page
from torpor.sleep.derive import rebuild_stale
from torpor.sleep.repair import repair
from torpor.sleep.reports import Stopwatch, WakeReport
from torpor.sleep.restore import clear_caches, count_as_lost, poison, restore, settle
from torpor.sleep.states import State, TagState

if TYPE_CHECKING:
    from torpor.sleep.arena import Arena
    from torpor.sleep.context import Context
    from torpor.sleep.door import Door
    from torpor.sleep.ledger import Entry


def wake_up(
    context: Context, door: Door, tags: tuple[str, ...], reload: bool | None, *, plain: bool
) -> WakeReport:
    """Bring back what is released of some tags, and report; see ``Sleeper.wake_up``."""
    stopwatch = Stopwatch()
    rising = tuple(tag for tag in tags if tag in context.released)
    if reload and context.reload is None:
        raise StateError("there is no checkpoint to reload from; pass reload= to Sleeper")
    entries = context.ledger.in_tags(rising)
    notices = []
    if not rising:
        notices.append("nothing to wake: nothing of it is asleep")
    mapped = bool(reload) and "weights" in tags and "weights" not in rising
    invalid = mapped and context.tag_state("weights") is TagState.MAPPED_INVALID
    if mapped and not invalid:
        notices.append("the weights are not asleep, so nothing was reloaded; see reload_weights()")
    rise = Rise(
        tags=rising,
        reload="weights" in rising and _chosen_reload(context, reload, entries, plain=plain),
        same_epoch=reload is None,
        entries=entries,
        arenas=context.ledger.arenas(rising),
        stopwatch=stopwatch,
    )
    if rising:
        wake(context, door, rise)
    if invalid:  # Woken before, to be filled by the caller, who asks for the checkpoint now.
        rise.reload = True
        with stopwatch.phase("reload"):
            _read_checkpoint(context, door)
    return _report(context, rise, notices)


def _chosen_reload(
    context: Context, reload: bool | None, entries: list[Entry], *, plain: bool
) -> bool:
    if reload is not None:
        return reload
    lost = [entry for entry in entries if entry.in_checkpoint and entry.is_dirty]
    if not (plain and lost and context.reload is not None):
        return False
    if context.epochs.from_checkpoint or all(entry.digest is None for entry in lost):
        return True
    if context.released["weights"] == 1:
        return False  # They were invalid when they fell asleep, and somebody is filling them.
    raise StateError(
        f"the weights (epoch {context.epochs.weights}, version {context.epochs.version!r}) did not "
        "come from the checkpoint, and reading it would undo them; wake_up(reload=True) does so, "
        "wake_up(reload=False) leaves filling them to an update"
    )


def _report(context: Context, rise: Rise, notices: list[str]) -> WakeReport:
    missing = tuple(context.missing(rise.tags))
    if missing:
        notices = [*notices, f"{len(missing)} tensors have to be updated or reloaded before use"]
    return WakeReport(
        tags=rise.tags,
        changed=bool(rise.tags) or rise.reload,
        notices=tuple(notices),
        mapped_bytes=rise.mapped_bytes,
        restored_bytes=rise.restored_bytes,
        reloaded=rise.reload,
        rebuilt=tuple(rise.rebuilt),
        repaired=tuple(rise.repaired),
        verified=rise.verified,
        total_verifiable=rise.verifiable,
        missing=missing,
        seconds=dict(rise.stopwatch.seconds),
        total_s=rise.stopwatch.total_s,
        weights_epoch=context.epochs.weights,
        kv_epoch=context.epochs.kv,
    )


@dataclass(slots=True)
class Rise:
    """One wake under way, and what its report will say."""

    tags: tuple[str, ...]
    reload: bool
    """Read the weights from the checkpoint again."""
    same_epoch: bool
    """Whether what comes back must be the official content, digest for digest. Not so when the
    caller said who fills."""
    entries: list[Entry]
    arenas: list[Arena]
    stopwatch: Stopwatch
    mapped_bytes: int = 0
    restored_bytes: int = 0
    repaired: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    verified: int = 0
    verifiable: int = 0


def wake(context: Context, door: Door, rise: Rise) -> None:
    """Bring the memory of ``rise.tags`` back.

    Before: the tags are released. After: mapped, verified and committed; content that level 2
    discarded is valid if it was reloaded, else invalid. On failure: released, host copies kept.

    Raises:
        OutOfMemoryError: not enough memory now.
        VerificationError: content came back different and could not be repaired; the sleeper is
            FAULTED.
        TorporError: the checkpoint, a rebuild or a reset failed.
    """
    machine = context.machine
    before = context.released
    epochs = dataclasses.replace(context.epochs)
    books = [Page(entry) for entry in context.ledger]
    after = {tag: level for tag, level in before.items() if tag not in rise.tags}
    try:
        machine.move(State.WAKING)
        _fill(context, door, rise)
        context.released = after
        machine.move(State.ASLEEP if after else State.AWAKE, moved_bytes=rise.mapped_bytes)
    except BaseException as error:
        if machine.state is State.WAKING:
            try:
                context.released = before
                context.epochs = epochs
                door.forget()
                _roll_back(rise, books)
            finally:
                lasting = isinstance(error, VerificationError)
                machine.move(State.FAULTED if lasting else State.ASLEEP)
        raise


def _roll_back(rise: Rise, books: list[Page]) -> None:
    for arena in rise.arenas:
        arena.give_up()
    for page in books:
        page.put_back()
        # Whatever is rebuilt from sources is due once more: they may have come and gone.
        page.entry.stale = page.entry.rebuild is not None and not page.by_hand


def _fill(context: Context, door: Door, rise: Rise) -> None:
    phase = rise.stopwatch.phase
    with phase("map"):
        _map(rise)
    with phase("poison"):
        poison(context, rise.entries)
    kept = [entry for entry in rise.entries if entry.policy.verified and not entry.is_dirty]
    for entry in rise.entries:
        count_as_lost(entry)
    with phase("restore"):
        rise.restored_bytes, errors = restore(context, kept)
    with phase("verify"):
        damaged = settle(context, kept)
    if damaged:
        with phase("repair"):
            rise.repaired += repair(
                context, damaged, errors, reloading=rise.reload, lenient=not rise.same_epoch
            )
    if rise.reload:
        due = [entry for entry in rise.entries if entry.rebuild is not None and not entry.valid]
        with phase("reload"):
            _reload(context, door, rise)
        rise.rebuilt += [entry.name for entry in due if entry.valid]
    with phase("clear"):
        clear_caches(context, rise.entries, fresh=True)
    with phase("rebuild"):
        _rebuild(context, rise)
    verifiable = [entry for entry in rise.entries if entry.policy.verified]
    rise.verifiable = len(verifiable)
    rise.verified = sum(entry.valid for entry in verifiable)


def _map(rise: Rise) -> None:
    # What will be written now gets its pages now; a cache gets them as it fills.
    filled = {id(entry.arena) for entry in rise.entries if entry.policy.verified}
    for arena in rise.arenas:
        # An interrupted call may have left memory here, and cleared caches count on fresh pages.
        arena.unmap()
    for arena in rise.arenas:
        # Mapped whole before anything is copied: a shortage must not cost a copy.
        arena.remap(arena.nbytes, populate=id(arena) in filled)
    rise.mapped_bytes = sum(arena.mapped_bytes for arena in rise.arenas)


def _reload(context: Context, door: Door, rise: Rise) -> None:
    official = {id(entry): entry.digest for entry in rise.entries if entry.policy.verified}
    _read_checkpoint(context, door)
    if not rise.same_epoch:
        return
    differing = [
        entry.name
        for entry in rise.entries
        if (digest := official.get(id(entry))) is not None and entry.digest != digest
    ]
    if differing:
        raise VerificationError(
            f"the checkpoint has changed: {len(differing)} tensors differ from what went to sleep: "
            f"{', '.join(differing[:8])}; wake_up(reload=True) accepts the new content",
            differing,
        )


def _read_checkpoint(context: Context, door: Door) -> None:
    assert context.reload is not None, "wake_up() asked"
    # A tensor that was replaced is resident and was never discarded.
    left = {part.name for part in context.slices if part.parameter not in context.ledger}
    door.run(context.reload, None, skip=left)


def _rebuild(context: Context, rise: Rise) -> None:
    official = {id(entry): entry.digest for entry in context.ledger}
    rebuilt = rebuild_stale(context)
    rise.rebuilt += [entry.name for entry in rebuilt]
    verified = [entry for entry in rebuilt if entry.policy.verified]
    digests = context.device.fingerprint([entry.range for entry in verified])
    differing = [
        entry.name
        for entry, digest in zip(verified, digests, strict=True)
        if rise.same_epoch and official[id(entry)] not in (None, digest)
    ]
    if differing:
        raise VerificationError(
            f"rebuilding {', '.join(differing)} from unchanged sources gave other bytes than "
            "before sleep; make the rebuild deterministic",
            differing,
        )
    for entry, digest in zip(verified, digests, strict=True):
        entry.digest = digest
