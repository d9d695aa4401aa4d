"""Falling asleep: what fails is rolled back, and what cannot be rolled back loses nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.sleep.kit import MemorySource, Rig, weights_of

from torpor.errors import ArenaError, HostFullError, OutOfMemoryError, OwnershipError, TorporError
from torpor.sleep.classes import AtSleep
from torpor.sleep.falling import at_sleep

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)


def index_of(rig: Rig, act: Callable[[], Any], call: str, nth: int = 0) -> int:
    """At which device call of an act its nth ``call`` comes; the act is done once to see."""
    rig.device.calls.clear()
    act()
    return [index for index, name in enumerate(rig.device.calls) if name == call][nth]


def failing_at(rig: Rig, call: str, nth: int = 0, **how: Any) -> Callable[[], None]:
    """Arms the rig's device to fail in the nth ``call`` of its next full sleep at level 1."""
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    at = index_of(rig, lambda: rig.sleeper.sleep(1), call, nth)
    rig.sleeper.wake_up()
    return lambda: rig.device.arm(at, lambda: ArenaError("no"), **how)


@pytest.mark.parametrize(
    ("name", "by_hand", "level1", "level2"),
    [
        ("embed", False, AtSleep.COPY, AtSleep.DISCARD),
        ("correction", False, AtSleep.COPY, AtSleep.DISCARD),
        ("rope", False, AtSleep.COPY, AtSleep.COPY),
        ("normed", False, AtSleep.COPY, AtSleep.DISCARD),
        ("normed", True, AtSleep.COPY, AtSleep.COPY),
        ("kv", False, AtSleep.DISCARD, AtSleep.DISCARD),
        ("count", False, AtSleep.DISCARD, AtSleep.DISCARD),
    ],
)
def test_what_each_level_does(
    rig_for: RigMaker, name: str, by_hand: bool, level1: AtSleep, level2: AtSleep
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    entry = rig.entry(name)
    entry.by_hand = by_hand
    assert (at_sleep(entry, 1), at_sleep(entry, 2)) == (level1, level2)


@pytest.mark.parametrize("call", ["synchronize", "fingerprint", "resident_bytes"])
def test_a_failure_before_the_release_drops_no_cache(rig_for: RigMaker, call: str) -> None:
    rig = rig_for(weights=OLD)
    arm = failing_at(rig, call)
    rig.model.kv.fill_(4)
    epoch = rig.sleeper.kv_epoch
    arm()
    with pytest.raises(ArenaError):
        rig.sleeper.sleep(1)
    assert rig.model.kv.eq(4).all()
    assert rig.sleeper.kv_epoch == epoch
    assert rig.is_right()


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_cache_that_was_lost_in_a_rollback_is_empty_and_of_a_new_epoch(
    rig_for: RigMaker, nth: int
) -> None:
    rig = rig_for(weights=OLD)
    arm = failing_at(rig, "unmap", nth, after=True)
    rig.model.kv.fill_(4)
    epoch = rig.sleeper.kv_epoch
    arm()
    with pytest.raises(ArenaError):
        rig.sleeper.sleep(1)
    assert rig.model.kv.eq(0).all()
    assert rig.model.count.item() == 100
    assert rig.sleeper.kv_epoch == epoch + 1
    assert rig.sleeper.state.value == "awake"
    assert rig.is_right()
    rig.check_books()


def test_memory_that_somebody_took_meanwhile_leaves_the_sleeper_asleep(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    arm = failing_at(rig, "unmap", 2, after=True, lasting=True)
    arm()
    with pytest.raises(ArenaError):
        rig.sleeper.sleep(1)
    rig.device.disarm()
    assert rig.sleeper.state.value == "asleep"
    assert set(rig.sleeper.tag_states.values()) == {"released"}
    rig.check_books()
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_rollback_that_cannot_reset_or_refill_says_so_by_name(rig_for: RigMaker) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    rig = rig_for(weights=OLD)
    arm = failing_at(rig, "unmap", 3)
    count, sinks = rig.entry("count"), rig.entry("sinks")
    good = count.reset, sinks.rebuild
    count.reset = sinks.rebuild = fail
    arm()
    with pytest.raises(ArenaError) as caught:
        rig.sleeper.sleep(1)
    assert caught.value.__notes__ == ["invalid until updated or reloaded: sinks, count"]
    assert rig.sleeper.state.value == "awake"
    with pytest.raises(TorporError, match="sinks, count"):
        rig.output()
    count.reset, sinks.rebuild = good
    rig.sleeper.sleep(1, ["kv_cache"])
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_level_two_rolled_back_names_what_is_gone(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    at = index_of(rig, lambda: rig.sleeper.sleep(2), "unmap")
    rig.sleeper.wake_up(reload=False)
    rig.sleeper.update_weights(OLD)
    rig.device.arm(at, lambda: ArenaError("no"), after=True)
    with pytest.raises(ArenaError) as caught:
        rig.sleeper.sleep(2)
    assert caught.value.__notes__ == ["invalid until updated or reloaded: embed, q, k, low"]
    assert rig.sleeper.missing == ("embed", "q", "k", "low")
    rig.sleeper.update_weights(OLD)
    assert rig.is_right()


def test_a_sleep_that_fails_has_not_dropped_copies_of_what_slept_already(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1, ["weights"])
    at = index_of(rig, lambda: rig.sleeper.sleep(1, ["kv_cache"]), "unmap")
    rig.sleeper.wake_up(["kv_cache"])
    rig.device.arm(at, lambda: ArenaError("no"))
    with pytest.raises(ArenaError):
        rig.sleeper.sleep(2)
    report = rig.sleeper.wake_up()
    assert report.missing == ()
    assert rig.is_right()


def test_deepening_goes_on_where_an_interrupt_left_it(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    context = rig.sleeper._context
    context.released = {**context.released, "weights": 2}  # As an interrupt may leave it.
    assert rig.entry("embed").host is not None
    assert not rig.sleeper.sleep(2, ["weights"]).changed
    assert rig.entry("embed").host is None


def test_a_rebuild_that_a_failed_sleep_cut_short_is_finished(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    calls = [0]
    good = rig.model._double

    def interrupted_once() -> None:
        calls[0] += 1
        if calls[0] == 1:
            rig.model.doubled.zero_()
            raise KeyboardInterrupt
        good()

    rig.entry("doubled").rebuild = interrupted_once
    rig.model.embed.data.copy_(NEW["embed"])
    with pytest.raises(KeyboardInterrupt):
        rig.sleeper.sleep(1)
    assert calls == [2]
    assert rig.is_right({**OLD, "embed": NEW["embed"]})


def test_an_arena_that_was_never_touched_is_released_too(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    before = rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    again = rig.sleeper.sleep(1)
    assert again.arena_rss_after_bytes == before.arena_rss_after_bytes == 0


@pytest.mark.parametrize("error", [HostFullError("full"), OutOfMemoryError("none")])
def test_a_failed_sleep_can_be_made_again(rig_for: RigMaker, error: TorporError) -> None:
    rig = rig_for(weights=OLD)
    rig.device.arm(1, lambda: error)
    with pytest.raises(type(error)):
        rig.sleeper.sleep(1)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_an_open_update_that_does_not_finish_refuses_the_sleep(rig_for: RigMaker) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()
    good = rig.entry("normed").rebuild
    rig.entry("normed").rebuild = fail
    rig.sleeper.load_weights(NEW.items())
    with pytest.raises(OwnershipError, match="normed"):
        rig.sleeper.sleep(1)
    assert rig.sleeper.state.value == "awake"
    rig.entry("normed").rebuild = good
    assert rig.is_right(OLD)
