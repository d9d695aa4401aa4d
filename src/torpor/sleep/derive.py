"""Rebuilding what is computed from other owned tensors: derived weights, and refills of caches.

A rebuild runs when every source is mapped and valid, sources before dependants, in place: the
address that a graph or a peer has seen never changes. A source that has left its memory stays
resident, so it is always there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from torpor.errors import OwnershipError

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry, Ledger


def sources_first(ledger: Ledger) -> list[Entry]:
    """Every entry, each after those it is computed from; otherwise in placement order."""
    ordered: dict[int, Entry] = {}
    visited: set[int] = set()

    def visit(entry: Entry) -> None:
        if id(entry) not in visited:
            visited.add(id(entry))
            for source in ledger.sources_of(entry):
                visit(source)
            ordered[id(entry)] = entry

    for entry in ledger:
        visit(entry)
    return list(ordered.values())


def refuse_cycle(ledger: Ledger, name: str, owned: Iterable[Entry], sources: Iterable[str]) -> None:
    """Raise when tensors that are owned already would be computed from themselves.

    Raises:
        OwnershipError: one of ``owned`` is a source, or a source of a source.
    """
    targets = {id(entry) for entry in owned}
    due = [entry for source in sources if (entry := ledger.get(source)) is not None]
    seen: set[int] = set()
    while due:
        entry = due.pop()
        if id(entry) in targets:
            raise OwnershipError(
                f"{name!r} would be computed from itself, through {entry.name!r}; take it out of "
                "the sources"
            )
        if id(entry) not in seen:
            seen.add(id(entry))
            due += ledger.sources_of(entry)


def dependants(context: Context, changed: Iterable[Entry]) -> list[Entry]:
    """Every entry computed, directly or not, from the changed ones; sources first."""
    moved = {id(entry) for entry in changed}
    found: list[Entry] = []
    for entry in sources_first(context.ledger):
        if entry.rebuild is not None and any(
            id(source) in moved for source in context.ledger.sources_of(entry)
        ):
            moved.add(id(entry))
            found.append(entry)
    return found


def can_rebuild(context: Context, entry: Entry) -> bool:
    """Whether an entry is mapped and its rebuild has what it needs."""
    return (
        entry.rebuild is not None
        and entry.arena.is_mapped
        and context.ledger.has_valid_sources(entry)
    )


def rebuild_stale(context: Context, before: Callable[[Entry], None] | None = None) -> list[Entry]:
    """Rebuild every stale or invalid entry that can be, sources first.

    An entry whose rebuild fails is invalid afterwards.

    Args:
        before: called with each entry before its bytes change.

    Returns:
        The entries rebuilt; they are valid.

    Raises:
        OwnershipError: a rebuild failed, or returned another shape or dtype.
    """
    rebuilt: list[Entry] = []
    due = [entry for entry in sources_first(context.ledger) if entry.rebuild is not None]
    for entry in due:
        if (entry.stale or not entry.valid) and can_rebuild(context, entry):
            if before is not None:
                before(entry)
            entry.valid = False  # Half a rebuild is not content.
            _run(entry)
            entry.by_hand = False
            entry.stale = False
            entry.valid = True
            rebuilt.append(entry)
    return rebuilt


def follow(
    context: Context, changed: Iterable[Entry], before: Callable[[Entry], None] | None = None
) -> list[Entry]:
    """Rebuild what is computed from changed entries, and whatever else is due.

    What cannot be rebuilt yet, because a source is asleep or invalid, is invalid until it can.

    Args:
        before: called with each entry before it changes.

    Returns:
        The entries rebuilt; their digests are the caller's business.

    Raises:
        OwnershipError: a rebuild failed.
    """
    due = dependants(context, changed)
    for entry in due:
        if before is not None:
            before(entry)
        entry.stale = True
    rebuilt = rebuild_stale(context, before)
    for entry in due:
        if entry.stale:
            # Its old digest and copy are of old sources.
            entry.digest = None
            if entry.arena.is_mapped:
                entry.valid = False
    return rebuilt


def _run(entry: Entry) -> None:
    assert entry.rebuild is not None
    target = entry.tensor()
    if target is None:
        return
    try:
        with torch.no_grad():
            value = entry.rebuild()
    except Exception as error:
        raise OwnershipError(f"the rebuild of {entry.name!r} failed: {error}") from error
    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise OwnershipError(
            f"the rebuild of {entry.name!r} returned a {type(value).__name__}; return a tensor, or "
            "None after writing in place"
        )
    if value.shape != target.shape or value.dtype != target.dtype:
        raise OwnershipError(
            f"the rebuild of {entry.name!r} returned {tuple(value.shape)} {value.dtype}, not "
            f"{tuple(target.shape)} {target.dtype}; return the declared shape and dtype"
        )
    with torch.no_grad():
        target.copy_(value)
