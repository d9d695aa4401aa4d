"""Rebuilds run after their sources, in place, and never leave half of their work as content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.kit import MemorySource
from torch import nn

from torpor.errors import OwnershipError, VerificationError, WeightsIncompleteError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.derive import dependants, sources_first
from torpor.sleep.sleeper import Sleeper

DERIVED = OwnershipClass.DERIVED


class Chain(nn.Module):
    """a -> twice -> four; ``four`` lies before its source."""

    four: torch.Tensor
    twice: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("four", torch.zeros(3), persistent=False)
        self.register_buffer("twice", torch.zeros(3), persistent=False)
        self.a = nn.Parameter(torch.ones(3))
        self.ran: list[str] = []

    def rebuild_twice(self) -> torch.Tensor:
        self.ran.append("twice")
        return self.a.detach() * 2

    def rebuild_four(self) -> torch.Tensor:
        self.ran.append("four")
        return self.twice * 2


def declared(chain: Chain, sleeper: Sleeper) -> None:
    sleeper.own(chain.twice, name="twice", cls=DERIVED, sources=["a"], rebuild=chain.rebuild_twice)
    sleeper.own(
        chain.four, name="four", cls=DERIVED, sources=[chain.twice], rebuild=chain.rebuild_four
    )
    chain.ran.clear()


@pytest.fixture
def chain() -> Chain:
    return Chain()


@pytest.fixture
def sleeper(chain: Chain, sleeper_for: SleeperMaker) -> Sleeper:
    made = sleeper_for(chain)
    declared(chain, made)
    return made


def test_declaring_computes_the_content(chain: Chain, sleeper: Sleeper) -> None:
    assert chain.four.tolist() == [4, 4, 4]


def test_sources_come_first_whatever_the_placement(sleeper: Sleeper) -> None:
    ledger = sleeper._context.ledger
    assert [entry.name for entry in ledger] == ["a", "four", "twice"]
    assert [entry.name for entry in sources_first(ledger)] == ["a", "twice", "four"]


def test_dependants_follow_through_the_whole_chain(sleeper: Sleeper) -> None:
    context = sleeper._context
    names = {
        name: [entry.name for entry in dependants(context, [context.ledger[name]])]
        for name in ("a", "twice", "four")
    }
    assert names == {"a": ["twice", "four"], "twice": ["four"], "four": []}


def test_an_update_rebuilds_the_chain_in_order_and_in_place(chain: Chain, sleeper: Sleeper) -> None:
    addresses = chain.twice.data_ptr(), chain.four.data_ptr()
    report = sleeper.update_weights({"a": torch.full((3,), 5.0)})
    assert chain.ran == ["twice", "four"]
    assert chain.four.tolist() == [20, 20, 20]
    assert (chain.twice.data_ptr(), chain.four.data_ptr()) == addresses
    assert set(report.changed) == {"a", "twice", "four"}
    assert sleeper.verify().ok


def test_the_same_payload_rebuilds_nothing(chain: Chain, sleeper: Sleeper) -> None:
    assert sleeper.update_weights({"a": torch.ones(3)}).changed == ()
    assert chain.ran == []


def test_level_two_rebuilds_once_the_sources_are_back(chain: Chain, sleeper: Sleeper) -> None:
    sleeper.sleep(2)
    report = sleeper.wake_up()
    assert chain.ran == []
    assert report.missing == ("a",), "what a rebuild will fill is not asked for"
    sleeper.update_weights({"a": torch.full((3,), 3.0)})
    assert chain.ran == ["twice", "four"]
    assert chain.four.tolist() == [12, 12, 12]


def test_level_one_restores_without_rebuilding(chain: Chain, sleeper: Sleeper) -> None:
    sleeper.sleep(1)
    assert sleeper.wake_up().rebuilt == ()
    assert chain.ran == []


def boom() -> torch.Tensor:
    raise ZeroDivisionError("no such luck")


@pytest.mark.parametrize(
    ("rebuild", "said"),
    [
        (boom, "the rebuild of 'twice' failed: no such luck"),
        (lambda: torch.zeros(4), r"returned \(4,\) torch.float32, not \(3,\) torch.float32"),
        (lambda: torch.zeros(3, dtype=torch.float64), "torch.float64, not"),
        (lambda: [1.0, 2.0, 3.0], "returned a list"),
    ],
)
def test_a_rebuild_that_fails_undoes_the_update(
    chain: Chain, sleeper: Sleeper, rebuild: Callable[[], Any], said: str
) -> None:
    sleeper.sleep(1)
    sleeper.wake_up()
    entry, good = sleeper._context.ledger["twice"], sleeper._context.ledger["twice"].rebuild
    entry.rebuild = rebuild
    epoch = sleeper.weights_epoch
    with pytest.raises(OwnershipError, match=said) as caught:
        sleeper.update_weights({"a": torch.full((3,), 9.0)})
    assert caught.value.__notes__ == ["the update was undone; the weights are as before"]
    assert chain.a.tolist() == [1, 1, 1]
    assert chain.twice.tolist() == [2, 2, 2]
    assert chain.four.tolist() == [4, 4, 4]
    assert sleeper.weights_epoch == epoch
    assert sleeper.verify().ok
    entry.rebuild = good
    sleeper.update_weights({"a": torch.full((3,), 9.0)})
    assert chain.four.tolist() == [36, 36, 36]


def test_a_rebuild_that_fails_without_host_copies_names_what_is_lost(
    chain: Chain, sleeper: Sleeper
) -> None:
    sleeper._context.ledger["twice"].rebuild = boom
    with pytest.raises(OwnershipError) as caught:
        sleeper.update_weights({"a": torch.full((3,), 9.0)})
    # What was computed from it comes back by its rebuild, or has not been touched.
    assert "1 tensors had no host copy and are invalid" in caught.value.__notes__[0]
    with pytest.raises(WeightsIncompleteError) as incomplete:
        sleeper.require_ready()
    assert incomplete.value.names == ("a",)


def test_half_a_rebuild_is_not_content(chain: Chain, sleeper: Sleeper) -> None:
    def interrupted() -> None:
        chain.twice[:1] = 77
        raise KeyboardInterrupt

    good = sleeper._context.ledger["twice"].rebuild
    sleeper._context.ledger["twice"].rebuild = interrupted
    chain.a.data.fill_(2)
    with pytest.raises(KeyboardInterrupt):
        sleeper.sleep(1)  # adopts what was written and rebuilds
    sleeper._context.ledger["twice"].rebuild = good
    assert sleeper.tag_states == {"weights": "mapped_invalid"}
    with pytest.raises(WeightsIncompleteError, match="twice"):
        sleeper.require_ready()
    sleeper.sleep(1)
    sleeper.wake_up()
    assert chain.four.tolist() == [8, 8, 8]


def test_a_rebuild_that_is_not_deterministic_is_found_at_wake(
    chain: Chain, sleeper_for: SleeperMaker
) -> None:
    sleeper = sleeper_for(chain, reload=MemorySource({"a": torch.ones(3)}))
    ticks = iter(range(1, 100))
    sleeper.own(
        chain.twice, name="twice", cls=DERIVED, sources=["a"],
        rebuild=lambda: torch.full((3,), float(next(ticks))),
    )  # fmt: skip
    sleeper.reload_weights()
    sleeper.sleep(2)
    with pytest.raises(VerificationError) as caught:
        sleeper.wake_up()
    assert caught.value.names == ("twice",)
    assert sleeper.state.value == "faulted"
    sleeper.wake_up(reload=True)
    assert sleeper.verify().ok


def test_a_source_that_left_its_memory_does_not_stand_in_the_way(
    chain: Chain, sleeper: Sleeper
) -> None:
    chain.a = nn.Parameter(torch.full((3,), 6.0))
    report = sleeper.sleep(1)
    assert report.escaped == ("a",)
    sleeper.wake_up()
    assert chain.four.tolist() == [24, 24, 24]
    sleeper.sleep(2)
    assert sleeper.wake_up().missing == ()
    assert chain.four.tolist() == [24, 24, 24]


@pytest.mark.parametrize("sources", [["a"], ["twice"], ["four"]])
def test_a_circle_of_sources_is_refused(chain: Chain, sleeper: Sleeper, sources: list[str]) -> None:
    with pytest.raises(OwnershipError, match="'a' would be computed from itself"):
        sleeper.own(chain.a, name="a", cls=DERIVED, sources=sources, rebuild=lambda: chain.a.data)
    sleeper.sleep(1)
    sleeper.wake_up()
    assert chain.four.tolist() == [4, 4, 4]


class Apart(nn.Module):
    """A derived tensor with a source under each of two tags, itself under a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = torch.ones(2)
        self.sum = torch.zeros(2)


