"""What sleep cannot release: each tensor that stays in memory, and why.

A storage stands here once, however many names lead to it, and only while a tensor uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.sleep.storage import alive, nbytes_of, storage_key, storage_of, weak

if TYPE_CHECKING:
    import torch

Key = tuple[str, int]

UNDECLARED = "no owner declared it"
DECLARED_RUNTIME = "declared runtime"
DECLARED_SYNC = "declared sync without a reset"
DECLARED = frozenset({DECLARED_RUNTIME, DECLARED_SYNC})
"""Reasons that an owner gave; such a tensor is never adopted."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that sleep cannot release, and why."""

    name: str
    nbytes: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"name": self.name, "resident_bytes": self.nbytes, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class _Record:
    resident: Resident
    is_alive: Callable[[], bool]
    """Holds a weak reference, which also keeps the key from being given to something else."""


class Residents:
    """All residents, in the order they were noted."""

    def __init__(self) -> None:
        self._records: dict[Key, _Record] = {}

    def __iter__(self) -> Iterator[Resident]:
        self._records = {key: item for key, item in self._records.items() if item.is_alive()}
        return iter([item.resident for item in self._records.values()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def nbytes(self) -> int:
        """Sum of their bytes."""
        return sum(resident.nbytes for resident in self)

    def names(self) -> list[str]:
        """Their names."""
        return [resident.name for resident in self]

    def note(self, name: str, tensor: torch.Tensor, reason: str) -> None:
        """Record a tensor; a later reason for the same storage replaces the earlier one."""
        storage = storage_of(tensor)
        nbytes = nbytes_of(tensor) if storage is None else storage.nbytes()
        key = _key(tensor)
        known = self._records.get(key)
        if known is None or known.resident.reason != reason or not known.is_alive():
            self._records[key] = _Record(Resident(name, nbytes, reason), _watch(tensor))

    def reason(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor stays, or None when it is not on record."""
        known = self._records.get(_key(tensor))
        return known.resident.reason if known is not None and known.is_alive() else None

    def forget(self, tensor: torch.Tensor) -> None:
        """Take a tensor off the record, under whatever name it stands there."""
        self._records.pop(_key(tensor), None)

    def forget_reason(self, reason: str) -> None:
        """Take everything off the record that stands there for one reason."""
        self._records = {
            key: item for key, item in self._records.items() if item.resident.reason != reason
        }


def _key(tensor: torch.Tensor) -> Key:
    storage = storage_of(tensor)
    return ("tensor", id(tensor)) if storage is None else ("storage", storage_key(storage))


def _watch(tensor: torch.Tensor) -> Callable[[], bool]:
    storage = storage_of(tensor)
    if storage is None:
        to_tensor = weakref.ref(tensor)
        return lambda: to_tensor() is not None
    to_storage = weak(storage)
    return lambda: alive(to_storage) is not None
