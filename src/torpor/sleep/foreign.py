"""Writes outside the door: found when a sleep compares digests, answered by policy.

adopt     what was written becomes official, and what is computed from it follows
restore   the official content comes back from its host copies, or by its rebuild
error     nothing changes but an error that names the tensors
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torpor.errors import ForeignWriteError, TorporError, VerificationError
from torpor.sleep.derive import can_rebuild, follow, rebuild_stale
from torpor.sleep.keeping import distrust
from torpor.sleep.restore import copy_again, restore, settle

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry

Found = tuple["Entry", str]
"""An entry and the digest of its present bytes, which is not the official one."""


def answer_foreign_writes(context: Context, foreign: Sequence[Found]) -> tuple[str, ...]:
    """Do what the sleeper's policy says; returns the names whose new content is official now.

    Raises:
        ForeignWriteError: the policy is ``error``, or ``restore`` and there is no host copy.
        VerificationError: host copies are damaged; the tensors are invalid.
    """
    entries = [entry for entry, _ in foreign]
    if context.on_foreign_write == "error":
        names = [entry.name for entry in entries]
        raise ForeignWriteError(
            f"{len(names)} tensors were changed outside update_weights/load_weights: "
            f"{', '.join(names[:8])}; send changes through the door, or choose "
            "on_foreign_write='adopt' or 'restore'",
            names,
        )
    if context.on_foreign_write == "restore":
        _restore(context, entries)
        return ()
    _adopt(context, foreign)
    return tuple(entry.name for entry in entries)


def _adopt(context: Context, foreign: Sequence[Found]) -> None:
    context.epochs.weights += 1
    if any(entry.in_checkpoint for entry, _ in foreign):
        context.epochs.from_checkpoint = False
    # A derived tensor that was written keeps that, unless one of its sources was written too.
    changed = [entry for entry, _ in foreign]
    rebuilt = [entry for entry in follow(context, changed) if entry.policy.verified]
    digests = context.device.fingerprint([entry.range for entry in rebuilt])
    # Sources last: as long as theirs are the old ones, an interrupted sleep starts over from here.
    for entry, digest in zip(rebuilt, digests, strict=True):
        entry.digest = digest
    for entry, digest in foreign:
        if entry not in rebuilt and entry.valid:
            entry.by_hand = entry.rebuild is not None
            entry.digest = digest


def _restore(context: Context, foreign: list[Entry]) -> None:
    copied = [entry for entry in foreign if not entry.is_dirty]
    again = [entry for entry in foreign if entry.is_dirty and entry.rebuild is not None]
    without = [entry for entry in foreign if entry.is_dirty and entry.rebuild is None]
    if without:
        names = [entry.name for entry in without]
        raise ForeignWriteError(
            f"{len(names)} tensors were changed outside the door and have no host copy to restore: "
            f"{', '.join(names[:8])}; choose on_foreign_write='adopt'",
            names,
        )
    for entry in foreign:
        entry.valid = False
    try:
        restore(context, copied)
        damaged = settle(context, copied)
        if damaged:
            damaged, _errors = copy_again(context, damaged)
        rebuild_stale(context)
        damaged += _settle_rebuilt(context, again)
    except BaseException:
        # Half of a restore is no content; this is all that there is to finish it.
        with contextlib.suppress(TorporError):
            copy_again(context, copied)
            rebuild_stale(context)
        raise
    if damaged:
        for entry in damaged:
            distrust(context, entry)
        names = [entry.name for entry in damaged]
        raise VerificationError(
            f"what was changed outside the door cannot be restored, since the copies of "
            f"{', '.join(names[:8])} are damaged; update or reload them",
            names,
        )


def _settle_rebuilt(context: Context, entries: list[Entry]) -> list[Entry]:
    """Compare what was rebuilt; returns what differs or could not be rebuilt."""
    settle(context, [entry for entry in entries if can_rebuild(context, entry)])
    return [entry for entry in entries if not entry.valid]