@pytest.fixture
def apart() -> Apart:
    return Apart()


def own_apart(apart: Apart, sleeper: Sleeper, tag: str) -> None:
    sleeper.own(apart.b, name="b", cls=OwnershipClass.BUFFER, tag="optimizer")
    sleeper.own(
        apart.sum, name="sum", cls=DERIVED, tag=tag, sources=["a", "b"],
        rebuild=lambda: apart.a.detach() + apart.b,
    )  # fmt: skip


def test_what_cannot_be_rebuilt_yet_is_not_answered_with(
    apart: Apart, sleeper_for: SleeperMaker
) -> None:
    sleeper = sleeper_for(apart)
    own_apart(apart, sleeper, "weights")
    sleeper.sleep(1, ["optimizer"])
    sleeper.update_weights({"a": torch.full((2,), 5.0)})
    assert sleeper.tag_states == {"weights": "mapped_invalid", "optimizer": "released"}
    with pytest.raises(WeightsIncompleteError, match="sum is computed from tensors"):
        sleeper.require_ready("weights")
    report = sleeper.wake_up()
    assert report.rebuilt == ("sum",)
    assert apart.sum.tolist() == [6, 6]
    assert sleeper.verify().ok


def test_nothing_is_made_from_what_is_out_of_date(apart: Apart, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(apart)
    own_apart(apart, sleeper, "weights")
    twice = torch.zeros(2)
    sleeper.own(twice, name="twice", cls=DERIVED, sources=["sum"], rebuild=lambda: apart.sum * 2)
    sleeper.sleep(1, ["optimizer"])
    sleeper.update_weights({"a": torch.full((2,), 5.0)})
    assert not sleeper._context.ledger["twice"].valid
    assert sleeper.wake_up().rebuilt == ("sum", "twice")
    assert twice.tolist() == [12, 12]


def test_what_sleeps_while_its_source_changes_is_rebuilt_at_wake(
    apart: Apart, sleeper_for: SleeperMaker
) -> None:
    sleeper = sleeper_for(apart)
    own_apart(apart, sleeper, "graphs")
    sleeper.sleep(1, ["graphs"])
    sleeper.update_weights({"a": torch.full((2,), 5.0)})
    report = sleeper.wake_up()
    assert report.rebuilt == ("sum",)
    assert apart.sum.tolist() == [6, 6]


def test_a_failed_update_leaves_what_sleeps_alone(apart: Apart, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(apart)
    own_apart(apart, sleeper, "graphs")
    sleeper.sleep(1)
    sleeper.wake_up(["weights", "optimizer"])
    sleeper.begin_update()
    sleeper.load_weights([("a", torch.full((2,), 5.0))])
    with pytest.raises(ValueError, match="no weight 'c'"):
        sleeper.load_weights([("c", torch.zeros(2))])
    sleeper.wake_up()
    assert apart.sum.tolist() == [2, 2]
    assert sleeper.verify().ok
