"""Noticing tensors that left their slot: ``.to()``, ``assign=True``, a replaced parameter.

What has left is resident from then on and reported by name; its bytes are never counted as freed.
If somebody still holds the old tensor, its bytes stay owned, as a buffer, so that they survive too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torpor.sleep.classes import OwnershipClass
from torpor.sleep.ledger import Resident
from torpor.sleep.storage import nbytes_of

if TYPE_CHECKING:
    import torch

    from torpor.sleep.ledger import Entry, Ledger
    from torpor.sleep.walk import Found


def notice_escapes(ledger: Ledger, found: Iterable[Found]) -> tuple[str, ...]:
    """Compare every name with its slot and bring the ledger up to date.

    Returns:
        Names that have left since the last look.
    """
    escaped = [
        item
        for item in found
        if (entry := ledger.get(item.name)) is not None and not _in_slot(entry, item.tensor)
    ]
    for item in escaped:
        entry = ledger[item.name]
        ledger.drop_alias(entry, item.name)
        reason = "left its memory after adoption (moved or replaced)"
        ledger.residents[item.name] = Resident(item.name, nbytes_of(item.tensor), reason)
        if not entry.aliases:
            _keep_for_others(ledger, entry, item.name)
    ledger.remove([entry for entry in ledger if not entry.is_alive])
    return tuple(item.name for item in escaped)


def _in_slot(entry: Entry, tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return storage.device.type == entry.arena.device.torch_device.type and (
        storage.data_ptr() == entry.address
    )


def _keep_for_others(ledger: Ledger, entry: Entry, name: str) -> None:
    entry.cls = OwnershipClass.BUFFER
    entry.in_checkpoint = False
    entry.name = f"{name} (replaced)"
    ledger.add_alias(entry, entry.name, lambda: None)
