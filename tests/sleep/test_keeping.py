"""Host copies of owned tensors: clean bytes are not copied, equal ones are shared, files trusted
only as far as they can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.kit import FileSource, Rig, weights_of
from torch import nn

from torpor.errors import HostCopyError, HostFullError
from torpor.sleep.host import HostStore

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)
FROM_CHECKPOINT = {"embed", "qk", "low", "correction"}


def kinds(rig: Rig) -> dict[str, str | None]:
    """Where each verified tensor's host copy is."""
    return {
        row.name: row.host_copy
        for row in rig.sleeper.table()
        if rig.entry(row.name).policy.verified
    }


def official_bytes(rig: Rig) -> int:
    return sum(entry.nbytes for entry in rig.sleeper._context.ledger if entry.policy.verified)


def test_a_clean_sleeper_copies_nothing_ever_again(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    assert rig.sleeper.sleep(1).copied_bytes == official_bytes(rig)
    for _ in range(3):
        rig.sleeper.wake_up()
        rig.device.calls.clear()
        report = rig.sleeper.sleep(1)
        assert report.copied_bytes == 0
        assert "copy" in report.seconds
        assert not {"copy_out", "host_view"} & set(rig.device.calls)
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_level_two_copies_only_what_cannot_be_had_again(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    report = rig.sleeper.sleep(2)
    survivors = [rig.entry(name) for name in ("correction", "rope")]
    assert report.copied_bytes == sum(entry.nbytes for entry in survivors)


def test_tensors_with_equal_bytes_share_one_copy(sleeper_for: SleeperMaker) -> None:
    model = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
    with torch.no_grad():
        for layer in list(model)[1:]:
            layer.weight.copy_(model[0].weight)
    sleeper = sleeper_for(model)
    assert sleeper.sleep(1).copied_bytes == 32 * 32 * 4
    assert sleeper.status()["host_file_bytes"] == 32 * 32 * 4
    assert sleeper.wake_up().verified == 4


def test_two_sleepers_with_one_store_share_copies(rig_for: RigMaker, tmp_path: Path) -> None:
    store = HostStore(spill_dir=tmp_path)
    first, second = rig_for(weights=OLD, host=store), rig_for(weights=OLD, host=store)
    assert first.sleeper.sleep(1).copied_bytes > 0
    held = store.file_bytes
    assert second.sleeper.sleep(1).copied_bytes == 0
    assert store.file_bytes == held
    first.sleeper.wake_up()
    first.sleeper.update_weights(NEW)
    first.sleeper.sleep(1)
    first.sleeper.close(discard=True)
    second.sleeper.wake_up()
    assert second.is_right(OLD)
    second.sleeper.close()
    store.close()


def test_the_spill_file_does_not_grow_over_cycles_of_updates(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    lengths = []
    for cycle in range(200):
        seed = weights_of(cycle)
        changed = {name: seed[name] for name in list(seed)[: 1 + cycle % 5]}
        rig.sleeper.update_weights(changed)
        rig.sleeper.sleep(1 + (cycle % 7 == 0))
        if cycle % 7 == 0:
            rig.sleeper.wake_up(reload=False)
            rig.sleeper.update_weights(seed)
        else:
            rig.sleeper.wake_up()
        lengths.append(rig.sleeper.status()["host_file_bytes"])
    assert rig.sleeper.verify().ok
    assert max(lengths[20:]) <= max(lengths[:20])


def test_the_old_copy_makes_room_for_the_new_one(rig_for: RigMaker) -> None:
    store = HostStore(medium="memory")
    rig = rig_for(weights=OLD, host=store)
    rig.sleeper.sleep(1)
    store.host_memory_limit = store.memory_bytes
    rig.sleeper.wake_up()
    rig.sleeper.update_weights(NEW)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)
    assert store.memory_bytes == store.host_memory_limit


def test_a_memory_limit_refuses_the_sleep_and_loses_nothing(rig_for: RigMaker) -> None:
    store = HostStore(medium="memory", host_memory_limit=600)
    rig = rig_for(weights=OLD, host=store)
    with pytest.raises(HostFullError, match="host_memory_limit=600"):
        rig.sleeper.sleep(1)
    assert rig.sleeper.state.value == "awake"
    assert rig.is_right()
    store.host_memory_limit = None
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_full_disk_refuses_the_sleep_and_loses_nothing(
    rig_for: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    rig.sleeper.update_weights(NEW)
    pwrite = os.pwrite
    room = [2]

    def write(descriptor: int, part: memoryview, offset: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, part, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(HostFullError, match="No space left"):
        rig.sleeper.sleep(1)
    assert rig.is_right(NEW)
    rig.check_books()
    monkeypatch.undo()
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)


def test_the_spill_folder_is_chosen_by_argument_and_must_exist(
    rig_for: RigMaker, tmp_path: Path
) -> None:
    rig = rig_for(weights=OLD, spill_dir=tmp_path / "missing")
    with pytest.raises(HostCopyError, match="missing"):
        rig.sleeper.sleep(1)
    assert rig.is_right()
    (tmp_path / "missing").mkdir()
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right()


# a checkpoint file as the host copy -------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return FileSource(tmp_path / "model.safetensors", OLD)


@pytest.fixture
def rig(rig_for: RigMaker, source: FileSource) -> Rig:
    return rig_for(weights=OLD, reload=source)


def test_what_the_checkpoint_holds_is_never_written_elsewhere(rig: Rig) -> None:
    report = rig.sleeper.sleep(1)
    assert report.copied_bytes == sum(
        entry.nbytes for name in ("rope", "normed", "doubled") if (entry := rig.entry(name))
    )
    assert {name for name, kind in kinds(rig).items() if kind == "checkpoint"} == FROM_CHECKPOINT
    woken = rig.sleeper.wake_up()
    assert woken.verified == woken.total_verifiable == 7
    assert not woken.reloaded
    assert rig.is_right()


def touch(source: FileSource) -> None:
    status = source.path.stat()
    os.utime(source.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


CHANGES: list[Callable[[FileSource], None]] = [
    touch,
    lambda source: source.replace(NEW),
    lambda source: source.replace(OLD),
    lambda source: source.path.unlink(),
    lambda source: os.truncate(source.path, 100),
]
NAMES = ["touched", "replaced by others", "replaced by the same", "deleted", "truncated"]


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_file_that_changed_before_the_sleep_is_not_trusted(
    rig: Rig, source: FileSource, change: Callable[[FileSource], None]
) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    change(source)
    report = rig.sleeper.sleep(1)
    assert report.copied_bytes == sum(rig.entry(name).nbytes for name in FROM_CHECKPOINT)
    assert set(kinds(rig).values()) == {"file"}
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)
    assert rig.sleeper.sleep(1).copied_bytes == 0


def test_a_file_that_changed_while_it_was_read_is_not_trusted(
    rig_for: RigMaker, source: FileSource
) -> None:
    class Racing(FileSource):
        def pairs(self):  # type: ignore[no-untyped-def]
            yield from super().pairs()
            self.replace(NEW)

    rig = rig_for(weights=OLD, reload=Racing(source.path))
    assert set(kinds(rig).values()) == {None}
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_bytes_in_another_order_are_not_taken_from_the_file(
    sleeper_for: SleeperMaker, tmp_path: Path
) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4).T)
    weights = {"weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}
    sleeper = sleeper_for(model)
    sleeper.update_weights(FileSource(tmp_path / "w.safetensors", weights))
    assert sleeper.table()[0].host_copy is None
    sleeper.sleep(1)
    sleeper.wake_up()
    assert torch.equal(model.weight, weights["weight"])


def test_another_dtype_is_not_taken_from_the_file(
    sleeper_for: SleeperMaker, tmp_path: Path
) -> None:
    model = nn.Linear(4, 4, bias=False)
    weights = {"weight": torch.ones(4, 4).bfloat16()}
    sleeper = sleeper_for(model)
    sleeper.update_weights(FileSource(tmp_path / "w.safetensors", weights))
    assert sleeper.table()[0].host_copy is None
    assert sleeper.sleep(1).copied_bytes == 64
    sleeper.wake_up()
    assert model.weight.sum() == 16


def test_a_closed_store_is_not_relied_on(rig_for: RigMaker, tmp_path: Path) -> None:
    store = HostStore(spill_dir=tmp_path)
    rig = rig_for(weights=OLD, host=store)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    store.close()
    assert rig.sleeper.sleep(1).copied_bytes == official_bytes(rig)
    rig.sleeper.wake_up()
    assert rig.is_right()
    rig.sleeper.close()
    store.close()
