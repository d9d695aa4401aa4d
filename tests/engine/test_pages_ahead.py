"""Pages of the cache are touched ahead of their use, and never come back after a release."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor import LLM
from torpor.engine import loading
from torpor.engine.args import EngineOptions
from torpor.engine.steps import pages_ahead as pages_ahead_module
from torpor.engine.steps.pages_ahead import CHUNK_BYTES, MOST_BYTES, PagesAhead
from torpor.errors import OutOfMemoryError
from torpor.sleep.adopt import tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.cpu import HUGE_PAGE_BYTES, CpuDevice

MIB = 1 << 20
SIZE = 256 * MIB


class Touched:
    """Remembers what it is asked for; refuses from a number of bytes on."""

    def __init__(self, most: int = SIZE) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.most = most
        self.kv = torch.empty(SIZE, dtype=torch.uint8)  # no page of it is used

    def __call__(self, address: int, nbytes: int) -> bool:
        self.ranges.append((address - self.kv.data_ptr(), nbytes))
        return sum(size for _, size in self.ranges) <= self.most

    @property
    def bounds(self) -> tuple[int, int]:
        """The one range that they all make."""
        ends = [start + nbytes for start, nbytes in self.ranges]
        starts = [start for start, _ in self.ranges]
        assert starts[1:] == ends[:-1], "chunk after chunk"
        return starts[0], ends[-1]


def finish() -> None:
    """Wait for the threads that touch."""
    for thread in threading.enumerate():
        if thread.name == "torpor-pages":
            thread.join()


def test_as_much_again_as_is_in_use_is_touched() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.reach(10 * MIB, 0)
    finish()
    assert touched.bounds == (10 * MIB, 20 * MIB)
    pages.reach(16 * MIB, 0)
    finish()
    assert touched.bounds == (10 * MIB, 32 * MIB)
    assert max(nbytes for _, nbytes in touched.ranges) == CHUNK_BYTES


def test_little_use_touches_nothing() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.reach(CHUNK_BYTES - 1, 0)
    finish()
    assert not touched.ranges


def test_ranges_begin_at_the_border_of_a_page() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.reach(9 * MIB + 12_345, 0)
    finish()
    assert touched.bounds[0] == 10 * MIB
    assert touched.bounds[0] % HUGE_PAGE_BYTES == 0


def test_it_goes_so_far_and_not_beyond_the_end() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.reach(100 * MIB, 0)
    finish()
    assert touched.bounds == (100 * MIB, 100 * MIB + MOST_BYTES)
    pages.reach(250 * MIB, 0)
    finish()
    assert touched.ranges[-1][0] + touched.ranges[-1][1] == SIZE
    before = len(touched.ranges)
    pages.reach(SIZE, 0)
    finish()
    assert len(touched.ranges) == before


def test_memory_that_came_anew_is_touched_anew() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.reach(10 * MIB, 0)
    finish()
    touched.ranges.clear()
    pages.reach(10 * MIB, 1)
    finish()
    assert touched.bounds == (10 * MIB, 20 * MIB)


def test_a_system_that_refuses_is_asked_no_more_until_more_is_used() -> None:
    touched = Touched(most=0)
    pages = PagesAhead(touched.kv, touched)
    pages.reach(32 * MIB, 0)
    finish()
    assert len(touched.ranges) == 1
    pages.reach(32 * MIB + 1024, 0)
    finish()
    assert len(touched.ranges) == 1


def test_a_cache_that_lies_elsewhere_now_is_left_alone() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    touched.kv.set_(torch.empty(SIZE, dtype=torch.uint8).untyped_storage(), 0, (SIZE,))  # type: ignore[call-overload]
    pages.reach(32 * MIB, 0)
    finish()
    assert not touched.ranges


def test_a_cache_that_nobody_uses_goes_while_it_is_touched() -> None:
    entered, go_on = threading.Event(), threading.Event()
    counted = []

    def touch(address: int, nbytes: int) -> bool:
        counted.append(nbytes)
        entered.set()
        return go_on.wait(timeout=30)

    pages = PagesAhead(torch.empty(SIZE, dtype=torch.uint8), touch)
    pages.reach(64 * MIB, 0)
    assert entered.wait(timeout=30)
    del pages
    gc.collect()
    go_on.set()
    finish()
    assert counted == [CHUNK_BYTES]


def test_all_is_touched_at_once_and_never_again() -> None:
    touched = Touched()
    pages = PagesAhead(touched.kv, touched)
    pages.take_all(0, threads=3)
    assert sorted(touched.ranges) == [
        (start, MOST_BYTES) for start in range(0, SIZE, MOST_BYTES)
    ], "each byte once"
    pages.reach(10 * MIB, 0)
    finish()
    assert len(touched.ranges) == SIZE // MOST_BYTES
    pages.reach(10 * MIB, 1)
    finish()
    assert len(touched.ranges) > SIZE // MOST_BYTES, "memory that came anew"


def test_where_not_all_can_be_touched_the_rest_comes_ahead() -> None:
    touched = Touched(most=SIZE - 1)
    pages = PagesAhead(touched.kv, touched)
    pages.take_all(0, threads=1)
    touched.ranges.clear()
    pages.reach(10 * MIB, 0)
    finish()
    assert touched.bounds == (10 * MIB, 20 * MIB)


NBYTES = 16 * MIB


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"prefault_kv_cache": True}, True),
        ({"kv_cache_memory_bytes": NBYTES}, True),
        ({"kv_cache_memory_bytes": NBYTES, "prefault_kv_cache": False}, False),
    ],
    ids=["default", "asked", "sized", "sized and refused"],
)
def test_a_cache_of_a_given_size_has_its_memory_when_the_model_is_loaded(
    tiny_folder: Path, options: EngineOptions, expected: bool
) -> None:
    with LLM(tiny_folder, poison=False, **options) as llm:
        assert _has_all_its_pages(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert not _has_all_its_pages(llm), "after a wake it fills again"
        assert llm.generate([[1, 2, 3]])[0].outputs[0].token_ids


def test_a_cache_that_there_is_no_memory_for_is_not_touched(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []
    taken = {"kv_cache_memory_bytes": NBYTES, "poison": False}

    def less_than_it_was(device: CpuDevice) -> int:
        return NBYTES // 2

    def touch(device: CpuDevice, address: int, nbytes: int) -> bool:
        touched.append(nbytes)
        return True

    original = pages_ahead_module.pages_ahead

    def late(*args: Any, **options: Any) -> Any:
        # Whoever else takes memory does so after the cache has its addresses.
        monkeypatch.setattr(CpuDevice, "available_bytes", less_than_it_was)
        return original(*args, **options)

    monkeypatch.setattr(CpuDevice, "touch", touch)
    monkeypatch.setattr(loading, "pages_ahead", late)
    with pytest.raises(OutOfMemoryError, match=r"prefault_kv_cache=False$"):
        LLM(tiny_folder, **taken)
    assert not touched


def _has_all_its_pages(llm: LLM) -> bool:
    kv = llm.core._runner._clear.__self__.kv  # type: ignore[attr-defined]
    resident = CpuDevice().resident_bytes([(kv.data_ptr(), kv.nbytes)])
    return resident >= kv.nbytes


def test_touching_keeps_content_and_brings_pages() -> None:
    device = CpuDevice()
    arena = Arena(device, 32 * MIB, "test")
    arena.map()
    device.fill(arena.address, MIB, 7)
    before = arena.resident_bytes()
    assert device.touch(arena.address, 32 * MIB)
    assert before < arena.resident_bytes() == 32 * MIB
    assert bytes(device.host_view(arena.address, MIB)) == bytes([7]) * MIB


def test_a_release_while_pages_are_touched_leaves_none() -> None:
    device = CpuDevice()
    arena = Arena(device, 64 * MIB, "test")
    arena.map()
    kv = tensor_in(arena, arena.allocate(64 * MIB), (64 * MIB,), torch.uint8)
    pages = PagesAhead(kv, device.touch)
    pages.reach(32 * MIB, 0)
    arena.unmap()
    finish()
    assert arena.resident_bytes() == 0


@pytest.mark.parametrize("name", ["madvise", "mprotect"])
def test_a_touch_in_the_middle_of_a_release_brings_nothing_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice()
    arena = Arena(device, MIB, "test")
    arena.map()
    libc = device._libc
    original = getattr(libc, name)
    touched = []

    def call_and_touch(address: int, nbytes: int, how: int) -> int:
        result: int = original(address, nbytes, how)
        if not touched:
            touched.append(True)
            device.touch(arena.address, MIB)
        return result

    monkeypatch.setattr(libc, name, call_and_touch)
    arena.unmap()
    assert touched
    assert arena.resident_bytes() == 0
