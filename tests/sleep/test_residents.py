"""What stays in memory: once each, as long as it lives, with the reason known last."""

from __future__ import annotations

import torch
from torch import nn

from torpor.sleep.residents import Residents


def listed(residents: Residents) -> list[tuple[str, int, str]]:
    return [(item.name, item.nbytes, item.reason) for item in residents]


def test_each_storage_counts_once() -> None:
    residents, tensor = Residents(), torch.ones(10)
    residents.note("a", tensor, "why")
    residents.note("b", tensor[3:], "why")
    assert listed(residents) == [("a", 40, "why")]
    assert residents.nbytes == 40
    assert len(residents) == 1
    assert residents.names() == ["a"]


def test_a_later_reason_replaces_the_earlier() -> None:
    residents, tensor = Residents(), torch.ones(10)
    residents.note("a", tensor, "nobody knows")
    residents.note("b", tensor, "declared")
    assert listed(residents) == [("b", 40, "declared")]
    assert residents.reason(tensor[2:]) == "declared"
    assert residents.reason(torch.ones(10)) is None


def test_the_dead_are_not_listed() -> None:
    residents, tensor, sparse = Residents(), torch.ones(10), torch.eye(2).to_sparse()
    residents.note("a", tensor, "why")
    residents.note("s", sparse, "sparse")
    view = tensor[3:]
    del tensor
    assert residents.names() == ["a", "s"], "a view keeps the storage"
    del view, sparse
    assert residents.names() == []
    assert residents.nbytes == 0


def test_tensors_without_a_storage_are_known_by_themselves() -> None:
    residents, first, second = Residents(), torch.eye(2).to_sparse(), torch.eye(2).to_sparse()
    lazy = nn.LazyLinear(2).weight
    residents.note("first", first, "sparse")
    residents.note("lazy", lazy, "lazy")
    assert residents.reason(first) == "sparse"
    assert residents.reason(second) is None
    assert {name: nbytes for name, nbytes, _ in listed(residents)} == {"first": 40, "lazy": 0}


def test_forgetting() -> None:
    residents, first, second = Residents(), torch.ones(1), torch.ones(1)
    residents.note("first", first, "x")
    residents.note("second", second, "y")
    residents.forget(first)
    residents.forget(first)
    assert residents.names() == ["second"]
    residents.forget_reason("y")
    assert residents.names() == []


def test_the_json_form_names_its_unit() -> None:
    residents, tensor = Residents(), torch.ones(10)
    residents.note("a", tensor, "why")
    assert [item.to_dict() for item in residents] == [
        {"name": "a", "resident_bytes": 40, "reason": "why"}
    ]
