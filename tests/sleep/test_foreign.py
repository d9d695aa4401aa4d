"""Writes outside the door are found at the next sleep and answered by policy, never in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.sleep.kit import MemorySource, Rig, expected, weights_of
from tests.sleep.test_repair import spoil

from torpor.errors import ForeignWriteError, OwnershipError, StateError, VerificationError

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)


def write_outside(rig: Rig) -> None:
    """What a training step does: one weight changes, and nobody tells."""
    with torch.no_grad():
        rig.model.embed.copy_(NEW["embed"])


WRITTEN = {**OLD, "embed": NEW["embed"]}


def copied(rig: Rig) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()


def test_adopted_writes_become_official_and_dependants_follow(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    epoch = rig.sleeper.weights_epoch
    write_outside(rig)
    report = rig.sleeper.sleep(1)
    assert report.adopted == ("embed",)
    assert report.weights_epoch == epoch + 1
    assert report.verified == report.total_verifiable == 7
    # embed, and the two derived from it
    assert report.copied_bytes == 3 * rig.entry("embed").nbytes
    rig.sleeper.wake_up()
    assert rig.is_right(WRITTEN)
    assert rig.sleeper.verify().ok
    assert rig.sleeper.sleep(1).adopted == ()


def test_adopting_at_level_two_says_so_and_does_not_reload_behind_the_back(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    write_outside(rig)
    assert rig.sleeper.sleep(2).adopted == ("embed",)
    with pytest.raises(StateError, match="reading it would undo them"):
        rig.sleeper.wake_up()
    assert rig.sleeper.state.value == "asleep"
    rig.sleeper.wake_up(reload=False)
    rig.sleeper.update_weights(WRITTEN)
    assert rig.is_right(WRITTEN)


def test_a_write_to_a_buffer_of_no_checkpoint_keeps_the_checkpoint_reloadable(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.model.rope.add_(1)
    assert rig.sleeper.sleep(2).adopted == ("rope",)
    assert rig.sleeper.wake_up().reloaded
    assert torch.equal(rig.model.rope, torch.arange(8.0) + 1), "level 2 keeps buffers"
    assert torch.equal(rig.model.doubled, OLD["embed"] + rig.model.rope)


@pytest.mark.parametrize("level", [1, 2])
def test_a_derived_tensor_written_by_hand_keeps_what_was_written(
    rig_for: RigMaker, level: int
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.model.normed.fill_(3)
    assert rig.sleeper.sleep(level).adopted == ("normed",)
    rig.sleeper.wake_up()
    assert rig.model.normed.eq(3).all()
    rig.sleeper.sleep(3 - level)
    rig.sleeper.wake_up()
    assert rig.model.normed.eq(3).all()
    assert rig.sleeper.verify().ok
    # Its sources have the last word as soon as they change.
    rig.sleeper.update_weights(NEW)
    assert rig.is_right(NEW)
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=True)
    assert rig.is_right(OLD)


@pytest.mark.parametrize("level", [1, 2])
def test_restore_brings_the_official_content_back(rig_for: RigMaker, level: int) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="restore", reload=MemorySource(OLD))
    copied(rig)
    epoch = rig.sleeper.weights_epoch
    write_outside(rig)
    rig.model.doubled.zero_()
    report = rig.sleeper.sleep(level)
    assert (report.adopted, report.weights_epoch) == ((), epoch)
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_restore_rebuilds_what_has_no_copy_but_a_rebuild(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="restore", reload=MemorySource(OLD))
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up()
    rig.model.normed.zero_()
    assert rig.entry("normed").host is None
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


@pytest.mark.parametrize("level", [1, 2])
def test_restore_without_a_copy_is_refused_and_changes_nothing(
    rig_for: RigMaker, level: int
) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="restore")
    write_outside(rig)
    with pytest.raises(ForeignWriteError, match="no host copy to restore: embed") as caught:
        rig.sleeper.sleep(level)
    assert caught.value.names == ("embed",)
    assert rig.sleeper.state.value == "awake"
    assert torch.equal(rig.model.embed, NEW["embed"])


def test_restore_from_a_damaged_copy_is_typed_and_the_tensor_invalid(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="restore")
    copied(rig)
    spoil(rig, "embed")
    write_outside(rig)
    with pytest.raises(VerificationError, match="embed") as caught:
        rig.sleeper.sleep(1)
    assert caught.value.names == ("embed",)
    assert rig.sleeper.missing == ("embed",)
    rig.sleeper.sleep(1)
    assert rig.sleeper.wake_up().missing == ("embed",), "known already, and no new fault"
    rig.sleeper.update_weights({"embed": OLD["embed"]})
    assert rig.is_right(OLD)


@pytest.mark.parametrize("level", [1, 2])
def test_error_refuses_the_sleep_by_name_and_changes_nothing(rig_for: RigMaker, level: int) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="error")
    copied(rig)
    write_outside(rig)
    rig.model.rope.add_(1)
    epoch = rig.sleeper.weights_epoch
    for _ in range(2):
        with pytest.raises(ForeignWriteError, match="embed, rope; send changes through") as caught:
            rig.sleeper.sleep(level)
        assert caught.value.names == ("embed", "rope")
    assert rig.sleeper.state.value == "awake"
    assert rig.sleeper.weights_epoch == epoch
    assert torch.equal(rig.model.embed, NEW["embed"])
    assert rig.sleeper.verify().differing == ("embed", "rope")
    rig.sleeper.sleep(1, ["kv_cache"])  # The cache may sleep all the same.


def test_adoption_that_cannot_rebuild_is_typed_and_can_be_repeated(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    entry = rig.entry("normed")
    good = entry.rebuild

    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    entry.rebuild = fail
    write_outside(rig)
    with pytest.raises(OwnershipError, match="normed"):
        rig.sleeper.sleep(1)
    assert rig.sleeper.state.value == "awake"
    entry.rebuild = good
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right(WRITTEN)


def test_a_partial_sleep_looks_only_at_its_own_tags(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, on_foreign_write="error")
    write_outside(rig)
    rig.sleeper.sleep(1, ["kv_cache"])
    rig.sleeper.wake_up()
    assert torch.equal(rig.model.embed, NEW["embed"])
    answer = rig.output()
    assert not torch.equal(answer, expected(OLD)), "nothing hides what was written"
