from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from ctypes import CDLL, addressof, c_char, c_int, c_size_t, c_void_p, memset, sizeof
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torpor.errors import ArenaError, ArgumentError
from torpor.sleep.procfs import (
    MemoryMap,
    available_memory_bytes,
    file_mapped,
    process_rss_bytes,
    rss_of_ranges,
)

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fake_proc(folder: Path, *, available_kib: int = 1000, cgroup: str = "") -> Path:
    write(folder / "meminfo", f"MemTotal: 9999 kB\nMemAvailable:   {available_kib} kB\n")
    write(folder / "self/cgroup", cgroup)
    return folder


def fake_v2_group(folder: Path, limit: str, current: int, inactive_file: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{current}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_anon 7\ninactive_file {inactive_file}\n")


@pytest.fixture
def guarded() -> Iterator[tuple[int, int]]:
    """Address and size of 64 readable pages with an unmapped page on either side."""
    libc = CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [c_void_p, c_size_t, c_int]
    region = mmap.mmap(-1, 66 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anchor = c_char.from_buffer(region)
    base = addressof(anchor)
    assert libc.mprotect(base, PAGE, 0) == 0
    assert libc.mprotect(base + 65 * PAGE, PAGE, 0) == 0
    yield base + PAGE, 64 * PAGE
    del anchor
    region.close()


def test_available_memory_is_below_the_physical_memory() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0 < available_memory_bytes() < physical


def test_without_cgroup_limit_available_is_what_the_machine_has(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", available_kib=1234)
    assert available_memory_bytes(proc, tmp_path / "cgroup") == 1234 * 1024


def test_cgroup_v2_room_counts_reclaimable_file_pages(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", available_kib=10**6, cgroup="0::/a/b\n")
    fake_v2_group(tmp_path / "cg/a/b", "10000", current=9000, inactive_file=500)
    fake_v2_group(tmp_path / "cg/a", "max", current=9000, inactive_file=0)
    assert available_memory_bytes(proc, tmp_path / "cg") == 1500


def test_an_ancestor_cgroup_can_be_the_tighter_one(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", available_kib=10**6, cgroup="0::/a/b\n")
    fake_v2_group(tmp_path / "cg/a/b", "10000", current=1000, inactive_file=0)
    fake_v2_group(tmp_path / "cg/a", "5000", current=4000, inactive_file=0)
    assert available_memory_bytes(proc, tmp_path / "cg") == 1000


def test_a_cgroup_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    for path in ("/docker/123", "/../../elsewhere"):
        proc = fake_proc(tmp_path / "proc", available_kib=10**6, cgroup=f"0::{path}\n")
        fake_v2_group(tmp_path / "cg", "3000", current=1000, inactive_file=0)
        assert available_memory_bytes(proc, tmp_path / "cg") == 2000


def test_cgroup_v1_room_is_found_under_the_memory_controller(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"
    proc = fake_proc(tmp_path / "proc", available_kib=10**6, cgroup=lines)
    group = tmp_path / "cg/memory/job"
    write(group / "memory.limit_in_bytes", "8000\n")
    write(group / "memory.usage_in_bytes", "7000\n")
    write(group / "memory.stat", "inactive_file 1\ntotal_inactive_file 250\n")
    assert available_memory_bytes(proc, tmp_path / "cg") == 1250


def test_an_overdrawn_cgroup_has_no_room(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", cgroup="0::/\n")
    fake_v2_group(tmp_path / "cg", "1000", current=2000, inactive_file=0)
    assert available_memory_bytes(proc, tmp_path / "cg") == 0


def test_missing_meminfo_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"meminfo gives no MemAvailable.*mount /proc"):
        available_memory_bytes(tmp_path, tmp_path)
    write(tmp_path / "meminfo", "MemTotal: 1 kB\n")
    with pytest.raises(ArenaError, match="no MemAvailable"):
        available_memory_bytes(tmp_path, tmp_path)


def test_process_rss_follows_touched_pages() -> None:
    before = process_rss_bytes()
    region = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(b"\1" * (32 * MIB))
    assert process_rss_bytes() - before >= 31 * MIB
    region.close()


def test_rss_of_a_range_is_exact_to_the_page(guarded: tuple[int, int]) -> None:
    address, nbytes = guarded
    assert rss_of_ranges([(address, nbytes)]) == 0
    memset(address, 1, 5 * PAGE)
    memset(address + 40 * PAGE, 1, 1)
    assert rss_of_ranges([(address, nbytes)]) == 6 * PAGE


def test_rss_sums_ranges_and_ignores_the_rest(guarded: tuple[int, int]) -> None:
    address, nbytes = guarded
    memset(address, 1, 3 * PAGE)
    other = torch.ones(MIB)
    assert rss_of_ranges([(0x1000, PAGE), (address, nbytes), (0x9000, 0)]) == 3 * PAGE
    assert rss_of_ranges([]) == 0
    assert other.sum() == MIB


def test_a_mapping_across_the_edge_of_a_range_is_refused(guarded: tuple[int, int]) -> None:
    address, nbytes = guarded
    memset(address, 1, nbytes)
    edges = [(address, nbytes - PAGE), (address + PAGE, nbytes), (address + PAGE, PAGE)]
    for edge in edges:
        with pytest.raises(ArgumentError, match=r"across the edge.*guard page"):
            rss_of_ranges([edge])


def test_a_range_may_hold_several_mappings(guarded: tuple[int, int]) -> None:
    address, nbytes = guarded
    memset(address, 1, nbytes)
    libc = CDLL(None)
    libc.mprotect.argtypes = [c_void_p, c_size_t, c_int]
    assert libc.mprotect(address + 10 * PAGE, PAGE, mmap.PROT_READ) == 0
    assert rss_of_ranges([(address, nbytes)]) == nbytes


def test_file_mappings_are_told_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "name with spaces.safetensors"
    save_file({"w": torch.ones(4096)}, path)
    mapped = load_file(path)["w"]
    plain, shared = torch.ones(MIB), torch.ones(4096).share_memory_()
    memory = MemoryMap()
    assert [memory.is_file(t.data_ptr()) for t in (mapped, plain, shared)] == [True, False, False]
    found = memory.find(mapped.data_ptr())
    assert found is not None
    assert found.path == str(path)
    assert file_mapped(mapped.data_ptr())


def test_an_unmapped_address_is_in_no_mapping() -> None:
    memory = MemoryMap()
    assert memory.find(0) is None
    assert memory.find((1 << 64) - 1) is None
    assert not file_mapped(8)


def test_an_anonymous_mapping_is_no_file() -> None:
    region = mmap.mmap(-1, PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    anchor = c_char.from_buffer(region)
    assert sizeof(anchor) == 1
    assert not file_mapped(addressof(anchor))
    del anchor
    region.close()
