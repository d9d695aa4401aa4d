"""The buffers of a step: what the model reads, at the same addresses whatever lay there before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from torpor.engine.steps.inputs import InputBuffers
from torpor.engine.steps.step import Row
from torpor.model.attention.interface import AttentionBatch

GARBAGE = -(2**62)

Filled = tuple[torch.Tensor, torch.Tensor, AttentionBatch]


class Buffers:
    """Input buffers for blocks of 4, and the memory that they got."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.inputs = InputBuffers(
            self._allocate,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_blocks=5,
            block_size=4,
        )

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        self.memory[name] = torch.full(tuple(shape), GARBAGE, dtype=dtype)
        return self.memory[name]

    def spoil(self) -> None:
        for tensor in self.memory.values():
            tensor.fill_(GARBAGE)


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


def row(token_ids: Sequence[int], start: int, count: int) -> Row:
    return Row(cast(Any, SimpleNamespace(token_ids=list(token_ids))), start, count)


def mixed() -> tuple[list[Row], list[list[int]]]:
    """A whole prompt, a decode step, a chunk from the middle, and a window that moved on."""
    rows = [
        row(range(100, 106), 0, 6),
        row(range(200, 210), 9, 1),
        row(range(300, 320), 3, 3),
        row(range(400, 417), 16, 1),
    ]
    return rows, [[7, 3], [2, 5, 9], [8, 1], [0, 0, 0, 6, 4]]


def facts(filled: Filled) -> dict[str, Any]:
    ids_T, positions_T, batch = filled
    return {
        "ids": ids_T.tolist(),
        "positions": positions_T.tolist(),
        "slots": batch.slots_T.tolist(),
        "tables": batch.block_tables_RB.tolist(),
        "query_lens": batch.query_lens,
        "context_lens": batch.context_lens,
    }


EXPECTED = {
    "ids": [100, 101, 102, 103, 104, 105, 209, 303, 304, 305, 416],
    "positions": [0, 1, 2, 3, 4, 5, 9, 3, 4, 5, 16],
    "slots": [28, 29, 30, 31, 12, 13, 9 * 4 + 1, 8 * 4 + 3, 4, 5, 16],
    "tables": [[7, 3, 0, 0, 0], [2, 5, 9, 0, 0], [8, 1, 0, 0, 0], [0, 0, 0, 6, 4]],
    "query_lens": (6, 1, 3, 1),
    "context_lens": (0, 9, 3, 16),
}


def test_rows_of_every_kind_lie_one_after_the_other(buffers: Buffers) -> None:
    assert facts(buffers.inputs.fill(*mixed())) == EXPECTED


def test_tables_are_as_wide_as_the_longest_and_contiguous(buffers: Buffers) -> None:
    rows, tables = mixed()
    _, _, batch = buffers.inputs.fill(rows[:2], tables[:2])
    assert batch.block_tables_RB.tolist() == [[7, 3, 0], [2, 5, 9]]
    assert batch.block_tables_RB.is_contiguous()


def test_everything_is_whole_numbers_of_64_bits(buffers: Buffers) -> None:
    ids_T, positions_T, batch = buffers.inputs.fill(*mixed())
    found = {t.dtype for t in (ids_T, positions_T, batch.slots_T, batch.block_tables_RB)}
    assert found == {torch.int64}


def test_the_buffers_addresses_never_change(buffers: Buffers) -> None:
    rows, tables = mixed()
    expected = {name: tensor.data_ptr() for name, tensor in buffers.memory.items()}
    assert sorted(expected) == ["block_tables", "input_ids", "positions", "slots"]
    for chosen in (slice(0, 4), slice(0, 1), slice(2, 4)):
        ids_T, positions_T, batch = buffers.inputs.fill(rows[chosen], tables[chosen])
        assert ids_T.data_ptr() == expected["input_ids"]
        assert positions_T.data_ptr() == expected["positions"]
        assert batch.slots_T.data_ptr() == expected["slots"]
        assert batch.block_tables_RB.data_ptr() == expected["block_tables"]


def test_what_lay_in_the_buffers_before_does_not_matter(buffers: Buffers) -> None:
    buffers.inputs.fill(*mixed())
    buffers.spoil()
    rows, tables = mixed()
    assert facts(buffers.inputs.fill(rows, tables)) == EXPECTED
    buffers.inputs.fill([row(range(16), 0, 16)], [[1, 2, 3, 4]])
    assert facts(buffers.inputs.fill(rows, tables)) == EXPECTED


def test_a_step_may_fill_the_buffers_to_the_last_element(buffers: Buffers) -> None:
    rows = [row(range(20), 16, 4) for _ in range(4)]
    tables = [[first, 0, 0, 0, first + 4] for first in range(1, 5)]
    ids_T, _, batch = buffers.inputs.fill(rows, tables)
    assert ids_T.tolist() == [16, 17, 18, 19] * 4
    assert batch.block_tables_RB.tolist() == tables
    assert batch.slots_T.tolist() == list(range(20, 36))
