"""Tensors that leave their slot: noticed, reported, never counted as freed, never lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import Net, TiedModel, bits
from torch import nn

from torpor.errors import OwnershipError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import FileExtent


class Checkpoint:
    """A source that serves what a module holds now, as long as it is asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.held = {name: value.clone() for name, value in module.state_dict().items()}

    def names(self) -> list[str]:
        return list(self.held)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.held.items()

    def extent(self, name: str) -> FileExtent | None:
        return None


def owned(sleeper: Sleeper) -> set[str]:
    return {name for row in sleeper.table() for name in (row.name, *row.aliases)}


def residents(sleeper: Sleeper) -> dict[str, str]:
    return {item.name: item.reason for item in sleeper._context.ledger.residents}


def replace(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach().clone())


def assign(net: Net) -> None:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.first.load_state_dict({"weight": state["first.weight"], "bias": state["first.bias"]},
                              assign=True)  # fmt: skip


def set_storage(net: Net) -> None:
    with torch.no_grad():
        net.first.weight.set_(net.first.weight.detach().clone())


def data_attribute(net: Net) -> None:
    net.first.weight.data = net.first.weight.detach().clone()


def share(net: Net) -> None:
    net.first.weight.share_memory_()


ESCAPES: dict[str, tuple[Callable[[Net], Any], set[str]]] = {
    "replaced": (replace, {"first.weight"}),
    "assigned": (assign, {"first.weight", "first.bias"}),
    "set_": (set_storage, {"first.weight"}),
    "data": (data_attribute, {"first.weight"}),
    "shared": (share, {"first.weight"}),
    "dtype": (lambda net: net.first.to(torch.bfloat16).float(), {"first.weight", "first.bias"}),
}


