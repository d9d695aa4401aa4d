"""Filling memory that came back: poison, host copies, digests, cleared caches, resets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torpor.errors import OwnershipError, TorporError
from torpor.sleep.classes import AtWake

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry


def poison(context: Context, entries: Iterable[Entry]) -> None:
    """Fill fresh memory with the pattern of each dtype, when poison is on."""
    if context.poison is None:
        return
    for entry in entries:
        context.device.fill(entry.address, entry.nbytes, context.poison.byte_for(entry.dtype))


def restore(context: Context, entries: Iterable[Entry]) -> int:
    """Copy host copies of official content back; returns the bytes copied.

    Raises:
        HostCopyError: a copy cannot be read.
    """
    restored = 0
    for entry in entries:
        if entry.host is not None and not entry.is_dirty:
            context.device.copy_in(entry.address, entry.host)
            restored += entry.nbytes
    return restored


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
        OwnershipError: a reset failed.
    """
    for entry in entries:
        if entry.policy.at_wake is AtWake.CLEAR:
            if not (fresh and context.device.fresh_memory_is_zero and context.poison is None):
                context.device.fill(entry.address, entry.nbytes, 0)
            entry.stale = entry.rebuild is not None
        elif entry.policy.at_wake is AtWake.RESET and entry.reset is not None:
            try:
                entry.reset()
            except Exception as error:
                raise OwnershipError(f"the reset of {entry.name!r} failed: {error}") from error


def copy_again(context: Context, damaged: list[Entry]) -> list[Entry]:
    """Copy damaged entries once more; returns those that are still damaged."""
    for entry in damaged:
        try:
            restore(context, [entry])
        except TorporError:
            continue
    return settle(context, damaged)
