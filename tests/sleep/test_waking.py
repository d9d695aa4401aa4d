"""Waking: two phases, books put back on failure, leftovers of failures found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.sleep.kit import MemorySource, Rig, weights_of

from torpor.errors import ArenaError, OutOfMemoryError, OwnershipError, StateError
from torpor.sleep.host import HostCopy

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)


def books(rig: Rig) -> dict[str, tuple[object, ...]]:
    return {
        entry.name: (entry.valid, entry.digest, entry.host, entry.by_hand)
        for entry in rig.sleeper._context.ledger
    }


@pytest.mark.parametrize("level", [1, 2])
def test_p8_all_memory_is_reserved_before_anything_is_copied(rig_for: RigMaker, level: int) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(level)
    rig.device.calls.clear()
    rig.sleeper.wake_up()
    calls = [call for call in rig.device.calls if call in {"map", "copy_in", "fill"}]
    assert "map" not in calls[calls.index("fill") :]
    assert calls[0] == "map"


@pytest.mark.parametrize("level", [1, 2])
def test_p8_a_failed_wake_puts_books_and_epochs_back(rig_for: RigMaker, level: int) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    rig.sleeper.sleep(level)
    before, epochs = books(rig), (rig.sleeper.weights_epoch, rig.sleeper.kv_epoch)
    source.weights = dict(NEW)  # A reload would move the epoch.
    good = rig.entry("sinks").rebuild

    def fail() -> None:
        raise ZeroDivisionError

    rig.entry("sinks").rebuild = fail
    with pytest.raises(OwnershipError, match="sinks"):
        rig.sleeper.wake_up(reload=True)
    assert books(rig) == before
    assert (rig.sleeper.weights_epoch, rig.sleeper.kv_epoch) == epochs
    assert rig.sleeper.state.value == "asleep"
    rig.check_books()
    rig.entry("sinks").rebuild = good
    rig.sleeper.wake_up(reload=True)
    assert rig.is_right(NEW)


def test_an_update_that_a_failed_wake_left_open_is_forgotten(rig_for: RigMaker) -> None:
    class Interrupting(MemorySource):
        def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "embed", self.weights["embed"]
            raise KeyboardInterrupt

    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(2)
    context = rig.sleeper._context
    good, context.reload = context.reload, Interrupting(OLD)
    with pytest.raises(KeyboardInterrupt):
        rig.sleeper.wake_up(reload=True)
    assert not rig.sleeper.update_is_open
    assert rig.sleeper.state.value == "asleep"
    context.reload = good
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_wake_interrupted_again_and_again_leaves_no_update_behind(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(1)
    context = rig.sleeper._context
    good, copy_in = context.reload, rig.device.inner.copy_in
    interrupts = [0]

    def interrupted_twice(address: int, copy: HostCopy) -> None:
        interrupts[0] += 1
        if interrupts[0] <= 2:
            raise KeyboardInterrupt
        copy_in(address, copy)

    class Interrupted(MemorySource):
        def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "embed", NEW["embed"]
            rig.device.inner.copy_in = interrupted_twice  # While its update is undone.
            raise KeyboardInterrupt

    context.reload = Interrupted(OLD)
    with pytest.raises(KeyboardInterrupt):
        rig.sleeper.wake_up(reload=True)
    assert interrupts == [2]
    rig.device.inner.copy_in, context.reload = copy_in, good
    assert not rig.sleeper.update_is_open
    rig.check_books()
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_failed_wake_leaves_pushed_pairs_possible(rig_for: RigMaker) -> None:
    source = MemorySource({**OLD, "extra": torch.zeros(1)})
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper._context.reload = source
    rig.sleeper.sleep(2)
    with pytest.raises(ValueError, match="no weight 'extra'"):
        rig.sleeper.wake_up()
    rig.sleeper.wake_up(reload=False)
    rig.sleeper.load_weights(NEW.items())
    assert rig.is_right(NEW)


def test_memory_left_behind_by_a_failure_is_not_taken_for_fresh(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, poison=False)
    rig.sleeper.sleep(1)
    arena = rig.entry("kv").arena
    # As a rollback that the system did not let finish: mapped, written, and not in the books.
    rig.device.inner.map(arena.address, arena.nbytes, populate=True)
    rig.device.inner.fill(arena.address, arena.nbytes, 0x55)
    rig.sleeper.wake_up()
    assert rig.model.kv.eq(0).all()
    assert rig.is_right()


def test_a_wake_that_cannot_give_memory_back_still_ends_asleep(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    maps = len(rig.sleeper._context.ledger.arenas(["weights", "kv_cache", "graphs"]))
    rig.device.arm(2 * maps, lambda: ArenaError("no"), lasting=True)
    with pytest.raises(ArenaError):
        rig.sleeper.wake_up()
    rig.device.disarm()
    assert rig.sleeper.state.value == "asleep"
    assert set(rig.sleeper.tag_states.values()) == {"released"}
    rig.sleeper.wake_up()
    assert rig.is_right()
    rig.check_books()


def test_a_failed_partial_wake_leaves_the_other_tags_alone(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up(["kv_cache"])
    rig.model.kv.fill_(3)
    rig.device.arm(3, lambda: OutOfMemoryError("none"))
    with pytest.raises(OutOfMemoryError):
        rig.sleeper.wake_up()
    assert rig.model.kv.eq(3).all()
    rig.check_books()
    rig.sleeper.wake_up()
    assert rig.model.kv.eq(3).all()
    assert rig.is_right()


def test_a_refill_made_from_weights_that_did_not_stay_is_made_again(rig_for: RigMaker) -> None:
    source = MemorySource(NEW)
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper._context.reload = source
    rig.sleeper.sleep(1, ["weights"])
    # The reload brings NEW, the resident sinks are refilled from it, and then the wake fails.
    calls = [0]
    good = rig.entry("sinks").rebuild

    def then_fail() -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise ZeroDivisionError
        return rig.model.doubled[:2].clone()

    rig.entry("sinks").rebuild = then_fail
    fingerprint = rig.device.inner.fingerprint
    rig.device.inner.fingerprint = lambda ranges: (
        fingerprint(ranges) if calls[0] == 0 else (_ for _ in ()).throw(ArenaError("no"))
    )
    with pytest.raises(ArenaError):
        rig.sleeper.wake_up(reload=True)
    del rig.device.inner.fingerprint
    rig.entry("sinks").rebuild = good
    assert calls[0] >= 1
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_weights_that_were_never_loaded_can_be_read_by_a_plain_wake(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    for entry in rig.sleeper._context.ledger:
        if entry.in_checkpoint:  # As after materialising: no content yet.
            entry.valid, entry.digest, entry.host = False, None, None
    rig.sleeper._context.epochs.from_checkpoint = False
    rig.sleeper.sleep(2)
    assert rig.sleeper.wake_up().reloaded
    assert rig.is_right(OLD)


def test_the_refusal_to_undo_an_update_names_epoch_and_version(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.update_weights(NEW)
    rig.sleeper.sleep(2)
    with pytest.raises(StateError, match=r"epoch 2, version None.*wake_up\(reload=False\)"):
        rig.sleeper.wake_up()