@pytest.mark.parametrize("kind", ESCAPES)
@pytest.mark.parametrize("level", [1, 2])
def test_what_left_is_reported_and_not_counted_as_freed(
    kind: str, level: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    everything = sum(row.nbytes for row in sleeper.table())
    escape, names = ESCAPES[kind]
    escape(net)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    report = sleeper.sleep(level)
    assert set(report.escaped) == names
    left = sum(net.get_parameter(name).nbytes for name in names)
    assert sum(report.released_bytes.values()) == everything - left
    assert {item.name: item.nbytes for item in report.residents} == {
        name: net.get_parameter(name).nbytes for name in names
    }
    assert bits(net.first.weight) == bits(state["first.weight"]), "usable while the rest sleeps"
    sleeper.wake_up()
    sleeper.update_weights({name: state[name] for name in sleeper.missing})
    assert {name: bits(value) for name, value in net.state_dict().items()} == {
        name: bits(value) for name, value in state.items()
    }
    assert sleeper.sleep(level).escaped == (), "reported once"


@pytest.mark.parametrize("kind", [kind for kind in ESCAPES if kind != "shared"])
def test_adopting_again_owns_it_again(kind: str, sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    before = sum(row.nbytes for row in sleeper.table())
    escape, names = ESCAPES[kind]
    escape(net)
    epoch = sleeper.weights_epoch
    assert set(sleeper.adopt()) == names
    assert sleeper.weights_epoch > epoch
    assert residents(sleeper) == {}
    report = sleeper.sleep()
    assert sum(report.released_bytes.values()) == before
    sleeper.wake_up()
    assert sleeper.verify().ok


def test_moves_that_change_nothing_are_no_escape(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    net.float()
    net.to("cpu")
    net.to(torch.float32)
    net.load_state_dict(net.state_dict())
    net.requires_grad_(False)
    net.zero_grad()
    assert sleeper.sleep().escaped == ()


def test_the_whole_model_may_leave(sleeper_for: SleeperMaker) -> None:
    model = TiedModel()
    sleeper = sleeper_for(model)
    model.double()
    report = sleeper.sleep(2)
    assert set(report.escaped) == {
        *("embedding.weight", "head.weight"),
        *("middle.weight", "middle.bias"),
    }
    assert report.released_bytes == {}
    assert report.resident_bytes == sum(p.nbytes for p in model.parameters()), "ties count once"
    model(torch.tensor([1, 2]))
    sleeper.wake_up()
    assert set(sleeper.adopt()) == owned(sleeper)


@pytest.mark.parametrize("level", [1, 2])
def test_an_old_tensor_that_somebody_holds_survives(
    level: int, pattern: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    old = net.first.weight
    hidden = net.second.weight.detach()[1:]
    expected = bits(old), bits(hidden)
    sleeper = sleeper_for(net, poison=pattern)
    replace(net)
    net.second.weight = nn.Parameter(torch.zeros(4, 4))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for _ in range(2):
        sleeper.sleep(level)
        sleeper.wake_up()
        sleeper.update_weights({name: state[name] for name in sleeper.missing})
        assert (bits(old), bits(hidden)) == expected
    assert {"first.weight (replaced)", "second.weight (replaced)"} <= owned(sleeper)
    del old
    sleeper.sleep()
    sleeper.wake_up()
    assert "first.weight (replaced)" not in owned(sleeper), "nobody holds it any more"


def test_a_name_can_be_replaced_again_and_again(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    held: list[torch.Tensor] = []
    for value in (1.0, 2.0, 3.0):
        held.append(net.first.weight)
        net.first.weight = nn.Parameter(torch.full((4, 4), value))
        sleeper.adopt()
    assert {name for name in owned(sleeper) if "replaced" in name} == {
        *("first.weight (replaced)", "first.weight (replaced 2)", "first.weight (replaced 3)"),
    }
    sleeper.sleep(2)
    sleeper.wake_up()
    assert [tensor[0, 0].item() for tensor in held[1:]] == [1.0, 2.0]


@pytest.mark.parametrize("level", [1, 2])
def test_removed_modules_are_forgotten_and_their_tensors_kept_for_others(
    level: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    bias = net.second.bias
    expected = bits(bias)
    del net.second
    state = {name: value.clone() for name, value in net.state_dict().items()}
    report = sleeper.sleep(level)
    assert report.escaped == ()
    sleeper.wake_up()
    sleeper.update_weights({name: state[name] for name in sleeper.missing})
    assert bits(bias) == expected
    assert sleeper.missing == ()
    assert "second.weight" not in owned(sleeper)


def test_a_name_that_becomes_a_tie_follows_the_bytes(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    net.second.weight = net.first.weight
    report = sleeper.sleep()
    assert report.escaped == ()
    assert residents(sleeper) == {}
    sleeper.wake_up()
    row = next(row for row in sleeper.table() if row.name == "first.weight")
    assert row.aliases == ("second.weight",)
    sleeper.update_weights({"second.weight": torch.full((4, 4), 2.0)})
    assert net.first.weight[0, 0].item() == 2


def test_half_of_a_tie_may_leave(sleeper_for: SleeperMaker) -> None:
    model = TiedModel()
    sleeper = sleeper_for(model)
    model.embedding.weight = nn.Parameter(torch.zeros(20, 8))
    assert sleeper.sleep(2).escaped == ("embedding.weight",)
    sleeper.wake_up()
    assert set(sleeper.missing) == {"head.weight", "middle.weight", "middle.bias"}


def test_new_tensors_are_reported_until_they_are_adopted(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    net.adapter = nn.Linear(4, 4, bias=False)
    report = sleeper.sleep()
    assert [(item.name, item.reason) for item in report.residents] == [
        ("adapter.weight", "made after adoption; adopt() it")
    ]
    sleeper.wake_up()
    assert sleeper.adopt() == ("adapter.weight",)
    assert residents(sleeper) == {}


def test_what_is_computed_from_a_replaced_tensor_follows_it(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    sums = torch.zeros(4)
    sleeper = sleeper_for(net, poison=pattern)
    sleeper.own(
        sums, name="sums", cls=OwnershipClass.DERIVED, sources=["first.weight"],
        rebuild=lambda: net.first.weight.sum(0),
    )  # fmt: skip
    for level, value in ((1, 0.5), (2, 1.0)):
        net.first.weight = nn.Parameter(torch.full((4, 4), value))
        epoch = sleeper.weights_epoch
        sleeper.sleep(level)
        assert sleeper.weights_epoch > epoch
        sleeper.wake_up()
        assert sums.tolist() == [4 * value] * 4
        sleeper.adopt()
    net.first.weight = nn.Parameter(torch.full((4, 4), 2.0))
    sleeper.adopt()
    assert sums.tolist() == [8.0] * 4
    missing = {name: torch.zeros_like(net.get_parameter(name)) for name in sleeper.missing}
    sleeper.update_weights(missing)
    sleeper.update_weights({"first.weight": torch.full((4, 4), 3.0)})
    assert sums.tolist() == [12.0] * 4


@pytest.mark.parametrize("kind", ["replaced", "assigned", "set_", "dtype"])
def test_an_update_of_what_left_is_refused_and_not_lost(
    kind: str, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    held = net.first.weight
    sleeper = sleeper_for(net)
    ESCAPES[kind][0](net)
    before = bits(net.first.weight)
    with pytest.raises(OwnershipError, match=r"'first\.weight' has left its memory"):
        sleeper.update_weights({"first.weight": torch.ones(4, 4)})
    assert bits(net.first.weight) == before
    sleeper.adopt()
    sleeper.update_weights({"first.weight": torch.ones(4, 4)})
    assert net.first.weight[0, 0].item() == 1
    del held


def test_a_plain_wake_reloads_all_that_is_still_owned(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    checkpoint = Checkpoint(net)
    sleeper = sleeper_for(net, reload=checkpoint, poison=pattern)
    sleeper.reload_weights()
    net.first.weight = nn.Parameter(torch.full((4, 4), 9.0))
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    sleeper.sleep(2)
    assert sleeper.wake_up().reloaded
    assert {name: bits(value) for name, value in net.state_dict().items()} == {
        name: bits(value) for name, value in expected.items()
    }


def test_what_is_replaced_while_asleep_is_noticed_at_the_wake(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    net = Net(4)
    sleeper = sleeper_for(net, reload=Checkpoint(net), poison=pattern)
    sleeper.reload_weights()
    sleeper.sleep(2)
    net.first.weight = nn.Parameter(torch.full((4, 4), 9.0))
    sleeper.wake_up()
    assert net.first.weight[0, 0].item() == 9
    assert set(residents(sleeper)) == {"first.weight"}
    assert sleeper.sleep().escaped == ("first.weight",)
