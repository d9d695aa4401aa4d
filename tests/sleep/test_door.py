"""The door: updates whole, partial, pair by pair, undone, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sleep.kit import FileSource, MemorySource, Rig, expected, weights_of
from tests.sleep.samples import bits

from torpor.errors import (
    ArgumentError,
    AsleepError,
    OwnershipError,
    StateError,
    WeightsError,
    WeightsIncompleteError,
    WeightsMismatchError,
)

RigMaker = Callable[..., Rig]
OLD, NEW = weights_of(1), weights_of(2)
BAD = ("q", torch.zeros(3))


def contents(rig: Rig) -> dict[str, bytes]:
    """The bytes of everything that has official content."""
    return {
        entry.name: bits(tensor)
        for entry in rig.sleeper._context.ledger
        if entry.policy.verified and (tensor := entry.tensor()) is not None
    }


def copied(rig: Rig) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()


def test_an_update_gives_what_a_fresh_model_with_these_weights_gives(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    assert rig.is_right(OLD)
    report = rig.sleeper.update_weights(NEW, version="step-7")
    assert rig.is_right(NEW)
    assert report.version == rig.sleeper.weights_version == "step-7"
    assert report.updated == 5
    assert report.updated_bytes == sum(value.nbytes for value in NEW.values())
    assert set(report.changed) == {"embed", "qk", "low", "correction", "normed", "doubled"}
    assert report.weights_epoch == rig.sleeper.weights_epoch == 2
    assert rig.sleeper.verify().ok
    rig.check_books()


@pytest.mark.parametrize(
    "payload",
    [dict(NEW), list(NEW.items()), iter(NEW.items()), MemorySource(NEW)],
    ids=["mapping", "list", "iterator", "source"],
)
def test_any_kind_of_payload_will_do(rig_for: RigMaker, payload: Any) -> None:
    rig = rig_for(weights=OLD)
    if isinstance(payload, Iterator):
        payload = iter(NEW.items())
    rig.sleeper.update_weights(payload)
    assert rig.is_right(NEW)


# P11 -------------------------------------------------------------------------------------------


def test_p11_the_same_payload_is_a_bitwise_no_op(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    before, epoch, digests = contents(rig), rig.sleeper.weights_epoch, rig.sleeper.digests()
    report = rig.sleeper.update_weights(OLD)
    assert report.changed == ()
    assert (contents(rig), rig.sleeper.weights_epoch) == (before, epoch)
    assert rig.sleeper.digests() == digests
    assert rig.sleeper.sleep(1).copied_bytes == 0


def test_p11_reloading_the_same_checkpoint_is_a_bitwise_no_op(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    before, epoch = contents(rig), rig.sleeper.weights_epoch
    assert rig.sleeper.reload_weights().changed == ()
    assert (contents(rig), rig.sleeper.weights_epoch) == (before, epoch)


def test_p11_a_partial_payload_touches_only_its_keys(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    before = contents(rig)
    versions = {name: value._version for name, value in rig.model.named_parameters()}
    report = rig.sleeper.update_weights({"k": NEW["k"]})
    after = contents(rig)
    assert report.changed == ("qk",)
    assert {name for name in before if before[name] != after[name]} == {"qk"}
    assert torch.equal(rig.model.qk[:8], OLD["q"])
    changed = {
        name for name, value in rig.model.named_parameters() if value._version != versions[name]
    }
    assert changed == {"qk"}
    assert rig.is_right({**OLD, "k": NEW["k"]})


def test_the_models_own_weights_can_be_sent_to_it(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    qk = rig.model.qk.detach()
    report = rig.sleeper.update_weights({"q": qk[:8], "k": qk[8:], "low": rig.model.low})
    assert report.changed == ()
    assert rig.is_right()


def test_epochs_grow_only_when_bytes_change_and_versions_stay_with_the_bytes(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD)
    seen = []
    for payload, version in ((NEW, "a"), (NEW, "b"), (OLD, None), ({}, None)):
        rig.sleeper.update_weights(payload, version)
        seen.append((rig.sleeper.weights_epoch, rig.sleeper.weights_version))
    assert seen == [(2, "a"), (2, "b"), (3, None), (3, None)]
    assert rig.sleeper.kv_epoch == 0


# pair by pair ----------------------------------------------------------------------------------


def test_pairs_can_be_pushed_one_by_one(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.begin_update("pushed")
    written = [rig.sleeper.load_weights([pair]) for pair in NEW.items()]
    assert written == [{"embed"}, {"qk"}, {"qk"}, {"low"}, {"correction"}]
    assert rig.sleeper.update_is_open
    assert rig.sleeper.weights_version is None
    report = rig.sleeper.finish_update()
    assert not rig.sleeper.update_is_open
    assert (report.version, report.updated) == ("pushed", 5)
    assert rig.is_right(NEW)


def test_load_weights_opens_an_update_and_a_forward_finishes_it(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.load_weights(NEW.items())
    epoch = rig.sleeper.weights_epoch
    answer = rig.model(torch.arange(24.0).reshape(3, 8) / 10 - 1)
    assert torch.equal(answer, expected(NEW))
    assert not rig.sleeper.update_is_open
    assert rig.sleeper.weights_epoch == epoch + 1


def test_a_sleep_finishes_an_open_update(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.load_weights(NEW.items())
    report = rig.sleeper.sleep(1)
    assert report.adopted == (), "it is no foreign write"
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)


def test_verify_finishes_an_open_update(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.load_weights(NEW.items())
    assert rig.sleeper.verify().ok
    assert not rig.sleeper.update_is_open


def test_only_one_update_is_open_at_a_time(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.begin_update()
    rig.sleeper.load_weights([("embed", NEW["embed"])])
    for call in (rig.sleeper.begin_update, lambda: rig.sleeper.update_weights(OLD)):
        with pytest.raises(StateError, match="open already; finish_update"):
            call()
    rig.sleeper.finish_update()
    assert rig.is_right({**OLD, "embed": NEW["embed"]}), "the refused calls changed nothing"


def test_finishing_what_was_not_begun_is_refused(rig_for: RigMaker) -> None:
    with pytest.raises(StateError, match=r"no update is open; begin_update\(\)"):
        rig_for(weights=OLD).sleeper.finish_update()


# undoing ---------------------------------------------------------------------------------------


def raising_pairs() -> Iterator[tuple[str, torch.Tensor]]:
    yield "embed", NEW["embed"]
    raise ConnectionError("the trainer has gone")


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ([*NEW.items(), BAD], WeightsMismatchError),
        ([("embed", NEW["embed"]), ("nothing", torch.zeros(1))], WeightsMismatchError),
        ([("q", NEW["q"]), ("k", torch.full((8, 8), float("nan")))], WeightsError),
    ],
)
def test_a_pair_that_fails_undoes_the_whole_update(
    rig_for: RigMaker, pairs: Any, error: type[Exception]
) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    before, epoch = contents(rig), rig.sleeper.weights_epoch
    with pytest.raises(error) as caught:
        rig.sleeper.update_weights(pairs, version="bad")
    assert caught.value.__notes__ == ["the update was undone; the weights are as before"]
    assert contents(rig) == before
    assert (rig.sleeper.weights_epoch, rig.sleeper.weights_version) == (epoch, None)
    assert rig.is_right(OLD)
    rig.sleeper.update_weights(NEW)
    assert rig.is_right(NEW)


def test_the_callers_own_error_comes_through_and_undoes_the_update(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    with pytest.raises(ConnectionError, match="gone"):
        rig.sleeper.update_weights(raising_pairs())
    assert rig.is_right(OLD)


def test_without_host_copies_what_was_touched_is_invalid_by_name(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    with pytest.raises(WeightsMismatchError) as caught:
        rig.sleeper.update_weights([("embed", NEW["embed"]), ("q", NEW["q"]), BAD])
    assert "no host copy" in caught.value.__notes__[0]
    assert "embed" in caught.value.__notes__[0]
    assert rig.sleeper.tag_states["weights"] == "mapped_invalid"
    assert rig.sleeper.missing == ("embed", "q", "k")
    with pytest.raises(WeightsIncompleteError) as incomplete:
        rig.output()
    assert incomplete.value.names == ("embed", "q", "k")
    with pytest.raises(WeightsIncompleteError):
        rig.model(torch.zeros(3, 8))
    rig.sleeper.update_weights({name: NEW[name] for name in ("embed", "q", "k")})
    assert rig.is_right({**NEW, "low": OLD["low"], "correction": OLD["correction"]})


def test_an_implicit_update_that_failed_has_to_be_begun_anew(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    rig.sleeper.load_weights([("embed", NEW["embed"])])
    with pytest.raises(WeightsMismatchError):
        rig.sleeper.load_weights([BAD])
    # The rest of the sequence must not be taken for an update of its own.
    with pytest.raises(StateError, match=r"undone after: WeightsMismatchError.*begin_update\(\)"):
        rig.sleeper.load_weights([("k", NEW["k"])])
    with pytest.raises(StateError, match="undone after"):
        rig.sleeper.finish_update()
    assert rig.is_right(OLD)
    rig.sleeper.begin_update()
    rig.sleeper.load_weights(NEW.items())
    rig.sleeper.finish_update()
    assert rig.is_right(NEW)


def test_a_failed_whole_update_does_not_stand_in_the_way_of_pushed_pairs(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    with pytest.raises(WeightsMismatchError):
        rig.sleeper.update_weights([BAD])
    rig.sleeper.load_weights(NEW.items())
    assert rig.is_right(NEW)


def test_undoing_survives_one_failure_of_the_device(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    rig.device.arm(0, lambda: OwnershipError("the device"))
    with pytest.raises(WeightsMismatchError):
        rig.sleeper.update_weights([("embed", NEW["embed"]), BAD])
    assert rig.device.raised
    assert rig.is_right(OLD)


def test_a_refill_that_was_run_is_undone_with_its_update(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    copied(rig)
    rig.device.arm(1, lambda: OwnershipError("the device"))  # after the rebuilds
    with pytest.raises(OwnershipError):
        rig.sleeper.update_weights(NEW)
    assert rig.is_right(OLD)


# asleep and after level two --------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda rig: rig.sleeper.update_weights(NEW),
        lambda rig: rig.sleeper.begin_update(),
        lambda rig: rig.sleeper.load_weights(NEW.items()),
        lambda rig: rig.sleeper.reload_weights(),
    ],
    ids=["update", "begin", "load", "reload"],
)
def test_an_update_while_asleep_is_refused(
    rig_for: RigMaker, level: int, call: Callable[[Rig], Any]
) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(level, ["weights"])
    with pytest.raises(AsleepError, match=r"wake_up\(\['weights'\], reload=False\)"):
        call(rig)
    assert not rig.sleeper.update_is_open
    rig.sleeper.wake_up()
    assert rig.is_right(OLD)


def test_an_update_while_only_the_cache_sleeps_is_fine(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(1, ["kv_cache"])
    rig.sleeper.update_weights(NEW)
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)


def test_p10_level_two_ends_in_typed_errors_until_coverage_is_proven(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(2)
    report = rig.sleeper.wake_up(reload=False)
    assert report.missing == ("embed", "q", "k", "low")
    assert rig.sleeper.tag_states["weights"] == "mapped_invalid"
    left = ["embed", "q", "k", "low"]
    while left:
        for use in (rig.output, lambda: rig.model(torch.zeros(3, 8)), rig.model.state_dict):
            with pytest.raises(WeightsIncompleteError) as caught:
                use()
            assert caught.value.names == tuple(left)
        name = left.pop()
        if left:
            with pytest.raises(WeightsIncompleteError) as caught:
                rig.sleeper.update_weights({name: NEW[name]})
            assert caught.value.names == tuple(left)
        else:
            rig.sleeper.update_weights({name: NEW[name]})
    # The correction is a buffer that no checkpoint of this sleeper holds: it survived.
    assert rig.is_right({**NEW, "correction": OLD["correction"]})


def test_p10_pushed_pairs_are_covered_across_several_updates(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=False)
    rig.sleeper.load_weights([("q", NEW["q"]), ("low", NEW["low"])])
    with pytest.raises(WeightsIncompleteError) as caught:
        rig.sleeper.finish_update()
    assert caught.value.names == ("embed", "k")
    assert not rig.sleeper.update_is_open
    rig.sleeper.load_weights([("k", NEW["k"]), ("embed", NEW["embed"])])
    assert rig.is_right({**NEW, "correction": OLD["correction"]})


def test_p10_a_failed_update_of_invalid_weights_leaves_all_of_them_missing(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.sleep(2)
    rig.sleeper.wake_up(reload=False)
    with pytest.raises(WeightsMismatchError):
        rig.sleeper.update_weights([*NEW.items(), BAD])
    assert rig.sleeper.missing == ("embed", "q", "k", "low")


def test_a_persistent_buffer_of_the_checkpoint_counts_like_a_parameter(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.sleep(2)
    assert rig.sleeper.wake_up(reload=False).missing == ("embed", "q", "k", "low", "correction")


def test_updating_under_inference_mode_is_refused(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD)
    with torch.inference_mode(), pytest.raises(OwnershipError, match="inference mode"):
        rig.sleeper.update_weights(NEW)
    assert rig.is_right(OLD)


# host copies -----------------------------------------------------------------------------------

KEPT = 8 * 8 * 4  # embed, q and k have this many bytes each


@pytest.mark.parametrize("policy", ["defer", "write_through", "drop"])
def test_exactly_what_changed_is_copied_and_when_the_policy_says(
    rig_for: RigMaker, policy: str
) -> None:
    rig = rig_for(weights=OLD, host_copy=policy)
    copied(rig)
    assert rig.sleeper.sleep(1).copied_bytes == 0
    rig.sleeper.wake_up()
    before = rig.sleeper.status()["host_file_bytes"]
    rig.sleeper.update_weights({"k": NEW["k"]})
    kinds = {row.name: row.host_copy for row in rig.sleeper.table()}
    assert kinds["embed"] == "file"
    assert kinds["qk"] == ("file" if policy == "write_through" else None)
    assert (rig.entry("qk").host is None) == (policy == "drop")
    slept = rig.sleeper.sleep(1)
    assert slept.copied_bytes == (0 if policy == "write_through" else 2 * KEPT)
    assert rig.sleeper.status()["host_file_bytes"] == before
    rig.sleeper.wake_up()
    assert rig.is_right({**OLD, "k": NEW["k"]})


def test_write_through_that_finds_no_room_is_deferred_with_a_notice(
    rig_for: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    rig = rig_for(weights=OLD, host_copy="write_through")
    monkeypatch.setattr(os, "pwrite", full)
    report = rig.sleeper.update_weights(NEW)
    assert "deferred to the next sleep" in report.notices[0]
    assert "No space left" in report.notices[0]
    assert rig.is_right(NEW)
    monkeypatch.undo()
    assert rig.sleeper.sleep(1).copied_bytes > 0
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)


def test_an_update_from_a_file_leaves_nothing_to_copy_of_what_it_holds(
    rig_for: RigMaker, tmp_path: Path
) -> None:
    rig = rig_for(weights=OLD)
    rig.sleeper.update_weights(FileSource(tmp_path / "new.safetensors", NEW))
    kinds = {row.name: row.host_copy for row in rig.sleeper.table()}
    assert {name for name, kind in kinds.items() if kind == "checkpoint"} == {
        "embed", "qk", "low", "correction"
    }  # fmt: skip
    report = rig.sleeper.sleep(1)
    assert report.copied_bytes == sum(
        entry.nbytes for name in ("rope", "normed", "doubled") if (entry := rig.entry(name))
    )
    rig.sleeper.wake_up()
    assert rig.is_right(NEW)


def test_the_checkpoint_is_the_source_only_after_a_full_reload_from_it(rig_for: RigMaker) -> None:
    source = MemorySource(OLD)
    rig = rig_for(weights=OLD, reload=source)
    epochs = rig.sleeper._context.epochs
    assert epochs.from_checkpoint
    rig.sleeper.update_weights({"k": NEW["k"]})
    assert not epochs.from_checkpoint
    source.weights = {"q": OLD["q"]}
    rig.sleeper.reload_weights()
    assert not epochs.from_checkpoint, "the rest is still the update's"
    source.weights = dict(OLD)
    rig.sleeper.reload_weights()
    assert epochs.from_checkpoint
    assert rig.is_right(OLD)


def test_reloading_without_a_checkpoint_is_refused(rig_for: RigMaker) -> None:
    with pytest.raises(StateError, match="pass reload= to Sleeper"):
        rig_for(weights=OLD).sleeper.reload_weights()


def test_content_that_nobody_named_has_no_version(rig_for: RigMaker) -> None:
    rig = rig_for(weights=OLD, reload=MemorySource(OLD))
    rig.sleeper.update_weights(NEW, version="v2")
    assert rig.sleeper.weights_version == "v2"
    rig.sleeper.update_weights(NEW)
    assert rig.sleeper.weights_version == "v2", "the same bytes are still those that were named"
    rig.sleeper.reload_weights()
    assert rig.sleeper.weights_version is None


@pytest.mark.parametrize("pairs", [None, 5])
def test_pushing_what_holds_no_pairs_changes_nothing(rig_for: RigMaker, pairs: Any) -> None:
    rig = rig_for(weights=OLD)
    with pytest.raises(ArgumentError, match="holds no weights"):
        rig.sleeper.load_weights(pairs)
    assert not rig.sleeper.update_is_open
    rig.sleeper.load_weights(NEW.items())
    assert rig.is_right(NEW)
