"""Finding tensors by name, and refusing what is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sleep.samples import Net, TiedModel, Wrapper
from torch import nn

from torpor.errors import ArgumentError, OwnershipError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.walk import (
    module_tensors,
    named_modules,
    named_optimizers,
    nested_tensors,
    optimizer_tensors,
)


def test_parameters_and_buffers_are_found_with_their_class() -> None:
    net = Net()
    found = {item.name: item for item in module_tensors({"": net})}
    assert list(found) == [
        *("shift", "table"),
        *("first.weight", "first.bias", "second.weight", "second.bias"),
    ]
    assert {name for name, item in found.items() if item.cls is OwnershipClass.BUFFER} == {
        "shift",
        "table",
    }
    assert [name for name, item in found.items() if not item.persistent] == ["table"]
    assert all(item.tag == "weights" for item in found.values())
    assert found["first.weight"].tensor is net.first.weight


def test_tied_tensors_and_shared_modules_are_found_under_every_name() -> None:
    model = TiedModel()
    shared = nn.ModuleDict({"a": model.middle, "b": model.middle})
    names = {item.name for item in module_tensors({"model": model, "other": shared})}
    assert {"model.embedding.weight", "model.head.weight"} <= names
    assert {"other.a.weight", "other.b.weight"} <= names


def test_absent_parameters_are_skipped() -> None:
    names = [item.name for item in module_tensors({"": nn.Linear(2, 2, bias=False)})]
    assert names == ["weight"]


def test_wrappers_are_found_as_their_inner_tensors() -> None:
    module = nn.Module()
    weight = Wrapper(torch.ones(3, dtype=torch.int8), torch.tensor(2.0))
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    assert [item.name for item in module_tensors({"": module})] == [
        "weight.inner",
        "weight.scale",
    ]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "not NoneType"),
        ({}, "non-empty mapping"),
        ([nn.Linear(1, 1)], "not list"),
        ({"a": torch.ones(1)}, r"modules\['a'\] is a Tensor"),
        ({1: nn.Linear(1, 1)}, r"modules\[1\]"),
    ],
)
def test_what_is_no_module_is_refused(modules: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        named_modules(modules)


@pytest.mark.parametrize("optimizer", [[1], "adam", {"a": nn.Linear(1, 1)}])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(ArgumentError, match="not an Optimizer"):
        named_optimizers(optimizer)


def test_optimizer_state_and_gradients_are_named_after_their_parameter() -> None:
    net = Net(4)
    extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*net.parameters(), extra], lr=0.1, momentum=0.9)
    assert list(optimizer_tensors({"sgd": optimizer}, {"": net})) == []
    (net(torch.ones(1, 4)).sum() + extra.sum()).backward()
    optimizer.step()
    net.second.bias.grad = None
    found = {item.name: item for item in optimizer_tensors({"sgd": optimizer}, {"": net})}
    assert set(found) == {
        f"sgd.{kind}[{name}]{rest}"
        for name in ("first.weight", "first.bias", "second.weight", "second.bias", "parameter 4")
        for kind, rest in (("state", ".momentum_buffer"), ("grad", ""))
        if (kind, name) != ("grad", "second.bias")
    }
    assert {item.tag for item in found.values()} == {"optimizer"}
    assert {item.cls for item in found.values()} == {OwnershipClass.BUFFER}


def test_containers_of_any_nesting_are_walked() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    nested = {"layers": [(a, None), {"k": b}], "last": c, "none": None}
    found = dict(nested_tensors("cache", nested, strict=True))
    assert found == {"cache.layers.0.0": a, "cache.layers.1.k": b, "cache.last": c}


@pytest.mark.parametrize("leaf", [1, "text", {1, 2}, nn.Linear(1, 1), object()])
def test_an_unknown_leaf_is_named(leaf: Any) -> None:
    nested = {"layers": [torch.ones(1), leaf]}
    with pytest.raises(OwnershipError, match=r"cache\.layers\.1 is a \w+, neither a tensor"):
        list(nested_tensors("cache", nested, strict=True))
    assert len(list(nested_tensors("cache", nested, strict=False))) == 1


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(OwnershipError, match="is nested more than"):
        list(nested_tensors("cache", loop, strict=True))
