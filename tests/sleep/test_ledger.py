"""The record of owned bytes."""

from __future__ import annotations

import pytest
import torch

from torpor.errors import OwnershipError
from torpor.sleep.adopt import tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.cpu import CpuDevice
from torpor.sleep.ledger import Entry, Ledger, entry_for, is_weak, strong_way, weak_way

MIB = 1024 * 1024


@pytest.fixture
def arena() -> Arena:
    arena = Arena(CpuDevice(), MIB, "test")
    arena.map()
    return arena


def owned(
    ledger: Ledger, arena: Arena, *names: str, tag: str = "weights", count: int = 4
) -> tuple[Entry, torch.Tensor]:
    offset = arena.allocate(4 * count)
    tensor = tensor_in(arena, offset, (count,), torch.float32)
    storage = tensor.untyped_storage()
    entry = entry_for(names[0], OwnershipClass.BUFFER, tag, arena, offset, storage, torch.float32)
    entry.aliases = {name: weak_way(tensor) for name in names}
    ledger.add(entry)
    return entry, tensor


def test_entries_are_found_by_every_name_and_by_their_storage(arena: Arena) -> None:
    ledger = Ledger()
    entry, tensor = owned(ledger, arena, "a", "b")
    other, _kept = owned(ledger, arena, "c", tag="kv_cache")
    assert ledger["a"] is ledger["b"] is ledger.of_storage(tensor[1:].untyped_storage()) is entry
    assert list(ledger) == [entry, other]
    assert ledger.get("x") is None
    assert ledger.of_storage(torch.ones(1).untyped_storage()) is None
    assert ledger.in_tags(["kv_cache"]) == [other]
    assert ledger.tags() == ("weights", "kv_cache")
    assert ledger.arenas(["weights", "kv_cache"]) == [arena]
    assert ledger.bytes_by_class(ledger) == {"buffer": 32}


def test_a_name_has_one_owner(arena: Arena) -> None:
    ledger = Ledger()
    entry, _tensor = owned(ledger, arena, "a")
    with pytest.raises(OwnershipError, match="'a' is owned already; declare it under another"):
        owned(ledger, arena, "b", "a")
    assert list(ledger) == [entry]
    assert "b" not in ledger
    other, tensor = owned(ledger, arena, "c")
    with pytest.raises(OwnershipError, match="'a' is owned already"):
        ledger.add_alias(other, "a", weak_way(tensor))
    ledger.add_alias(other, "d", weak_way(tensor))
    assert ledger["d"].tensor("d") is tensor


def test_dropping_the_leading_name_hands_the_lead_on(arena: Arena) -> None:
    ledger = Ledger()
    entry, tensor = owned(ledger, arena, "a", "b")
    ledger.drop_alias(entry, "a")
    assert entry.name == "b"
    assert "a" not in ledger
    assert entry.tensor() is tensor


def test_removed_entries_are_forgotten_under_every_name(arena: Arena) -> None:
    ledger = Ledger()
    entry, tensor = owned(ledger, arena, "a", "b")
    other, _kept = owned(ledger, arena, "c")
    ledger.remove([entry])
    assert list(ledger) == [other]
    assert "a" not in ledger
    assert "b" not in ledger
    assert ledger.of_storage(tensor.untyped_storage()) is None


def test_entries_do_not_keep_tensors_alive(arena: Arena) -> None:
    ledger = Ledger()
    entry, tensor = owned(ledger, arena, "a")
    assert entry.is_alive
    del tensor
    assert not entry.is_alive
    assert entry.tensor() is None


def test_an_entry_whose_storage_got_other_memory_owns_it_no_more(arena: Arena) -> None:
    ledger = Ledger()
    entry, tensor = owned(ledger, arena, "a")
    tensor.share_memory_()
    assert not entry.is_alive
    assert ledger.of_storage(tensor.untyped_storage()) is None


def test_declared_ways_keep_their_tensor(arena: Arena) -> None:
    tensor = torch.ones(3)
    weak, strong = weak_way(tensor), strong_way(tensor)
    assert (is_weak(weak), is_weak(strong)) == (True, False)
    del tensor
    kept = strong()
    assert kept is not None
    assert kept.tolist() == [1, 1, 1]
    assert weak() is kept
    del kept, strong
    assert weak() is None


def test_sources_that_have_left_are_not_waited_for(arena: Arena) -> None:
    ledger = Ledger()
    entry, _a = owned(ledger, arena, "a")
    other, _b = owned(ledger, arena, "b")
    other.sources = ("a", "gone")
    assert ledger.sources_of(other) == [entry]
