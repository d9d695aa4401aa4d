"""The record of every owned byte, and of every byte that stays resident.

One entry is one torch storage in an arena: however many tensors, ties and views look at it, its
bytes are released, copied, verified and restored once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torpor.errors import OwnershipError
from torpor.sleep.classes import POLICIES, OwnershipClass, Policy
from torpor.sleep.residents import Residents
from torpor.sleep.storage import alive, storage_key, storage_of, weak

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from torpor.sleep.arena import Arena
    from torpor.sleep.device import Range
    from torpor.sleep.host import HostCopy

Rebuild = Callable[[], "torch.Tensor | None"]
"""Recomputes a tensor: writes it in place and returns None, or returns the new value."""


@dataclass(eq=False, slots=True)
class Entry:
    """One owned storage."""

    name: str
    cls: OwnershipClass
    tag: str
    arena: Arena
    offset: int
    nbytes: int
    dtype: torch.dtype
    storage: StorageWeakRef
    aliases: dict[str, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    """Every name of it, each with a way to the tensor object (weak unless declared by hand)."""
    sources: tuple[str, ...] = ()
    """Names of the owned tensors it is computed from."""
    rebuild: Rebuild | None = None
    reset: Callable[[], None] | None = None
    in_checkpoint: bool = False
    """Level 2 discards it and a reload must cover it."""
    digest: str | None = None
    """Local digest of the official content; None while there is none."""
    host: HostCopy | None = None
    valid: bool = True
    """Whether the memory holds official content (only meaningful while mapped)."""
    stale: bool = False
    """A source or an epoch moved since the last rebuild."""
    by_hand: bool = False
    """Derived, but its official content was written outside the door and not by its rebuild."""
    covered: set[str] = field(default_factory=set)
    """Checkpoint names written since the content became invalid."""

    @property
    def policy(self) -> Policy:
        """What sleep and wake do with it."""
        return POLICIES[self.cls]

    @property
    def address(self) -> int:
        """Where its bytes are, for life."""
        return self.arena.address + self.offset

    @property
    def range(self) -> Range:
        """(address, bytes)."""
        return self.address, self.nbytes

    @property
    def is_dirty(self) -> bool:
        """Whether its official content has no host copy."""
        return self.host is None or self.host.digest != self.digest

    @property
    def is_alive(self) -> bool:
        """Whether a tensor still uses the storage, and the storage this slot."""
        storage = alive(self.storage)
        return storage is not None and storage.data_ptr() == self.address

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage lies in this slot."""
        storage = storage_of(tensor)
        return storage is not None and storage.data_ptr() == self.address

    def tensor(self, name: str | None = None) -> torch.Tensor | None:
        """The tensor object of one name (default: the first that is alive)."""
        if name is not None:
            return self.aliases[name]()
        return next(
            (tensor for way in self.aliases.values() if (tensor := way()) is not None), None
        )


class Ledger:
    """All entries, in placement order, and all residents."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._by_key: dict[int, Entry] = {}
        self.residents = Residents()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Entry | None:
        """The entry of a name, or None."""
        return self._by_name.get(name)

    def add(self, entry: Entry) -> None:
        """Record an owned storage.

        Raises:
            OwnershipError: a name is taken.
        """
        for name in entry.aliases:
            if name in self._by_name:
                raise OwnershipError(f"{name!r} is owned already; declare it under another name")
        self._entries.append(entry)
        self._by_name.update(dict.fromkeys(entry.aliases, entry))
        self._by_key[int(entry.storage.cdata)] = entry

    def add_alias(self, entry: Entry, name: str, way: Callable[[], torch.Tensor | None]) -> None:
        """Record a further name of an owned storage.

        Raises:
            OwnershipError: another storage has the name.
        """
        if self._by_name.setdefault(name, entry) is not entry:
            raise OwnershipError(f"{name!r} is owned already; declare it under another name")
        entry.aliases[name] = way

    def drop_alias(self, entry: Entry, name: str) -> None:
        """Forget one name of an owned storage; if others are left, one of them leads."""
        del entry.aliases[name]
        del self._by_name[name]
        if entry.name == name and entry.aliases:
            entry.name = next(iter(entry.aliases))

    def remove(self, gone: Iterable[Entry]) -> None:
        """Forget entries: their tensors are dead, or their bytes left the arena for good."""
        dropped = set(map(id, gone))
        if not dropped:
            return
        self._entries = [entry for entry in self._entries if id(entry) not in dropped]
        self._by_name = {
            name: entry for name, entry in self._by_name.items() if id(entry) not in dropped
        }
        self._by_key = {
            key: entry for key, entry in self._by_key.items() if id(entry) not in dropped
        }

    def of_storage(self, storage: torch.UntypedStorage) -> Entry | None:
        """The entry that owns a storage, or None; None too when its memory was exchanged since."""
        entry = self._by_key.get(storage_key(storage))
        return entry if entry is not None and entry.address == storage.data_ptr() else None

    def sources_of(self, entry: Entry) -> list[Entry]:
        """The owned tensors that one is computed from; a source that has left is not among them."""
        return [source for name in entry.sources if (source := self.get(name)) is not None]

    def has_valid_sources(self, entry: Entry) -> bool:
        """Whether all that an entry is computed from is mapped, valid and up to date."""
        return all(
            source.valid and not source.stale and source.arena.is_mapped
            for source in self.sources_of(entry)
        )

    def in_tags(self, tags: Iterable[str]) -> list[Entry]:
        """Entries of some tags, in placement order."""
        wanted = frozenset(tags)
        return [entry for entry in self._entries if entry.tag in wanted]

    def arenas(self, tags: Iterable[str]) -> list[Arena]:
        """The arenas that hold entries of some tags, each once."""
        return list({id(entry.arena): entry.arena for entry in self.in_tags(tags)}.values())

    def tags(self) -> tuple[str, ...]:
        """Tags that own bytes, in placement order."""
        return tuple(dict.fromkeys(entry.tag for entry in self._entries))

    def bytes_by_class(self, entries: Iterable[Entry]) -> dict[str, int]:
        """Sum of bytes of each ownership class."""
        sums: dict[str, int] = {}
        for entry in entries:
            sums[entry.cls.value] = sums.get(entry.cls.value, 0) + entry.nbytes
        return sums


def weak_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A way to a tensor that does not keep it alive."""
    return weakref.ref(tensor)


def strong_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A way to a tensor that keeps it alive: for tensors that an owner declared by hand."""
    return lambda: tensor


def is_weak(way: Callable[[], torch.Tensor | None]) -> bool:
    """Whether a way was made by ``weak_way``: found in a module or an optimizer, not declared."""
    return isinstance(way, weakref.ref)


def entry_for(
    name: str,
    cls: OwnershipClass,
    tag: str,
    arena: Arena,
    offset: int,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
) -> Entry:
    """An entry without aliases for a storage that lies in an arena slot, or is about to."""
    return Entry(
        name=name,
        cls=cls,
        tag=tag,
        arena=arena,
        offset=offset,
        nbytes=storage.nbytes(),
        dtype=dtype,
        storage=weak(storage),
    )
