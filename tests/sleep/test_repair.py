"""Content that comes back different: copied again, read again, rebuilt, or FAULTED by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sleep.kit import FileSource, MemorySource, Rig, weights_of

from torpor.errors import (
    CheckpointError,
    FaultedError,
    HostCopyError,
    VerificationError,
    WeightsIncompleteError,
)

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)


def spoil(rig: Rig, *names: str) -> None:
    """Flip one bit of the spill file in the copies of some tensors."""
    for name in names:
        copy: Any = rig.entry(name).host
        assert copy.kind == "file"
        byte = os.pread(copy._spill.descriptor, 1, copy._offset)
        os.pwrite(copy._spill.descriptor, bytes([byte[0] ^ 1]), copy._offset)


def assert_faulted(rig: Rig, names: tuple[str, ...]) -> VerificationError:
    """Waking fails for good, by name, and nothing runs until somebody says what to do."""
    with pytest.raises(VerificationError) as caught:
        rig.sleeper.wake_up()
    assert caught.value.names == names
    assert "wake_up(reload=True)" in str(caught.value)
    assert rig.sleeper.state.value == "faulted"
    rig.check_books()
    with pytest.raises(FaultedError):
        rig.sleeper.sleep(1)
    with pytest.raises(FaultedError):
        rig.output()
    return caught.value


def test_a_copy_that_fails_once_is_copied_again(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    rig.device.calls.clear()
    first = next(index for index, call in enumerate(probe_calls(rig)) if call == "copy_in")
    rig.device.arm(first, lambda: HostCopyError("a hiccup"))
    report = rig.sleeper.wake_up()
    assert rig.device.raised
    assert report.repaired == ("embed",)
    assert report.verified == report.total_verifiable == 7
    assert rig.is_right()


def probe_calls(rig: Rig) -> list[str]:
    """The device calls of a wake, found by doing it once."""
    rig.sleeper.wake_up()
    calls = list(rig.device.calls)
    rig.sleeper.sleep(1)
    return calls


def test_damage_without_a_checkpoint_is_a_fault_by_name(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    spoil(rig, "qk", "rope")
    assert_faulted(rig, ("qk", "rope"))
    spoil(rig, "qk", "rope")  # Somebody has put it right again.
    report = rig.sleeper.wake_up()
    assert report.repaired == ()
    assert rig.is_right()


def test_a_fault_ends_when_the_caller_fills(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    spoil(rig, "qk")
    assert_faulted(rig, ("qk",))
    report = rig.sleeper.wake_up(reload=False)
    assert report.missing == ("q", "k")
    assert rig.sleeper.state.value == "awake"
    with pytest.raises(WeightsIncompleteError):
        rig.output()
    rig.sleeper.update_weights({"q": OLD["q"], "k": OLD["k"]})
    assert rig.is_right()
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_damage_is_read_again_from_the_checkpoint_of_this_epoch(rig_for: RigMaker) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    rig.sleeper.sleep(1)
    spoil(rig, "qk", "low")
    source.read = 0
    report = rig.sleeper.wake_up()
    assert set(report.repaired) == {"qk", "low"}
    assert not report.reloaded, "two tensors were read, and not the weights"
    assert source.read == 1
    assert rig.is_right()
    assert rig.sleeper.verify().ok


def test_a_checkpoint_of_another_epoch_repairs_nothing(rig_for: RigMaker) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    rig.sleeper.update_weights(NEW)
    rig.sleeper.sleep(1)
    spoil(rig, "qk")
    source.read = 0
    assert_faulted(rig, ("qk",))
    assert source.read == 0
    assert rig.sleeper.wake_up(reload=True).reloaded
    assert rig.is_right(OLD)


def test_a_buffer_that_no_checkpoint_holds_cannot_be_repaired(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(2)
    spoil(rig, "rope")
    assert_faulted(rig, ("rope",))
    with pytest.raises(WeightsIncompleteError) as caught:
        rig.sleeper.wake_up(reload=True)
    assert caught.value.names == ("rope",)
    assert rig.sleeper.state.value == "asleep"
    assert rig.sleeper.wake_up(reload=False).missing == (
        "embed",
        "q",
        "k",
        "low",
        "correction",
        "rope",
    )


def test_damage_to_a_derived_tensor_is_rebuilt_and_proven(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    spoil(rig, "doubled")
    report = rig.sleeper.wake_up()
    assert "doubled" in report.rebuilt
    assert report.verified == report.total_verifiable
    assert rig.is_right()
    assert rig.sleeper.verify().ok
    assert rig.sleeper.sleep(1).copied_bytes == rig.entry("doubled").nbytes


# the checkpoint file itself is the host copy ----------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return FileSource(tmp_path / "model.safetensors", OLD)


@pytest.fixture
def rig(rig_for: RigMaker, source: FileSource) -> Rig:
    made = rig_for(weights=OLD, reload=source)
    made.sleeper.sleep(1)
    return made


def test_a_bit_that_flips_in_the_file_while_asleep_is_a_fault_by_name(
    rig: Rig, source: FileSource
) -> None:
    source.flip_bit("k")
    assert_faulted(rig, ("qk",))
    source.flip_bit("k")
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_a_fault_in_the_file_can_be_accepted(rig: Rig, source: FileSource) -> None:
    source.flip_bit("k")
    assert_faulted(rig, ("qk",))
    report = rig.sleeper.wake_up(reload=True)
    assert report.reloaded
    spoilt = dict(source.pairs())
    assert not torch.equal(spoilt["k"], OLD["k"])
    assert rig.is_right(spoilt)
    assert rig.sleeper.verify().ok


@pytest.mark.parametrize(
    "change",
    [lambda source: source.path.unlink(), lambda source: os.truncate(source.path, 100)],
    ids=["deleted", "truncated"],
)
def test_a_file_that_is_gone_while_asleep_is_a_fault_with_its_cause(
    rig: Rig, source: FileSource, change: Callable[[FileSource], None]
) -> None:
    change(source)
    error = assert_faulted(rig, ("embed", "qk", "low", "correction"))
    assert isinstance(error.__cause__, CheckpointError | HostCopyError)
    with pytest.raises(CheckpointError):
        rig.sleeper.wake_up(reload=True)
    assert rig.sleeper.state.value == "asleep"
    FileSource(source.path, OLD)
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_other_weights_in_the_file_while_asleep_are_a_fault_until_accepted(
    rig: Rig, source: FileSource
) -> None:
    source.replace(NEW)
    assert_faulted(rig, ("embed", "qk", "low", "correction"))
    epoch = rig.sleeper.weights_epoch
    assert rig.sleeper.wake_up(reload=True).reloaded
    assert rig.is_right(NEW)
    assert rig.sleeper.weights_epoch == epoch + 1


def test_other_shapes_in_the_file_are_a_fault_and_not_a_crash(rig: Rig, source: FileSource) -> None:
    source.replace({**OLD, "embed": torch.zeros(2, 2)})
    with pytest.raises(VerificationError):
        rig.sleeper.wake_up()
    assert rig.sleeper.state.value == "faulted"
    source.replace(OLD)
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)
