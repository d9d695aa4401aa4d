"""Which names an invalid tensor still needs: rows, ties, views, and tables that do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.kit import FaultyDevice
from torch import nn

from torpor.errors import ArenaError, WeightsIncompleteError, WeightsMismatchError
from torpor.sleep.coverage import gaps
from torpor.sleep.ledger import Entry
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import SliceTable, WeightSlice


def entry_of(sleeper: Sleeper, name: str) -> Entry:
    return sleeper._context.ledger[name]


@pytest.fixture
def fused(sleeper_for: SleeperMaker) -> Entry:
    return entry_of(sleeper_for(nn.Linear(4, 6, bias=False)), "weight")


def rows(*parts: tuple[str, int, int]) -> SliceTable:
    return SliceTable(
        [
            WeightSlice(name=name, parameter="weight", start=start, length=length)
            for name, start, length in parts
        ]
    )


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        (set(), ["q", "k", "v"]),
        ({"k"}, ["q", "v"]),
        ({"q", "v"}, ["k"]),
        ({"q", "k", "v"}, []),
        ({"other"}, ["q", "k", "v"]),
    ],
)
def test_a_fused_tensor_lists_exactly_what_was_not_written(
    fused: Entry, written: set[str], missing: list[str]
) -> None:
    fused.covered = written
    assert gaps(rows(("q", 0, 2), ("k", 2, 2), ("v", 4, 2)), fused) == missing


@pytest.mark.parametrize("table", [rows(("q", 0, 2), ("k", 3, 3)), rows(("q", 0, 2), ("k", 2, 2))])
def test_rows_that_no_name_reaches_are_never_covered(fused: Entry, table: SliceTable) -> None:
    fused.covered = {"q", "k"}
    assert gaps(table, fused) == ["weight"]


def test_a_tensor_outside_the_table_is_named_itself(fused: Entry) -> None:
    assert gaps(SliceTable([]), fused) == ["weight"]


def test_overlapping_rows_cover_together(fused: Entry) -> None:
    fused.covered = {"q", "k"}
    assert gaps(rows(("q", 0, 4), ("k", 2, 4)), fused) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_one_name_of_a_tie_is_enough_and_only_one_is_asked_for(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(Tied())
    sleeper.sleep(2)
    assert sleeper.wake_up().missing == ("embed.weight",)
    sleeper.update_weights({"head.weight": torch.ones(4, 2)})
    sleeper.require_ready()


class Views(nn.Module):
    """Two parameters that are halves of one storage."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 3)
        self.upper = nn.Parameter(both[0])
        self.lower = nn.Parameter(both[1])


def test_views_of_one_storage_are_needed_all(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(Views())
    sleeper.sleep(2)
    assert set(sleeper.wake_up().missing) == {"upper", "lower"}
    with pytest.raises(WeightsIncompleteError) as caught:
        sleeper.update_weights({"upper": torch.ones(3)})
    assert caught.value.names == ("lower",)
    sleeper.update_weights({"lower": torch.ones(3)})
    sleeper.require_ready()
    sleeper.sleep(1)
    sleeper.wake_up()
    assert sleeper.verify().ok


HALVES = SliceTable(
    [
        WeightSlice(name="q", parameter="weight", start=0, length=3),
        WeightSlice(name="k", parameter="weight", start=3, length=3),
    ]
)


def half_filled(sleeper_for: SleeperMaker, **options: Any) -> Sleeper:
    """Awake after level 2, with one half of the only weight sent."""
    sleeper = sleeper_for(nn.Linear(4, 6, bias=False), slices=HALVES, **options)
    sleeper.sleep(2)
    sleeper.wake_up(reload=False)
    with pytest.raises(WeightsIncompleteError):
        sleeper.update_weights({"q": torch.ones(3, 4)})
    assert sleeper.missing == ("k",)
    return sleeper


def fill_the_other_half(sleeper: Sleeper) -> None:
    """The half that was sent before the memory went does not count any more."""
    with pytest.raises(WeightsIncompleteError) as caught:
        sleeper.update_weights({"k": torch.ones(3, 4)})
    assert caught.value.names == ("q",)
    sleeper.update_weights({"q": torch.ones(3, 4)})
    sleeper.require_ready()


def test_coverage_does_not_outlive_the_memory(sleeper_for: SleeperMaker) -> None:
    sleeper = half_filled(sleeper_for)
    sleeper.sleep(1)
    assert sleeper.missing == ("q", "k"), "asleep already"
    assert sleeper.wake_up().missing == ("q", "k")
    fill_the_other_half(sleeper)


def test_coverage_does_not_outlive_memory_that_a_rollback_brought_back(
    sleeper_for: SleeperMaker,
) -> None:
    device = FaultyDevice()
    sleeper = half_filled(sleeper_for, device=device)
    device.calls.clear()
    device.arm(5, lambda: ArenaError("no"), after=True)
    with pytest.raises(ArenaError):
        sleeper.sleep(1)
    assert "unmap" in device.calls
    assert sleeper.missing == ("q", "k")
    fill_the_other_half(sleeper)


def test_coverage_does_not_outlive_an_update_that_failed(sleeper_for: SleeperMaker) -> None:
    sleeper = half_filled(sleeper_for)
    with pytest.raises(WeightsMismatchError):
        sleeper.update_weights([("k", torch.ones(3, 4)), ("k", torch.ones(1))])
    assert sleeper.missing == ("q", "k")
