"""Filling memory that came back: what counts as valid afterwards, and what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.sleep.kit import Rig, weights_of

from torpor.errors import ArenaError, HostCopyError, OwnershipError
from torpor.sleep.poison import Poison
from torpor.sleep.restore import (
    clear_caches,
    copy_again,
    count_as_lost,
    poison,
    recover,
    recover_copies,
    restore,
    settle,
)

RigMaker = Callable[..., Rig]
OLD = weights_of(1)


@pytest.fixture
def rig(rig_for: RigMaker) -> Rig:
    """Awake, with host copies of everything."""
    made = rig_for(weights=OLD)
    made.sleeper.sleep(1)
    made.sleeper.wake_up()
    return made


def test_poison_fills_whole_tensors_and_only_them(rig: Rig, pattern: int) -> None:
    rig.sleeper._context.poison = Poison(pattern)
    poison(rig.sleeper._context, [rig.entry("low")])
    assert rig.model.low.detach().view(torch.uint8).unique().tolist() == [pattern]
    assert torch.equal(rig.model.embed, OLD["embed"])
    rig.sleeper._context.poison = None
    poison(rig.sleeper._context, [rig.entry("embed")])
    assert torch.equal(rig.model.embed, OLD["embed"])


def test_only_official_copies_are_restored(rig: Rig) -> None:
    context = rig.sleeper._context
    embed, low = rig.entry("embed"), rig.entry("low")
    low.digest = "0" * 32  # Its copy is of other content now.
    rig.model.embed.data.zero_()
    rig.model.low.data.zero_()
    assert restore(context, [embed, low]) == (embed.nbytes, [])
    assert torch.equal(rig.model.embed, OLD["embed"])
    assert rig.model.low.eq(0).all()
    assert settle(context, [embed, low]) == [], "without a copy it is missing, not damaged"
    assert (embed.valid, low.valid) == (True, False)


def test_a_copy_that_cannot_be_read_is_told_and_does_not_stop_the_rest(rig: Rig) -> None:
    context = rig.sleeper._context
    entries = [rig.entry("embed"), rig.entry("low")]
    rig.model.embed.data.zero_()
    rig.model.low.data.zero_()
    rig.device.arm(0, lambda: HostCopyError("gone"))
    restored, errors = restore(context, entries)
    assert restored == entries[1].nbytes
    assert [str(error) for error in errors] == ["gone"]
    assert settle(context, entries) == [entries[0]]
    assert copy_again(context, [entries[0]]) == ([], [])
    assert rig.is_right()


def test_a_lost_tensor_is_invalid_unless_nothing_is_expected_of_it(rig: Rig) -> None:
    names = ("embed", "rope", "normed", "kv", "count", "work")
    for name in names:
        rig.entry(name).covered = {name}
        count_as_lost(rig.entry(name))
    assert [rig.entry(name).valid for name in names] == [False] * 5 + [True]
    assert not any(rig.entry(name).covered for name in names)
    recover(rig.sleeper._context, list(rig.sleeper._context.ledger))
    assert rig.is_right()


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("poisoned", [True, False])
def test_a_cache_is_zeroed_unless_its_memory_is_known_to_be(
    rig: Rig, fresh: bool, poisoned: bool
) -> None:
    context = rig.sleeper._context
    if not poisoned:
        context.poison = None
    rig.device.calls.clear()
    clear_caches(context, [rig.entry("kv")], fresh=fresh)
    assert ("fill" in rig.device.calls) == (poisoned or not fresh)
    assert rig.entry("kv").valid


def test_a_cache_with_a_refill_is_invalid_until_it_has_run(rig: Rig) -> None:
    entry = rig.entry("sinks")
    clear_caches(rig.sleeper._context, [entry], fresh=False)
    assert (entry.valid, entry.stale) == (False, True)
    assert rig.model.sinks.eq(0).all()


def test_a_cache_that_could_not_be_cleared_is_invalid(rig: Rig) -> None:
    rig.device.arm(0, lambda: ArenaError("no"))
    with pytest.raises(ArenaError):
        clear_caches(rig.sleeper._context, [rig.entry("kv")], fresh=False)
    assert not rig.entry("kv").valid


def test_a_reset_that_fails_is_typed_and_leaves_the_tensor_invalid(rig: Rig) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no")

    rig.entry("count").reset = fail
    with pytest.raises(OwnershipError, match="the reset of 'count' failed: no"):
        clear_caches(rig.sleeper._context, [rig.entry("count")], fresh=False)
    assert not rig.entry("count").valid


def test_recovery_tries_twice_and_says_what_it_could_not_bring_back(rig: Rig) -> None:
    context = rig.sleeper._context
    entry = rig.entry("embed")
    rig.model.embed.data.zero_()
    entry.valid = False
    rig.device.arm(0, lambda: ArenaError("once"))
    recover_copies(context, [entry])
    assert entry.valid
    assert torch.equal(rig.model.embed, OLD["embed"])
    rig.model.embed.data.zero_()
    entry.valid = False
    rig.device.arm(0, lambda: ArenaError("always"), lasting=True)
    recover_copies(context, [entry])
    rig.device.disarm()
    assert not entry.valid
    assert rig.sleeper.missing == ("embed",)
