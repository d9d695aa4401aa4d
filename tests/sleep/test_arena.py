"""One address range: slots, prefixes, life and death of its memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sleep.samples import DTYPES, ShortDevice, bits, values_of

from torpor.errors import ArenaError, OutOfMemoryError
from torpor.sleep.adopt import tensor_in
from torpor.sleep.arena import SLOT_ALIGNMENT, Arena
from torpor.sleep.cpu import PAGE_BYTES, CpuDevice
from torpor.sleep.procfs import MemoryMap

MIB = 1024 * 1024


def arena_of(nbytes: int, device: CpuDevice | None = None) -> Arena:
    return Arena(device or CpuDevice(), nbytes, "test")


def filled(arena: Arena, count: int) -> torch.Tensor:
    tensor = tensor_in(arena, arena.allocate(count), (count,), torch.uint8)
    return tensor.fill_(7)


def test_the_address_outlives_the_memory() -> None:
    arena = arena_of(MIB)
    arena.map()
    tensor = filled(arena, MIB)
    address = tensor.data_ptr()
    for _ in range(3):
        arena.unmap()
        arena.map()
        assert tensor.data_ptr() == address == arena.address
        assert not tensor.any(), "memory that comes back is fresh"
        tensor.fill_(7)
        assert int(tensor.sum()) == 7 * MIB


def test_memory_is_as_large_as_the_books_say() -> None:
    arena = arena_of(3 * PAGE_BYTES)
    assert (arena.is_mapped, arena.mapped_bytes) == (False, 0)
    arena.map()
    assert (arena.is_mapped, arena.mapped_bytes) == (True, 3 * PAGE_BYTES)
    arena.unmap()
    arena.unmap()
    assert (arena.is_mapped, arena.mapped_bytes, arena.resident_bytes()) == (False, 0, 0)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_every_dtype_and_layout(dtype: torch.dtype) -> None:
    arena = arena_of(MIB)
    arena.map()
    expected = values_of(dtype, 24).reshape(2, 3, 4)
    tensor = tensor_in(arena, arena.allocate(24 * dtype.itemsize), (2, 3, 4), dtype)
    tensor.untyped_storage().copy_(expected.untyped_storage())
    assert tensor.is_contiguous()
    assert bits(tensor) == bits(expected)
    for view in (lambda t: t.transpose(0, 2), lambda t: t[:, 1:, ::2], lambda t: t.reshape(6, 4).T):
        assert bits(view(tensor)) == bits(view(expected))
        assert view(tensor).untyped_storage().data_ptr() == arena.address


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 1)], ids=str)
def test_views_without_or_with_one_element(shape: tuple[int, ...]) -> None:
    arena = arena_of(1)
    arena.map()
    tensor = tensor_in(arena, arena.allocate(1), shape, torch.float32)
    assert tensor.shape == shape
    assert tensor.stride() == torch.empty(shape).stride()


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_slots_are_aligned_and_apart(sizes: list[int]) -> None:
    arena = arena_of(sum(size + SLOT_ALIGNMENT for size in sizes))
    slots = [(arena.allocate(size), size) for size in sizes]
    for (offset, size), (next_offset, _) in zip(
        slots, [*slots[1:], (arena.nbytes, 0)], strict=True
    ):
        assert (arena.address + offset) % SLOT_ALIGNMENT == 0
        assert offset + size <= next_offset


def test_a_full_arena_says_what_is_left_and_changes_nothing() -> None:
    arena = arena_of(PAGE_BYTES)
    arena.allocate(1000)
    with pytest.raises(ArenaError, match=rf"'test' of {PAGE_BYTES} bytes has 3072 left.*3073 more"):
        arena.allocate(3073)
    assert arena.allocate(3072) == 1024


def test_a_prefix_can_be_mapped_and_grown() -> None:
    arena = arena_of(64 * PAGE_BYTES)
    arena.map(10 * PAGE_BYTES)
    first = filled(arena, 10 * PAGE_BYTES)
    assert arena.resident_bytes() == 10 * PAGE_BYTES
    arena.map(20 * PAGE_BYTES - 1)
    assert arena.mapped_bytes == 20 * PAGE_BYTES
    assert int(first.sum()) == 7 * first.numel(), "growing keeps what is there"
    arena.map(5 * PAGE_BYTES)
    assert arena.mapped_bytes == 20 * PAGE_BYTES, "a smaller prefix is there already"
    arena.map(populate=True)
    assert arena.resident_bytes() == 54 * PAGE_BYTES


def test_more_than_the_reservation_cannot_be_mapped() -> None:
    arena = arena_of(PAGE_BYTES)
    with pytest.raises(ArenaError, match=f"spans {PAGE_BYTES} bytes; {2 * PAGE_BYTES} cannot"):
        arena.map(PAGE_BYTES + 1)
    assert not arena.is_mapped


def test_a_shortage_is_typed_and_changes_nothing() -> None:
    device = ShortDevice()
    arena = arena_of(8 * PAGE_BYTES, device)
    arena.map(2 * PAGE_BYTES)
    tensor = filled(arena, 2 * PAGE_BYTES)
    device.available = 6 * PAGE_BYTES - 1
    with pytest.raises(OutOfMemoryError, match=f"{6 * PAGE_BYTES} bytes: {device.available} are"):
        arena.map()
    assert arena.mapped_bytes == 2 * PAGE_BYTES
    assert int(tensor.sum()) == 7 * tensor.numel()
    device.available += 1
    arena.map()
    assert arena.mapped_bytes == arena.nbytes


def mapped(address: int) -> bool:
    return MemoryMap().find(address) is not None


def test_an_arena_lives_as_long_as_any_storage_in_it() -> None:
    arena = arena_of(4 * PAGE_BYTES)
    arena.map()
    address = arena.address
    first, second = filled(arena, 100), filled(arena, 100)
    view = second[10:20]
    del arena, first, second
    gc.collect()
    assert mapped(address)
    assert view.tolist() == [7] * 10
    del view
    assert not mapped(address), "the last storage gives the range back at once"
    assert not mapped(address - PAGE_BYTES), "and its guard pages"


def test_an_arena_without_storages_goes_with_its_last_reference() -> None:
    arena = arena_of(PAGE_BYTES)
    address = arena.address
    assert mapped(address)
    del arena
    assert not mapped(address)


def test_autograd_keeps_an_arena_alive() -> None:
    arena = arena_of(PAGE_BYTES)
    arena.map()
    address = arena.address
    weight = tensor_in(arena, arena.allocate(40), (10,), torch.float32).fill_(3)
    given_x = torch.ones(10, requires_grad=True)
    loss: Any = (given_x * weight).sum()
    del arena, weight
    loss.backward()
    assert given_x.grad is not None
    assert given_x.grad.tolist() == [3.0] * 10
    del loss
    assert not mapped(address)
