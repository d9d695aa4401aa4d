"""Filling memory that came back: poison, host copies, digests, cleared caches, resets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torpor.errors import HostCopyError, OwnershipError, TorporError
from torpor.sleep.classes import AtWake
from torpor.sleep.derive import rebuild_stale

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry


def poison(context: Context, entries: Iterable[Entry]) -> None:
    """Fill fresh memory with the pattern of each dtype, when poison is on."""
    if context.poison is None:
        return
    for entry in entries:
        context.device.fill(entry.address, entry.nbytes, context.poison.byte_for(entry.dtype))


def count_as_lost(entry: Entry) -> None:
    """Note that the memory holds nothing official; scratch memory never does and is always fine."""
    entry.valid = entry.policy.at_wake is AtWake.NOTHING
    entry.covered.clear()


def restore(context: Context, entries: Iterable[Entry]) -> tuple[int, list[HostCopyError]]:
    """Copy host copies of official content back.

    Returns:
        The bytes copied, and why some could not be read: their digests will differ.
    """
    restored = 0
    errors: list[HostCopyError] = []
    for entry in entries:
        if entry.host is not None and not entry.is_dirty:
            try:
                context.device.copy_in(entry.address, entry.host)
                restored += entry.nbytes
            except HostCopyError as error:
                errors.append(error)
    return restored, errors


def settle(context: Context, entries: Iterable[Entry]) -> list[Entry]:
    """Compare mapped bytes with official digests; equal content is valid, the rest is not.

    Returns:
        Entries that have official content in a host copy and yet differ.
    """
    verified = [entry for entry in entries if entry.policy.verified and entry.digest is not None]
    digests = context.device.fingerprint([entry.range for entry in verified])
    for entry, digest in zip(verified, digests, strict=True):
        entry.valid = entry.digest == digest
    return [entry for entry in verified if not entry.valid and not entry.is_dirty]


def clear_caches(context: Context, entries: Iterable[Entry], *, fresh: bool) -> None:
    """Bring back what has no host copy: zero caches, run resets; refills are due afterwards.

    Args:
        fresh: the memory has just been mapped, and nothing but poison was written to it.

    Raises:
        OwnershipError: a reset failed; that entry is invalid.
    """
    for entry in entries:
        if entry.policy.at_wake is AtWake.CLEAR:
            entry.valid = False
            if not (fresh and context.device.fresh_memory_is_zero and context.poison is None):
                context.device.fill(entry.address, entry.nbytes, 0)
            entry.stale = entry.rebuild is not None
            entry.valid = not entry.stale
        elif entry.policy.at_wake is AtWake.RESET and entry.reset is not None:
            try:
                entry.valid = False
                entry.reset()
                entry.valid = True
            except Exception as error:
                raise OwnershipError(f"the reset of {entry.name!r} failed: {error}") from error


def copy_again(context: Context, damaged: list[Entry]) -> tuple[list[Entry], list[HostCopyError]]:
    """Copy damaged entries once more; returns those that are still damaged, and what was said."""
    _restored, errors = restore(context, damaged)
    return settle(context, damaged), errors


def recover(context: Context, entries: list[Entry]) -> None:
    """Bring back as much as can be of entries that count as lost; the rest stays invalid by name.

    For rolling back: nothing is raised except by a further interrupt.
    """
    recover_copies(context, entries)
    for entry in entries:
        with contextlib.suppress(TorporError):
            clear_caches(context, [entry], fresh=False)
    with contextlib.suppress(TorporError):
        rebuild_stale(context)


def recover_copies(context: Context, entries: list[Entry]) -> None:
    """Bring back what has a host copy, trying twice, and make it valid if its digest is right."""
    for _attempt in range(2):
        with contextlib.suppress(TorporError):
            restore(context, entries)
            if not settle(context, entries):
                return
