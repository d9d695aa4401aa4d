"""Noticing tensors that left their slot: ``.to()``, ``assign=True``, a replaced parameter.

What has left is resident from then on and reported by name; its bytes are never counted as freed.
If somebody still holds the old tensor, its bytes stay owned, as a buffer, so that they survive too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torpor.sleep.classes import OwnershipClass
from torpor.sleep.derive import dependants, rebuild_stale
from torpor.sleep.ledger import is_weak, weak_way
from torpor.sleep.status import take_digests
from torpor.sleep.storage import storage_of

if TYPE_CHECKING:
    import torch

    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry, Ledger
    from torpor.sleep.walk import Found

LEFT = "left its memory after adoption (moved or replaced); adopt() it again"
NEW = "made after adoption; adopt() it"


def notice_escapes(
    context: Context, found: Collection[Found], *, optimizer: bool
) -> tuple[str, ...]:
    """Compare every name with its slot and bring the ledger up to date.

    Tensors computed from one that was replaced are rebuilt, and ``weights_epoch`` moves.

    Args:
        found: everything the modules hold now; with ``optimizer`` also what the optimizers hold.

    Returns:
        Names of module tensors that have left owned memory since the last look.
    """
    ledger = context.ledger
    left = [item for item in found if _has_left(ledger, item)]
    for item in left:
        _take_away(ledger, ledger[item.name], item.name)
    for item in left:
        _put_where_it_is(ledger, item)
    _drop_vanished(ledger, {item.name for item in found}, optimizer=optimizer)
    ledger.remove([entry for entry in ledger if not entry.is_alive])
    for item in found:
        _note_newcomer(ledger, item)
    # Gradients and optimizer state come and go with every step; that is no escape.
    names = [item.name for item in left if item.tag != "optimizer"]
    if names:
        context.epochs.weights += 1
        rebuild_dependants(context, frozenset(names))
    return tuple(name for name in names if name not in ledger)


def _has_left(ledger: Ledger, item: Found) -> bool:
    entry = ledger.get(item.name)
    return entry is not None and not entry.holds(item.tensor)


def _take_away(ledger: Ledger, entry: Entry, name: str) -> None:
    """Take a name from an entry; without any name left its bytes are kept for who holds them."""
    way = entry.aliases[name]
    ledger.drop_alias(entry, name)
    if entry.aliases or not entry.is_alive:
        return
    kept, number = f"{name} (replaced)", 2
    while kept in ledger:
        kept, number = f"{name} (replaced {number})", number + 1
    entry.cls = OwnershipClass.BUFFER
    entry.in_checkpoint = False
    entry.sources, entry.rebuild, entry.stale = (), None, False
    entry.name = kept
    ledger.add_alias(entry, kept, lambda: _if_held(entry, way()))


def _if_held(entry: Entry, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is not None and entry.holds(tensor) else None


def _put_where_it_is(ledger: Ledger, item: Found) -> None:
    """Give a name that has left to the entry whose bytes it uses now, or note it as resident."""
    storage = storage_of(item.tensor)
    entry = None if storage is None else ledger.of_storage(storage)
    if entry is None:
        ledger.residents.note(item.name, item.tensor, LEFT)
    else:
        ledger.add_alias(entry, item.name, weak_way(item.tensor))


def _drop_vanished(ledger: Ledger, names: Collection[str], *, optimizer: bool) -> None:
    """Take away names that no module has any more; declared names are their owner's."""
    for entry in list(ledger):
        if entry.tag == "optimizer" and not optimizer:
            continue
        gone = [name for name, way in entry.aliases.items() if is_weak(way) and name not in names]
        for name in gone:
            _take_away(ledger, entry, name)


def _note_newcomer(ledger: Ledger, item: Found) -> None:
    if item.name in ledger or item.tag == "optimizer":
        return
    storage = storage_of(item.tensor)
    if storage is not None and (storage.nbytes() == 0 or ledger.of_storage(storage) is not None):
        return
    if ledger.residents.reason(item.tensor) is None:
        ledger.residents.note(item.name, item.tensor, NEW)


def rebuild_dependants(context: Context, names: Collection[str]) -> None:
    """Rebuild what is computed from tensors of these names, which are others than before.

    Raises:
        OwnershipError: a rebuild failed.
    """
    direct = [
        entry
        for entry in context.ledger
        if entry.rebuild is not None and any(source in names for source in entry.sources)
    ]
    for entry in [*direct, *dependants(context, direct)]:
        entry.stale = True
        if not entry.arena.is_mapped:
            entry.digest = None  # What its host copy holds is not official any more.
    take_digests(context, rebuild_stale(context))
