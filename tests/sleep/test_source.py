"""The slice table says which rows each checkpoint name fills."""

from __future__ import annotations

import pytest
import torch
from tests.sleep.kit import MemorySource

from torpor.errors import WeightsMismatchError
from torpor.sleep.source import SliceTable, WeightSlice, WeightSource


def test_identity_maps_every_name_to_the_whole_tensor() -> None:
    table = SliceTable.identity(["a", "b"])
    assert [(part.name, part.parameter, part.length) for part in table] == [
        ("a", "a", None),
        ("b", "b", None),
    ]
    assert "a" in table
    assert "c" not in table
    assert len(table) == 2


def test_a_name_that_appears_twice_is_refused() -> None:
    twice = [WeightSlice(name="q", parameter="qk"), WeightSlice(name="q", parameter="other")]
    with pytest.raises(WeightsMismatchError, match="'q' twice"):
        SliceTable(twice)


def test_slices_of_a_parameter_come_in_row_order() -> None:
    table = SliceTable(
        [
            WeightSlice(name="k", parameter="qk", start=4, length=4),
            WeightSlice(name="norm", parameter="norm"),
            WeightSlice(name="q", parameter="qk", start=0, length=4),
        ]
    )
    grouped = {key: [part.name for part in parts] for key, parts in table.by_parameter().items()}
    assert grouped == {"qk": ["q", "k"], "norm": ["norm"]}


def test_rows_share_memory_with_the_tensor_and_leave_autograd_alone() -> None:
    tensor = torch.zeros(4, 2, requires_grad=True)
    rows = WeightSlice(name="k", parameter="qk", start=2, length=2).rows_of(tensor)
    rows.fill_(1)
    assert tensor[:2].sum() == 0
    assert tensor[2:].sum() == 4
    assert not rows.requires_grad
    whole = WeightSlice(name="a", parameter="a").rows_of(tensor)
    assert whole.shape == tensor.shape
    assert whole.data_ptr() == tensor.data_ptr()


def test_anything_with_the_three_methods_is_a_source() -> None:
    assert isinstance(MemorySource({}), WeightSource)
    assert not isinstance({"a": torch.zeros(1)}, WeightSource)
