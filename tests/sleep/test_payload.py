"""What comes through the door is checked, name by name, before a byte changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import bits
from torch import nn

from torpor.errors import (
    ArgumentError,
    AsleepError,
    OwnershipError,
    TorporError,
    WeightsError,
    WeightsMismatchError,
)
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import SliceTable, WeightSlice


class Mixed(nn.Module):
    """Tensors of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("eight", torch.ones(2).to(torch.float8_e4m3fn))


@pytest.fixture
def model() -> Mixed:
    return Mixed()


@pytest.fixture
def sleeper(model: Mixed, sleeper_for: SleeperMaker) -> Sleeper:
    return sleeper_for(model)


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[Any, type[TorporError], str]] = [
    (("wieght", torch.ones(2, 3)), WeightsMismatchError, "did you mean 'weight'"),
    (("zzz", torch.ones(2, 3)), WeightsMismatchError, "check the names of the source"),
    (("weight", torch.ones(3, 2)), WeightsMismatchError, r"\(3, 2\); the model needs \(2, 3\)"),
    (("weight", torch.ones(6)), WeightsMismatchError, r"has shape \(6,\)"),
    (("weight", torch.ones(2, 3, dtype=torch.int8)), WeightsMismatchError, "int8, which cannot"),
    (("weight", torch.ones(2, 3, dtype=torch.complex64)), WeightsMismatchError, "complex64, which"),
    (("weight", torch.ones(2, 3, dtype=torch.bool)), WeightsMismatchError, "bool, which cannot"),
    (("steps", torch.tensor(4.0)), WeightsMismatchError, "float32, which cannot become"),
    (("steps", torch.tensor(4, dtype=torch.int32)), WeightsMismatchError, "int32, which cannot"),
    (("mask", torch.tensor([1, 0])), WeightsMismatchError, "int64, which cannot become torch.bool"),
    (("weight", torch.ones(2, 3, device="meta")), WeightsMismatchError, "meta device"),
    (("weight", torch.ones(2, 3).to_sparse()), WeightsMismatchError, "sparse_coo; send a plain"),
    (("weight", torch.tensor([[1, NAN, 1], [1, 1, 1]])), WeightsError, "'weight' contains NaN"),
    (("weight", torch.tensor([[INF, -INF, 1], [1, NAN, 1]])), WeightsError, "contains NaN"),
    (("low", torch.tensor([NAN, 1, 1]).bfloat16()), WeightsError, "check_nan=False"),
    (("eight", torch.tensor([NAN, 1]).to(torch.float8_e4m3fn)), WeightsError, "contains NaN"),
    (("weight", [[1.0] * 3] * 2), ArgumentError, "'weight' is a list, not a tensor"),
    (("weight",), ArgumentError, r"\(name, tensor\) pairs, got tuple"),
    ((b"weight", torch.ones(2, 3)), ArgumentError, "pairs, got tuple"),
    ("weight", ArgumentError, "pairs, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "error", "said"), BAD, ids=lambda value: str(value)[:25])
def test_a_bad_pair_is_refused_and_changes_nothing(
    model: Mixed, sleeper: Sleeper, item: Any, error: type[TorporError], said: str
) -> None:
    before = {name: bits(value) for name, value in model.state_dict().items()}
    epoch, digests = sleeper.weights_epoch, sleeper.digests()
    with pytest.raises(error, match=said):
        sleeper.update_weights([item])
    assert {name: bits(value) for name, value in model.state_dict().items()} == before
    assert (sleeper.weights_epoch, sleeper.digests()) == (epoch, digests)
    assert sleeper.verify().ok
    sleeper.update_weights({"weight": torch.zeros(2, 3)})


@pytest.mark.parametrize("payload", [5, None, 2.0])
def test_a_payload_that_holds_no_pairs_is_refused(sleeper: Sleeper, payload: Any) -> None:
    with pytest.raises(ArgumentError, match="holds no weights"):
        sleeper.update_weights(payload)
    assert not sleeper.update_is_open


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("weight", torch.full((2, 3), INF), [[INF] * 3] * 2),
        ("weight", torch.tensor([[INF, -INF, 0], [0, 0, 0.0]]), [[INF, -INF, 0], [0, 0, 0]]),
        ("weight", torch.full((2, 3), 0.5, dtype=torch.bfloat16), [[0.5] * 3] * 2),
        ("weight", torch.full((2, 3), 0.5, dtype=torch.float64), [[0.5] * 3] * 2),
        ("weight", torch.arange(6.0).reshape(3, 2).T, [[0, 2, 4], [1, 3, 5]]),
        ("low", torch.full((3,), 0.25), [0.25] * 3),
        ("steps", torch.tensor(9), 9),
        ("mask", torch.tensor([False, True]), [False, True]),
        ("phase", torch.full((2,), 2j), [2j, 2j]),
    ],
)
def test_what_fits_is_converted_and_stored(
    model: Mixed, sleeper: Sleeper, name: str, value: torch.Tensor, stored: Any
) -> None:
    sleeper.update_weights({name: value})
    assert model.state_dict()[name].tolist() == stored
    assert sleeper.verify().ok


def test_nan_may_be_asked_for(model: Mixed, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(model, check_nan=False)
    sleeper.update_weights({"weight": torch.full((2, 3), NAN)})
    sleeper.sleep(1)
    sleeper.wake_up()
    assert model.weight.isnan().all()
    assert sleeper.verify().ok


def test_a_parameter_that_left_its_memory_is_not_updated_behind_the_back(
    model: Mixed, sleeper: Sleeper
) -> None:
    model.weight.data = torch.ones(2, 3)
    with pytest.raises(OwnershipError, match="'weight' has left its memory"):
        sleeper.update_weights({"weight": torch.zeros(2, 3)})
    sleeper.adopt()
    sleeper.update_weights({"weight": torch.zeros(2, 3)})
    assert model.weight.sum() == 0


def test_a_weight_under_a_tag_that_sleeps_cannot_be_updated(model: Mixed, sleeper: Sleeper) -> None:
    sleeper.own(model.steps, name="steps", cls=OwnershipClass.BUFFER, tag="optimizer")
    sleeper.sleep(1, ["optimizer"])
    with pytest.raises(AsleepError, match=r"wake_up\(\['optimizer'\]\)"):
        sleeper.update_weights({"steps": torch.tensor(9)})
    sleeper.wake_up()
    assert model.steps == 4


def test_an_ignored_name_is_dropped(sleeper_for: SleeperMaker) -> None:
    model = nn.Linear(2, 2, bias=False)
    table = SliceTable([WeightSlice(name="w", parameter="weight")], ignored=["head"])
    sleeper = sleeper_for(model, slices=table)
    assert sleeper.load_weights([("head", torch.zeros(9)), ("w", torch.ones(2, 2))]) == {"weight"}
    assert sleeper.finish_update().updated == 1


def test_large_tensors_are_written_whole(sleeper_for: SleeperMaker) -> None:
    model = nn.Linear(512, 600, bias=False)
    sleeper = sleeper_for(model)
    value = torch.randn(600, 512, generator=torch.Generator().manual_seed(3))
    sleeper.update_weights({"weight": value})
    assert torch.equal(model.weight, value)
    value[599, 511] = NAN
    with pytest.raises(WeightsError, match="NaN"):
        sleeper.update_weights({"weight": value})
