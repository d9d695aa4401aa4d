"""Rebuilding what is computed from other owned tensors: derived weights, and refills of caches.

A rebuild runs when every source is mapped and valid, sources before dependants, in place: the
address that a graph or a peer has seen never changes. The ledger lists sources before what is
declared on them, so its order is already a topological one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from torpor.errors import OwnershipError

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry


def dependants(context: Context, changed: Iterable[Entry]) -> list[Entry]:
    """Every entry computed, directly or not, from the changed ones; sources first."""
    moved = {id(entry) for entry in changed}
    found: list[Entry] = []
    for entry in context.ledger:
        sources = (context.ledger[name] for name in entry.sources)
        if entry.rebuild is not None and any(id(source) in moved for source in sources):
            moved.add(id(entry))
            found.append(entry)
    return found


def can_rebuild(context: Context, entry: Entry) -> bool:
    """Whether the entry and all its sources are mapped, and the sources valid."""
    if entry.rebuild is None or not entry.arena.is_mapped:
        return False
    sources = [context.ledger[name] for name in entry.sources]
    return all(source.valid and source.arena.is_mapped for source in sources)


def rebuild_stale(context: Context, before: Callable[[Entry], None] | None = None) -> list[Entry]:
    """Rebuild every stale or invalid entry that can be, sources first.

    Args:
        before: called with each entry before its bytes change.

    Returns:
        The entries rebuilt; they are valid.

    Raises:
        OwnershipError: a rebuild failed, or returned another shape or dtype.
    """
    rebuilt: list[Entry] = []
    for entry in context.ledger:
        if entry.rebuild is None or not (entry.stale or not entry.valid):
            continue
        if can_rebuild(context, entry):
            if before is not None:
                before(entry)
            _run(entry)
            entry.valid = True
            entry.stale = False
            rebuilt.append(entry)
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
    if value.shape != target.shape or value.dtype != target.dtype:
        raise OwnershipError(
            f"the rebuild of {entry.name!r} returned {tuple(value.shape)} {value.dtype}, not "
            f"{tuple(target.shape)} {target.dtype}; return the declared shape and dtype"
        )
    with torch.no_grad():
        target.copy_(value)
