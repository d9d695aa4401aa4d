"""Any device behind the protocol will do: here one whose memory host code cannot see."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.sleep.kit import MemorySource, Rig, RoomyDevice, weights_of

from torpor.sleep.digest import local_digest
from torpor.sleep.host import HostCopy, HostStore

OLD, NEW = weights_of(1), weights_of(2)


class FarDevice(RoomyDevice):
    """As a GPU is: no host view, copies through staging memory, fresh memory holds anything."""

    name = "far"

    def __init__(self) -> None:
        super().__init__()
        self.copied_out = 0

    @property
    def fresh_memory_is_zero(self) -> bool:
        return False

    def map(self, address: int, nbytes: int, *, populate: bool, handle_bytes: int = 0) -> None:
        super().map(address, nbytes, populate=populate)
        if nbytes:
            ctypes.memset(address, 0xAB, nbytes)

    def host_view(self, address: int, nbytes: int) -> None:  # type: ignore[override]
        return None

    def copy_in(self, address: int, copy: HostCopy) -> None:
        staged = bytearray(copy.nbytes)
        copy.read_into(memoryview(staged))
        ctypes.memmove(address, bytes(staged), copy.nbytes)

    def copy_out(self, address: int, nbytes: int, target: memoryview) -> None:
        self.copied_out += nbytes
        target[:] = ctypes.string_at(address, nbytes)

    def fingerprint(self, ranges: Sequence[tuple[int, int]]) -> list[str]:
        return [local_digest(ctypes.string_at(address, nbytes)) for address, nbytes in ranges]


@pytest.mark.parametrize("medium", ["file", "memory"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_device_without_host_views_sleeps_and_wakes(
    level: int, medium: str, tmp_path: Path
) -> None:
    device = FarDevice()
    store = HostStore(spill_dir=tmp_path, medium=medium)
    rig = Rig(weights=OLD, device=device, host=store, reload=MemorySource(OLD), poison=False)
    try:
        for _ in range(2):
            report = rig.sleeper.sleep(level)
            assert device.copied_out == report.copied_bytes
            device.copied_out = 0
            woken = rig.sleeper.wake_up()
            assert woken.verified == woken.total_verifiable
            assert rig.is_right()
            assert rig.model.kv.isfinite().all()
        assert report.copied_bytes == 0
        rig.sleeper.update_weights(NEW)
        assert rig.is_right(NEW)
    finally:
        rig.sleeper.close(discard=True)
        store.close()
