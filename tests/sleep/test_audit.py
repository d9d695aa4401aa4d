"""Tensors that nobody declared: found, named, sized, and an error when the caller is strict."""

from __future__ import annotations

import functools
import gc
import inspect
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import Net, Opaque, Wrapper
from torch import nn

from torpor.errors import OwnershipError
from torpor.sleep.audit import reachable_tensors
from torpor.sleep.building import building
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.storage import nbytes_of, storage_key, storage_of


@dataclass
class Helper:
    """Holds tensors for a module and is none itself."""

    scale: torch.Tensor
    table: dict[str, list[torch.Tensor]]


class Slotted:
    __slots__ = ("tensor", "unset")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def method(self) -> None:
        """Bound methods lead to their object."""


class Hoarder(nn.Module):
    """Keeps tensors in every place that an attribute can lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.scale = torch.ones(110)
        self.plain = torch.ones(10)
        self.helper = Helper(torch.ones(20), {"rows": [torch.ones(30)]})
        self.slotted = Slotted(torch.ones(40))
        self.bound = Slotted(torch.ones(50)).method
        self.partial = functools.partial(torch.add, torch.ones(60), alpha=torch.ones(70))
        self.kept = {(1, 2): (torch.ones(80),)}
        self.inner = nn.Identity()
        self.inner.deep = torch.ones(90)
        self.sparse = torch.eye(2).to_sparse()
        self.opaque = Opaque(torch.ones(100))
        self.wrapper = Wrapper(torch.ones(110, dtype=torch.int8), torch.ones(()))
        self.view = self.weight.detach()[1:]
        self.itself = [self]
        self.array = np.ones(1000)
        self.text, self.number, self.nothing = "x", 1, None


EXPECTED = {
    "plain": 40,
    "helper.scale": 80,
    "helper.table.rows.0": 120,
    "slotted.tensor": 160,
    "bound.__self__.tensor": 200,
    "partial.args.0": 240,
    "partial.keywords.alpha": 280,
    "kept.(1, 2).0": 320,
    "inner.deep": 360,
    "sparse": 40,
    "opaque.held": 400,  # the wrapper itself takes no memory
    "weight.scale": 440,
    "wrapper.inner": 110,
    "wrapper.scale": 4,
}


def test_every_undeclared_tensor_is_named_and_sized(sleeper_for: SleeperMaker) -> None:
    module = Hoarder()
    sleeper = sleeper_for(module)
    report = sleeper.audit()
    assert {item.name: item.nbytes for item in report.unowned} == EXPECTED
    assert [item.nbytes for item in report.unowned] == sorted(
        (item.nbytes for item in report.unowned), reverse=True
    )
    assert all(item.reachable and item.creator is None for item in report.unowned)
    assert {item.name: (item.shape, item.dtype) for item in report.unowned}["plain"] == (
        (10,),
        "float32",
    )


def test_undeclared_tensors_are_resident(sleeper_for: SleeperMaker) -> None:
    module = Hoarder()
    sleeper = sleeper_for(module)
    residents = {item.name: item for item in sleeper.sleep(2).residents}
    assert set(EXPECTED) <= set(residents)
    assert residents["plain"].reason == "no owner declared it"
    assert module.plain.tolist() == [1] * 10
    sleeper.wake_up()


def test_every_reachable_byte_is_owned_or_resident(sleeper_for: SleeperMaker) -> None:
    """P1, by storages: nothing that the module leads to is missing from the books."""
    module = Hoarder()
    module.register_buffer("exported", torch.from_numpy(np.ones(5, dtype=np.float32)))
    (module.weight * 2).sum().backward()
    sleeper = sleeper_for(module)
    sleeper.own(module.kept, name="declared", cls=OwnershipClass.RUNTIME)
    ledger = sleeper._context.ledger
    owned: dict[int, int] = {}
    resident: dict[Any, int] = {}
    for name, tensor in reachable_tensors({"": module}):
        storage = storage_of(tensor)
        if storage is not None and ledger.of_storage(storage) is not None:
            owned[storage_key(storage)] = storage.nbytes()
            continue
        assert ledger.residents.reason(tensor) is not None or nbytes_of(tensor) == 0, name
        key = id(tensor) if storage is None else storage_key(storage)
        resident[key] = nbytes_of(tensor) if storage is None else storage.nbytes()
    assert sum(owned.values()) == sum(row.nbytes for row in sleeper.table())
    assert sum(resident.values()) == ledger.residents.nbytes


def test_gradients_without_an_optimizer_are_resident(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    net(torch.ones(1, 4)).sum().backward()
    sleeper = sleeper_for(net, strict=True)
    residents = {item.name: item for item in sleeper.sleep().residents}
    assert set(residents) == {f"{name}.grad" for name, _ in net.named_parameters()}
    assert "pass optimizer=" in residents["first.weight.grad"].reason
    sleeper.wake_up()
    net.zero_grad()
    assert sleeper.sleep().residents == (), "what is gone is not listed"


def test_tensors_of_others_are_listed_apart(sleeper_for: SleeperMaker) -> None:
    gc.collect()  # what other tests left in cycles is alive, and would be listed
    helper = Helper(torch.ones(12345), {"rows": [torch.ones(12346)]})
    local = torch.ones(12347)
    sleeper = sleeper_for(nn.Linear(2, 2))
    report = sleeper.audit()
    assert report.unowned == ()
    found = {item.shape[0]: item.name for item in report.elsewhere if item.shape > (12344,)}
    assert found == {
        12345: "Helper.scale",
        12346: "an item of a list",
        12347: "a local variable, or something that only C++ knows",
    }
    assert not any(item.reachable for item in report.elsewhere)
    del helper, local


def test_the_audit_survives_odd_tensors_elsewhere(sleeper_for: SleeperMaker) -> None:
    odd = [
        nn.LazyLinear(2).weight,
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        Opaque(torch.ones(2)),
        Wrapper(torch.ones(2, dtype=torch.int8), torch.ones(())),
        torch.ones(2).share_memory_(),
    ]
    sleeper = sleeper_for(nn.Linear(2, 2))
    sleeper.audit()
    assert len(odd) == 6


def test_the_report_says_how_to_mend_and_what_it_cannot_see(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(Hoarder())
    report = sleeper.audit()
    assert "register it as a buffer" in report.remedy
    assert "sleeper.own(" in report.remedy
    assert any("C++" in item for item in report.blind_spots)
    assert any("numpy" in item for item in report.blind_spots)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["unowned"][0].keys() >= {"name", "resident_bytes", "shape", "dtype", "creator"}
    assert plain["blind_spots"] == list(report.blind_spots)


def test_declared_tensors_are_not_listed(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    net.one, net.two = torch.ones(5), torch.ones(6)
    sleeper = sleeper_for(net)
    assert {item.name for item in sleeper.audit().unowned} == {"one", "two"}
    sleeper.own(net.one, name="anything", cls=OwnershipClass.RUNTIME)
    sleeper.own(net.two, name="else", cls=OwnershipClass.BUFFER)
    assert sleeper.audit().unowned == ()
    assert {item.name for item in sleeper._context.ledger.residents} == {"anything"}


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        self.constant = torch.arange(6.0)


def test_strict_refuses_an_undeclared_tensor_by_name(sleeper_for: SleeperMaker) -> None:
    with building() as records:
        module = nn.Sequential(nn.Linear(2, 2), Careless())
    message = (
        rf"1 tensors have no owner: 1\.constant \(24 bytes, made at .*{__name__.split('.')[-1]}"
    )
    with pytest.raises(OwnershipError, match=message + rf"\.py:{module[1].line}\)") as caught:
        sleeper_for(module, strict=True, records=records)
    assert "register it as a buffer" in str(caught.value)
    with pytest.raises(OwnershipError, match=r"1\.constant \(24 bytes\)"):
        sleeper_for(module, strict=True)


def test_strict_is_content_with_declared_tensors(sleeper_for: SleeperMaker) -> None:
    module = Careless()

    def declare(sleeper: Sleeper) -> None:
        sleeper.own(module.constant, name="constant", cls=OwnershipClass.BUFFER)

    sleeper = sleeper_for(module, strict=True, declare=declare)
    sleeper.sleep(2)
    sleeper.wake_up()
    assert module.constant.tolist() == list(range(6))


def test_strict_is_content_with_registered_tensors_that_cannot_move(
    sleeper_for: SleeperMaker,
) -> None:
    module = nn.Module()
    module.register_buffer("exported", torch.from_numpy(np.ones(5, dtype=np.float32)))
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    sleeper = sleeper_for(module, strict=True)
    assert {item.name for item in sleeper.sleep().residents} == {"exported", "sparse"}


def test_creators_are_named_in_the_audit(sleeper_for: SleeperMaker) -> None:
    with building() as records:
        module = Careless()
    sleeper = sleeper_for(module, records=records)
    (item,) = sleeper.audit().unowned
    assert item.creator is not None
    assert item.creator.endswith(f"test_audit.py:{module.line}")


def test_a_large_plain_container_is_looked_through_quickly(sleeper_for: SleeperMaker) -> None:
    module = Careless()
    module.vocabulary = {str(number): number for number in range(200_000)}
    module.ids = list(range(200_000))
    module.hidden = [*range(100), torch.ones(7)]
    names = {item.name for item in sleeper_for(module).audit().unowned}
    assert names == {"constant", "hidden.100"}
