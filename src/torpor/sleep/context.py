"""What the door and both transitions work on: one sleeper's parts, and its epochs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torpor.sleep.coverage import gaps
from torpor.sleep.ledger import Entry, Ledger
from torpor.sleep.states import StateMachine, TagState

if TYPE_CHECKING:
    from torpor.sleep.device import Device
    from torpor.sleep.host import HostStore
    from torpor.sleep.poison import Poison
    from torpor.sleep.source import SliceTable, WeightSlice, WeightSource


@dataclass(slots=True)
class Epochs:
    """Numbers that grow when content changes or a cache is dropped."""

    weights: int = 0
    kv: int = 0
    version: str | None = None
    """The caller's own name of the current weights."""
    from_checkpoint: bool = False
    """Whether the reload source holds the content of the current weights epoch."""


@dataclass(slots=True)
class Context:
    """The parts of one sleeper."""

    device: Device
    ledger: Ledger
    store: HostStore
    slices: SliceTable
    reload: WeightSource | None
    poison: Poison | None
    on_foreign_write: str
    host_copy: str
    check_nan: bool
    machine: StateMachine = field(default_factory=StateMachine)
    epochs: Epochs = field(default_factory=Epochs)
    released: dict[str, int] = field(default_factory=dict)
    """Level at which each sleeping tag was released. Replaced whole: that is the commit."""

    def tag_state(self, tag: str) -> TagState:
        """What a caller may expect of one tag's memory."""
        if tag in self.released:
            return TagState.RELEASED
        if all(entry.valid for entry in self.ledger.in_tags([tag])):
            return TagState.RESIDENT
        return TagState.MAPPED_INVALID

    def slices_of(self, entry: Entry) -> tuple[WeightSlice, ...]:
        """The checkpoint names that fill an entry, in row order; of tied names the first known."""
        by_parameter = self.slices.by_parameter()
        return next((by_parameter[name] for name in entry.aliases if name in by_parameter), ())

    def missing(self, tags: Iterable[str]) -> list[str]:
        """Names without valid content: those of the checkpoint that were not written yet, where it
        has any for a tensor, else owned names. Of what is asleep, those that a wake cannot restore.

        Tensors that a rebuild fills once their sources are there are not listed: see ``waiting``.
        """
        return [
            name
            for entry in self.ledger.in_tags(tags)
            if self._is_lost(entry)
            for name in gaps(self.slices, entry) or [entry.name]
        ]

    def waiting(self, tags: Iterable[str]) -> list[str]:
        """Owned names whose content comes by itself once what they are computed from is there."""
        return [
            entry.name
            for entry in self.ledger.in_tags(tags)
            if entry.arena.is_mapped and not entry.valid and self._waits_for_sources(entry)
        ]

    def _is_lost(self, entry: Entry) -> bool:
        if entry.arena.is_mapped:
            return not entry.valid and not self._waits_for_sources(entry)
        return entry.policy.verified and entry.rebuild is None and entry.is_dirty

    def _waits_for_sources(self, entry: Entry) -> bool:
        return entry.rebuild is not None and not self.ledger.has_valid_sources(entry)
