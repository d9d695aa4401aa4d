"""Sleep and wake from the outside: levels, tags in every order, calls that repeat, bad calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sleep.kit import MemorySource, Rig, is_readable, probe, weights_of

from torpor.errors import (
    ArgumentError,
    AsleepError,
    FaultedError,
    OutOfMemoryError,
    StateError,
    VerificationError,
    WeightsIncompleteError,
)
from torpor.sleep.states import TRANSITIONS

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)
TAGS = ("weights", "kv_cache", "graphs")


@pytest.fixture
def rig(rig_for: RigMaker, pattern: int) -> Rig:
    """With a checkpoint, under each poison."""
    return rig_for(weights=OLD, reload=MemorySource(OLD), poison=pattern)


def states(rig: Rig) -> tuple[str, ...]:
    return tuple(rig.sleeper.tag_states[tag] for tag in TAGS)


def snapshot(rig: Rig) -> tuple[Any, ...]:
    """Everything that a refused call must leave alone."""
    sleeper = rig.sleeper
    return (
        sleeper.state, states(rig), sleeper.digests(), sleeper.weights_epoch, sleeper.kv_epoch,
        sleeper.missing, sleeper.transitions, sleeper.table(), sleeper.status(),
    )  # fmt: skip


# levels and orders -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_three_cycles_give_the_same_answer_bit_for_bit(rig: Rig, level: int) -> None:
    for _ in range(3):
        rig.sleeper.sleep(level)
        assert set(states(rig)) == {"released"}
        assert rig.sleeper.is_sleeping
        report = rig.sleeper.wake_up()
        assert set(states(rig)) == {"resident"}
        assert report.verified == report.total_verifiable == 7
        assert report.reloaded == (level == 2)
        assert rig.is_right()
        assert rig.sleeper.verify().ok
        rig.check_books()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("down", list(itertools.permutations(TAGS)), ids="-".join)
def test_tags_fall_and_rise_in_any_order(rig: Rig, level: int, down: tuple[str, ...]) -> None:
    for up in itertools.permutations(TAGS):
        for tag in down:
            rig.sleeper.sleep(level, [tag])
            assert rig.sleeper.tag_states[tag] == "released"
            rig.check_books()
        for tag in up:
            if rig.sleeper.is_sleeping:
                with pytest.raises(AsleepError):
                    rig.output()
            rig.sleeper.wake_up([tag])
            assert rig.sleeper.tag_states[tag] != "released"
            assert rig.sleeper.is_sleeping == ("released" in states(rig))
            rig.check_books()
        if level == 2:
            assert rig.sleeper.tag_states["weights"] == "mapped_invalid"
            rig.sleeper.reload_weights()
        assert rig.is_right()
        assert rig.sleeper.verify().ok


def test_graphs_follow_the_cache_unless_they_are_named(rig: Rig) -> None:
    assert rig.sleeper.sleep(1, "kv_cache").tags == ("kv_cache", "graphs")
    assert states(rig) == ("resident", "released", "released")
    assert rig.sleeper.wake_up("kv_cache").tags == ("kv_cache", "graphs")
    assert rig.sleeper.sleep(1, ["graphs"]).tags == ("graphs",)
    assert states(rig) == ("resident", "resident", "released")
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_tags_can_sleep_at_different_levels(rig: Rig) -> None:
    rig.sleeper.sleep(2, ["weights"])
    rig.sleeper.sleep(1)
    report = rig.sleeper.wake_up()
    assert report.reloaded
    assert rig.is_right()


def test_the_cache_comes_back_empty_refilled_and_with_a_new_epoch(rig: Rig) -> None:
    rig.model.kv.fill_(5)
    rig.model.count.fill_(7)
    assert rig.sleeper.sleep(1, ["kv_cache"]).kv_epoch == 1
    report = rig.sleeper.wake_up()
    assert (report.kv_epoch, rig.sleeper.kv_epoch) == (1, 1)
    assert rig.model.kv.eq(0).all()
    assert torch.equal(rig.model.sinks, rig.model.doubled[:2])
    assert rig.model.count.item() == 100, "its owner resets it"
    assert report.rebuilt == ("sinks",)
    rig.sleeper.sleep(1, ["weights"])
    assert rig.sleeper.kv_epoch == 1


def test_a_refill_waits_for_the_weights_it_is_made_of(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    report = rig.sleeper.wake_up(["kv_cache"])
    assert (report.rebuilt, report.missing) == ((), ())
    assert states(rig) == ("released", "mapped_invalid", "resident")
    assert rig.sleeper.wake_up(["weights"]).missing == ("embed", "q", "k", "low", "correction")
    rig.sleeper.update_weights(NEW)
    assert rig.is_right(NEW)


def test_fresh_memory_is_poisoned_until_it_is_written(rig: Rig, pattern: int) -> None:
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=False)
    raw = {
        name: rig.entry(name).tensor().detach().view(torch.uint8).unique().tolist()  # type: ignore[union-attr]
        for name in ("embed", "low", "work", "normed")
    }
    assert set(map(tuple, raw.values())) == {(pattern,)}
    assert rig.model.rope.tolist() == list(range(8)), "buffers survive level 2"


def test_p3_addresses_never_change(rig: Rig) -> None:
    before = {name: value.data_ptr() for name, value in rig.model.named_parameters()}
    objects = {name: id(value) for name, value in rig.model.named_parameters()}
    for level in (1, 2, 1):
        rig.sleeper.sleep(level)
        rig.sleeper.wake_up()
        rig.sleeper.update_weights(NEW)
        rig.sleeper.reload_weights()
    assert {name: value.data_ptr() for name, value in rig.model.named_parameters()} == before
    assert {name: id(value) for name, value in rig.model.named_parameters()} == objects
    rig.check_books()


# repeating -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_p9_sleeping_again_is_a_no_op_that_says_so(rig: Rig, level: int) -> None:
    rig.sleeper.sleep(level)
    before = snapshot(rig)
    for tags in (None, ["weights"], "kv_cache"):
        report = rig.sleeper.sleep(level, tags)
        assert not report.changed
        assert report.tags == ()
        assert f"is asleep already, at level {level}" in report.notices[0]
        assert (report.released_bytes, report.copied_bytes) == ({}, 0)
        assert snapshot(rig) == before
    rig.sleeper.wake_up()
    assert rig.is_right()


@pytest.mark.parametrize("tags", [None, ["weights"], "kv_cache"])
def test_p9_waking_while_awake_is_a_no_op_that_says_so(rig: Rig, tags: Any) -> None:
    before = snapshot(rig)
    report = rig.sleeper.wake_up(tags)
    assert not report.changed
    assert report.notices == ("nothing to wake: nothing of it is asleep",)
    assert snapshot(rig) == before


def test_waking_a_tag_twice_is_a_no_op_too(rig: Rig) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up(["weights"])
    report = rig.sleeper.wake_up(["weights"])
    assert (report.changed, report.tags) == (False, ())
    assert rig.sleeper.is_sleeping


def test_a_sleep_releases_what_is_left_and_notes_what_sleeps(rig: Rig) -> None:
    rig.sleeper.sleep(1, ["weights"])
    report = rig.sleeper.sleep(1)
    assert report.changed
    assert report.tags == ("kv_cache", "graphs")
    assert report.notices == ("weights is asleep already, at level 1",)
    assert set(report.released_bytes) == {"cache", "scratch", "sync"}


def test_level_one_to_two_drops_the_copies_of_weights(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    held = rig.sleeper.status()["host_file_bytes"]
    report = rig.sleeper.sleep(2)
    assert report.changed
    assert report.tags == ()
    dropped = sum(rig.entry(n).nbytes for n in ("embed", "qk", "low", "normed", "doubled"))
    assert f"weights is at level 2 now; host copies of {dropped} bytes dropped" in report.notices
    assert rig.sleeper.status()["host_file_bytes"] < held
    kept = {row.name for row in rig.sleeper.table() if row.host_copy}
    assert kept == {"correction", "rope"}
    assert rig.sleeper.wake_up(reload=False).missing == ("embed", "q", "k", "low")
    rig.sleeper.update_weights(OLD)
    assert rig.is_right()


def test_level_two_to_one_is_a_no_op_with_a_notice(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    before = snapshot(rig)
    report = rig.sleeper.sleep(1)
    assert not report.changed
    assert "weights is asleep already, at level 2" in report.notices
    assert snapshot(rig) == before
    assert rig.sleeper.wake_up().reloaded


def test_a_tag_that_owns_nothing_is_answered_and_not_refused(rig: Rig) -> None:
    before = snapshot(rig)
    report = rig.sleeper.sleep(1, ["optimizer"])
    assert not report.changed
    assert report.notices == ("nothing to release: optimizer own no memory here",)
    assert snapshot(rig) == before


# bad calls -------------------------------------------------------------------------------------

BAD_CALLS: list[Callable[[Rig], Any]] = [
    *(
        lambda rig, level=level: rig.sleeper.sleep(level)
        for level in (7, 0, -1, True, None, 1.5, "x")
    ),
    *(lambda rig, tags=tags: rig.sleeper.sleep(1, tags) for tags in ([], "", ["weights", "kv"], 3)),
    *(lambda rig, tags=tags: rig.sleeper.wake_up(tags) for tags in ([], "", ["weights", "kv"], 3)),
]


@pytest.mark.parametrize("asleep", [None, 1, 2])
@pytest.mark.parametrize("call", BAD_CALLS)
def test_p9_impossible_arguments_change_nothing(
    rig_for: RigMaker, call: Callable[[Rig], Any], asleep: int | None
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    if asleep is not None:
        rig.sleeper.sleep(asleep)
    before = snapshot(rig)
    with pytest.raises(ArgumentError):
        call(rig)
    assert snapshot(rig) == before
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_level_may_be_spelt_as_a_digit(rig: Rig) -> None:
    assert rig.sleeper.sleep("1").level == 1


@pytest.mark.parametrize("level", [1, 2])
def test_use_while_asleep_is_a_typed_error(rig: Rig, level: int) -> None:
    rig.sleeper.sleep(level)
    for use in (rig.output, lambda: rig.model(probe()), rig.model.state_dict):
        with pytest.raises(AsleepError, match=r"wake_up\(\) first"):
            use()
    with pytest.raises(AsleepError):
        rig.sleeper.digests(portable=True)
    assert len(rig.sleeper.digests()) == 7, "the official digests are known all the same"
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_ready_is_asked_for_by_tag(rig: Rig) -> None:
    rig.sleeper.sleep(1, ["kv_cache"])
    rig.sleeper.require_ready("weights")
    with pytest.raises(AsleepError, match="kv_cache released"):
        rig.sleeper.require_ready("kv_cache")
    with pytest.raises(AsleepError):
        rig.sleeper.require_ready()


# reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_p13_a_sleep_answers_after_the_memory_has_gone(rig: Rig, level: int) -> None:
    arenas = rig.sleeper._context.ledger.arenas(TAGS)
    rig.output()
    before = sum(arena.resident_bytes() for arena in arenas)
    report = rig.sleeper.sleep(level)
    assert sum(arena.resident_bytes() for arena in arenas) == 0
    assert not any(is_readable([arena.range]) for arena in arenas)
    assert report.arena_rss_before_bytes == before > 0
    assert report.arena_rss_after_bytes == 0
    assert report.level == level
    assert report.tags == TAGS
    assert report.released_bytes == {
        "parameter": 256 + 512 + 16, "buffer": 64, "derived": 512,
        "cache": 128 + 64, "scratch": 96, "sync": 8,
    }  # fmt: skip
    assert report.verified == report.total_verifiable == 7
    assert {"quiesce", "fingerprint", "copy", "measure", "release", "trim"} <= set(report.seconds)
    assert 0 < sum(report.seconds.values()) <= report.total_s
    assert (report.weights_epoch, report.kv_epoch) == (1, 1)
    assert json.loads(json.dumps(report.to_dict()))["released_bytes"]["parameter"] == 784


@pytest.mark.parametrize("level", [1, 2])
def test_p13_a_wake_answers_after_the_memory_is_back(rig: Rig, level: int) -> None:
    arenas = rig.sleeper._context.ledger.arenas(TAGS)
    rig.sleeper.sleep(level)
    report = rig.sleeper.wake_up()
    assert all(is_readable([arena.range]) for arena in arenas)
    assert report.mapped_bytes == sum(arena.nbytes for arena in arenas)
    names = (
        ("rope",)
        if level == 2
        else ("rope", "correction", "embed", "qk", "low", "normed", "doubled")
    )
    assert report.restored_bytes == sum(rig.entry(name).nbytes for name in names)
    assert set(report.rebuilt) == ({"sinks"} if level == 1 else {"normed", "doubled", "sinks"})
    assert report.verified == report.total_verifiable == 7
    assert {"map", "poison", "restore", "verify", "clear", "rebuild"} <= set(report.seconds)
    assert ("reload" in report.seconds) == (level == 2)
    assert 0 < sum(report.seconds.values()) <= report.total_s
    assert (report.weights_epoch, report.kv_epoch) == (1, 1)
    json.dumps(report.to_dict())


def test_every_move_was_in_the_table_and_is_on_record(rig: Rig) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up(["weights"])
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up()
    moves = [(move.source.value, move.target.value) for move in rig.sleeper.transitions]
    down = [("draining", "falling_asleep"), ("falling_asleep", "asleep")]
    assert moves == [
        ("awake", "draining"), *down, ("asleep", "waking"), ("waking", "asleep"),
        ("asleep", "draining"), *down, ("asleep", "waking"), ("waking", "awake"),
    ]  # fmt: skip
    assert all(move.target in TRANSITIONS[move.source] for move in rig.sleeper.transitions)
    released = next(m for m in rig.sleeper.transitions if m.target.value == "asleep")
    assert released.moved_bytes == sum(a.nbytes for a in rig.sleeper._context.ledger.arenas(TAGS))


def test_status_is_jsonable_in_every_state(rig: Rig) -> None:
    seen = [json.loads(json.dumps(rig.sleeper.status()))]
    rig.sleeper.sleep(2)
    seen.append(json.loads(json.dumps(rig.sleeper.status())))
    rig.sleeper.wake_up(reload=False)
    seen.append(json.loads(json.dumps(rig.sleeper.status())))
    assert [status["state"] for status in seen] == ["awake", "asleep", "awake"]
    assert [status["mapped_bytes"] > 0 for status in seen] == [True, False, True]
    assert seen[2]["tags"]["weights"] == "mapped_invalid"


# reload ----------------------------------------------------------------------------------------


def test_a_plain_wake_reloads_only_while_the_checkpoint_is_the_source(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    assert rig.sleeper.wake_up().reloaded
    rig.sleeper.update_weights(NEW, version="step-3")
    rig.sleeper.sleep(2)
    before = snapshot(rig)
    with pytest.raises(StateError, match=r"version 'step-3'.*reading it would undo them") as caught:
        rig.sleeper.wake_up()
    assert not isinstance(caught.value, FaultedError)
    assert snapshot(rig) == before
    report = rig.sleeper.wake_up(reload=True)
    assert report.reloaded
    assert rig.is_right(OLD)
    rig.sleeper.sleep(2)
    assert rig.sleeper.wake_up().reloaded, "the checkpoint is the source again"


def test_without_reloading_the_caller_fills(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    report = rig.sleeper.wake_up(reload=False)
    assert not report.reloaded
    assert report.missing == ("embed", "q", "k", "low", "correction")
    assert "5 tensors have to be updated or reloaded before use" in report.notices
    assert rig.sleeper.state.value == "awake"
    rig.sleeper.reload_weights()
    assert rig.is_right()


def test_a_wake_that_names_tags_leaves_filling_to_the_caller(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    report = rig.sleeper.wake_up(list(TAGS))
    assert (report.reloaded, len(report.missing)) == (False, 5)
    rig.sleeper.sleep(2)
    assert rig.sleeper.wake_up(["weights"], reload=True).reloaded
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_level_one_is_never_reloaded_unless_asked(rig: Rig) -> None:
    rig.sleeper.update_weights(NEW)
    rig.sleeper.sleep(1)
    assert not rig.sleeper.wake_up().reloaded
    assert rig.is_right(NEW)
    rig.sleeper.sleep(1)
    report = rig.sleeper.wake_up(reload=True)
    assert report.reloaded
    assert rig.is_right(OLD)


def test_weights_that_fell_asleep_invalid_are_reloaded_by_a_plain_wake(rig: Rig) -> None:
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(["weights"])
    rig.sleeper.sleep(1)
    report = rig.sleeper.wake_up()
    assert report.reloaded
    assert rig.is_right()


def test_weights_that_somebody_is_filling_are_left_to_them(rig: Rig) -> None:
    rig.sleeper.update_weights(NEW)
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=False)
    rig.sleeper.sleep(1)
    report = rig.sleeper.wake_up()
    assert (report.reloaded, len(report.missing)) == (False, 5)
    rig.sleeper.update_weights(NEW)
    assert rig.is_right(NEW)


def test_asking_for_a_reload_where_nothing_sleeps_is_answered(rig: Rig) -> None:
    rig.sleeper.sleep(1, ["kv_cache"])
    report = rig.sleeper.wake_up(reload=True)
    assert not report.reloaded
    assert any("nothing was reloaded; see reload_weights()" in note for note in report.notices)


def test_a_reload_without_a_checkpoint_is_refused(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1)
    with pytest.raises(StateError, match="pass reload= to Sleeper"):
        rig.sleeper.wake_up(reload=True)
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_a_checkpoint_that_changed_on_disk_is_not_taken_in_silence(rig_for: RigMaker) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    rig.sleeper.sleep(2)
    source.weights = {**OLD, "k": NEW["k"]}
    epoch = rig.sleeper.weights_epoch
    with pytest.raises(VerificationError, match=r"the checkpoint has changed.*: qk;") as caught:
        rig.sleeper.wake_up()
    assert caught.value.names == ("qk",)
    assert rig.sleeper.state.value == "faulted"
    assert rig.sleeper.weights_epoch == epoch
    with pytest.raises(FaultedError, match=r"wake_up\(reload=True\)"):
        rig.sleeper.require_ready()
    report = rig.sleeper.wake_up(reload=True)
    assert report.weights_epoch == epoch + 1
    assert rig.is_right(source.weights)


def test_a_checkpoint_that_lacks_weights_leaves_the_sleeper_asleep(rig_for: RigMaker) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    rig.sleeper.sleep(2)
    del source.weights["k"]
    with pytest.raises(WeightsIncompleteError) as caught:
        rig.sleeper.wake_up()
    assert caught.value.names == ("k",)
    assert rig.sleeper.state.value == "asleep"
    source.weights["k"] = OLD["k"]
    rig.sleeper.wake_up()
    assert rig.is_right()


@pytest.mark.parametrize("level", [1, 2])
def test_p8_a_wake_that_finds_no_memory_can_be_made_again(rig_for: RigMaker, level: int) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(level)
    before = snapshot(rig)[1:6]
    arenas = len(rig.sleeper._context.ledger.arenas(TAGS))
    assert arenas > 3
    for arena in range(arenas):
        # First every arena is released once more, then they are mapped one by one.
        rig.device.arm(arenas + arena, lambda: OutOfMemoryError("none left"))
        with pytest.raises(OutOfMemoryError):
            rig.sleeper.wake_up()
        assert rig.device.calls.pop() == "unmap"
        assert snapshot(rig)[1:6] == before
        assert rig.sleeper.state.value == "asleep"
        rig.check_books()
    rig.sleeper.wake_up()
    assert rig.is_right()


def test_asking_for_the_checkpoint_fills_weights_that_were_woken_invalid(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=False)
    assert rig.sleeper.missing
    report = rig.sleeper.wake_up(reload=True)
    assert (report.changed, report.reloaded, report.missing) == (True, True, ())
    assert rig.is_right()


@pytest.mark.parametrize("reload", ["yes", 1, 0])
def test_a_reload_that_is_no_flag_is_refused(rig: Rig, reload: Any) -> None:
    rig.sleeper.sleep(1)
    with pytest.raises(ArgumentError, match="none of True, False, None"):
        rig.sleeper.wake_up(reload=reload)
    assert rig.sleeper.is_sleeping
