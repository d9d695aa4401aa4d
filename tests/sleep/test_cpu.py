"""The CPU as a device: pages that go away, faults instead of zeros, honest counts."""

from __future__ import annotations

import ctypes
import errno
import signal
from typing import Any

import pytest
import torch
from tests.sleep.conftest import FreshProcess
from tests.sleep.samples import ShortDevice

from torpor.errors import ArenaError, OutOfMemoryError
from torpor.sleep.adopt import tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.cpu import HUGE_PAGE_BYTES, PAGE_BYTES, CpuDevice
from torpor.sleep.digest import local_digest
from torpor.sleep.procfs import MemoryMap, process_rss_bytes, rss_of_ranges

MIB = 1024 * 1024


def mapped_arena(nbytes: int, device: CpuDevice | None = None, **options: Any) -> Arena:
    arena = Arena(device or CpuDevice(), nbytes, "test")
    arena.map(**options)
    return arena


def bytes_in(arena: Arena, nbytes: int) -> torch.Tensor:
    return tensor_in(arena, arena.allocate(nbytes), (nbytes,), torch.uint8)


def test_released_memory_really_leaves_the_process() -> None:
    arena = mapped_arena(64 * MIB)
    bytes_in(arena, 64 * MIB).fill_(1)
    before = process_rss_bytes()
    assert arena.resident_bytes() == rss_of_ranges([arena.range]) == 64 * MIB
    arena.unmap()
    assert arena.resident_bytes() == rss_of_ranges([arena.range]) == 0
    assert before - process_rss_bytes() >= 0.95 * 64 * MIB


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, 3 * MIB + PAGE_BYTES, 4 * MIB, 7 * MIB + 5])
def test_the_count_of_resident_bytes_agrees_with_the_kernel(nbytes: int) -> None:
    arena = mapped_arena(nbytes)
    tensor = bytes_in(arena, nbytes)
    for part in (1, nbytes // 3, nbytes):
        tensor[:part].fill_(1)
        assert arena.resident_bytes() == rss_of_ranges([arena.range]) >= part
    arena.unmap()
    assert arena.resident_bytes() == rss_of_ranges([arena.range]) == 0


def test_neighbours_are_counted_apart() -> None:
    device = CpuDevice()
    arenas = [mapped_arena(8 * PAGE_BYTES, device, populate=True) for _ in range(6)]
    arenas[2].unmap()
    counts = [rss_of_ranges([arena.range]) for arena in arenas]
    assert counts == [0 if index == 2 else 8 * PAGE_BYTES for index in range(6)]
    assert device.resident_bytes([arena.range for arena in arenas]) == 40 * PAGE_BYTES


def test_populating_acquires_every_page_now() -> None:
    device = CpuDevice()
    lazy, eager = mapped_arena(MIB, device), mapped_arena(MIB, device, populate=True)
    assert (lazy.resident_bytes(), eager.resident_bytes()) == (0, MIB)


def test_ranges_ask_for_huge_pages_and_keep_an_exact_tail() -> None:
    arena = Arena(CpuDevice(), 2 * HUGE_PAGE_BYTES + 1, "test")
    assert arena.address % HUGE_PAGE_BYTES == 0
    assert arena.nbytes == 2 * HUGE_PAGE_BYTES + PAGE_BYTES


TOUCH = """
import ctypes, sys
from torpor.sleep.arena import Arena
from torpor.sleep.cpu import PAGE_BYTES, CpuDevice

arena = Arena(CpuDevice(), 8 * PAGE_BYTES, "test")
arena.map(4 * PAGE_BYTES)
ctypes.memset(arena.address, 1, 4 * PAGE_BYTES)
where, how = sys.argv[1:]
if where == "released":
    arena.unmap()
offset = {"inside": 0, "released": 0, "beyond": 4, "before": -1, "after": 8}[where]
address = arena.address + offset * PAGE_BYTES
if how == "read":
    print(ctypes.string_at(address, 1))
else:
    print(ctypes.memset(address, 2, 1) == address)
"""


@pytest.mark.parametrize(
    ("where", "how", "code"),
    [
        ("inside", "read", 0),
        ("released", "read", -signal.SIGSEGV),
        ("released", "write", -signal.SIGSEGV),
        ("beyond", "read", -signal.SIGSEGV),
        ("before", "write", -signal.SIGSEGV),
        ("after", "write", -signal.SIGSEGV),
    ],
)
def test_a_stray_touch_is_a_fault(
    where: str, how: str, code: int, fresh_process: FreshProcess
) -> None:
    assert fresh_process(TOUCH, where, how).returncode == code


STRAY_TENSOR = """
import torch
from torch import nn
from torpor.sleep.sleeper import Sleeper

module = nn.Linear(64, 64)
weight = module.weight.detach()
sleeper = Sleeper(module)
print(float(weight.sum()) == float(module.weight.sum()), flush=True)
sleeper.sleep()
print(weight.sum())
"""


def test_a_tensor_kept_from_before_faults_while_asleep(fresh_process: FreshProcess) -> None:
    done = fresh_process(STRAY_TENSOR)
    assert (done.stdout, done.returncode) == ("True\n", -signal.SIGSEGV)


def test_memory_comes_back_as_zeros() -> None:
    device = CpuDevice()
    assert device.fresh_memory_is_zero
    arena = mapped_arena(3 * MIB, device)
    device.fill(arena.address, arena.nbytes, 0xAB)
    arena.unmap()
    arena.map()
    assert not any(bytes(device.host_view(arena.address, arena.nbytes)))


def test_bytes_move_and_are_fingerprinted() -> None:
    device = CpuDevice()
    arena = mapped_arena(2 * PAGE_BYTES, device)
    half = arena.address + PAGE_BYTES
    content = bytes(range(256)) * (PAGE_BYTES // 256)
    ctypes.memmove(arena.address, content, PAGE_BYTES)
    device.move(half, arena.address, PAGE_BYTES)
    target = bytearray(PAGE_BYTES)
    device.copy_out(half, PAGE_BYTES, memoryview(target))
    assert target == content
    device.fill(half, 16, 9)
    digests = device.fingerprint([(arena.address, PAGE_BYTES), (half, PAGE_BYTES), (half, 16)])
    assert digests == [
        local_digest(content),
        local_digest(b"\t" * 16 + content[16:]),
        local_digest(b"\t" * 16),
    ]


class RefusingLibrary:
    """The C library, less one advice or call that the kernel refuses."""

    def __init__(self, real: Any, name: str, advice: int | None, number: int) -> None:
        self._real, self._name, self._advice, self._number = real, name, advice, number

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name != self._name:
            return function

        def refuse(*arguments: int) -> int:
            if self._advice is not None and arguments[2] != self._advice:
                return int(function(*arguments))
            ctypes.set_errno(self._number)
            return -1

        return refuse


def refuse(device: CpuDevice, name: str, advice: int | None, number: int) -> None:
    device._libc = RefusingLibrary(device._libc, name, advice, number)  # type: ignore[assignment]


MADV_POPULATE_WRITE = 23


def test_a_shortage_while_populating_leaves_nothing_mapped(fresh_process: FreshProcess) -> None:
    device = CpuDevice()
    arena = Arena(device, MIB, "test")
    refuse(device, "madvise", MADV_POPULATE_WRITE, errno.ENOMEM)
    with pytest.raises(OutOfMemoryError, match=f"populate {MIB} bytes: Cannot allocate memory"):
        arena.map(populate=True)
    assert not arena.is_mapped
    mapping = MemoryMap().find(arena.address)
    assert mapping is not None
    assert mapping.permissions == "---p", "a touch is still a fault"


def test_kernels_without_populate_fill_pages_on_first_touch() -> None:
    device = CpuDevice()
    arena = Arena(device, MIB, "test")
    refuse(device, "madvise", MADV_POPULATE_WRITE, errno.EINVAL)
    arena.map(populate=True)
    bytes_in(arena, MIB).fill_(1)
    assert arena.resident_bytes() == MIB


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [("mprotect", errno.EACCES, "cannot protect"), ("madvise", errno.EIO, "cannot release")],
)
def test_a_refused_release_is_typed(name: str, number: int, message: str) -> None:
    device = CpuDevice()
    arena = mapped_arena(PAGE_BYTES, device)
    refuse(device, name, None, number)
    with pytest.raises(ArenaError, match=f"{message} {PAGE_BYTES} bytes: "):
        arena.unmap()


def test_an_impossible_reservation_is_typed() -> None:
    with pytest.raises(ArenaError, match=r"cannot reserve \d+ bytes of address space: Cannot"):
        Arena(CpuDevice(), 1 << 60, "test")


def test_a_shortage_names_what_is_needed_and_what_there_is() -> None:
    device = ShortDevice(available=PAGE_BYTES)
    with pytest.raises(OutOfMemoryError, match=f"cannot map {MIB} bytes: {PAGE_BYTES} are avail"):
        mapped_arena(MIB, device)


AT_EXIT = """
import sys
import threading
import torch
from torch import nn
from torpor.sleep.adopt import tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.cpu import CpuDevice
from torpor.sleep.sleeper import Sleeper

module = nn.Sequential(nn.Linear(32, 32), nn.LSTM(32, 32))
sleeper = Sleeper(module)
cache = sleeper.allocate((100,), torch.float32, name="cache", cls=OwnershipClass.CACHE)
module.itself = [module, cache]
graph = module[0](torch.ones(1, 32)).sum()
loose = Arena(CpuDevice(), 4096, "loose")
loose.map()
torch.kept = kept = tensor_in(loose, loose.allocate(64), (16,), torch.float32)
if sys.argv[1] == "asleep":
    sleeper.sleep()
else:
    threading.Thread(target=lambda: graph.backward()).start()
print("end")
"""


@pytest.mark.parametrize("state", ["awake", "asleep"])
def test_the_interpreter_exits_cleanly(state: str, fresh_process: FreshProcess) -> None:
    done = fresh_process(AT_EXIT, state)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
