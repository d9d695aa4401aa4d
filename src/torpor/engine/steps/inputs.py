"""The input buffers of a step: made once, filled by every step at the same addresses.

They are ``SCRATCH``: sleep releases them and nothing restores them, since a step writes each
element before the model reads it. Shape letters: T new tokens, R rows, B blocks of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from torpor.errors import OutOfMemoryError
from torpor.model.attention.interface import AttentionBatch
from torpor.model.machine.scratch import Allocate

if TYPE_CHECKING:
    from torpor.engine.steps.step import Row

NULL_BLOCK = 0
"""Fills the tails of block tables: always mapped, never anybody's."""


_BUFFERS_PER_TOKEN, _ITEM_BYTES = 3, 8


class InputBuffers:
    """What the model reads in one step."""

    def __init__(
        self,
        allocate: Allocate,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        """Get the memory.

        Raises:
            OutOfMemoryError: there is not enough memory.
        """
        self._block_size = block_size
        tokens = (max_num_batched_tokens,)
        self._ids_T = allocate(tokens, torch.int64, "input_ids")
        self._positions_T = allocate(tokens, torch.int64, "positions")
        self._slots_T = allocate(tokens, torch.int64, "slots")
        self._tables_RB = allocate((max_num_seqs, max_blocks), torch.int64, "block_tables")

    @staticmethod
    def require_room(
        *, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int, available: int
    ) -> None:
        """Refuse sizes whose buffers no memory holds, before anything is loaded.

        Args:
            max_num_seqs, max_num_batched_tokens, max_blocks: as for the buffers.
            available: bytes that this process can have.

        Raises:
            OutOfMemoryError: with the argument and the bytes it takes.
        """
        tables = max_num_seqs * max_blocks * _ITEM_BYTES
        if tables > available:
            raise OutOfMemoryError(
                f"max_num_seqs is {max_num_seqs}, whose block tables take {tables} bytes, and "
                f"{available} are available; lower max_num_seqs or max_model_len"
            )
        tokens = _BUFFERS_PER_TOKEN * max_num_batched_tokens * _ITEM_BYTES
        if tables + tokens > available:
            raise OutOfMemoryError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, whose buffers take {tokens} "
                f"bytes, and {available - tables} are available; lower max_num_batched_tokens, or "
                "max_num_seqs if that sets it"
            )

    def fill(
        self, rows: Sequence[Row], tables: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """Write the inputs of one step.

        Args:
            rows: the step's rows.
            tables: their block tables, long enough for every new token.

        Returns:
            Token ids [T], positions [T], and the batch for attention; views of the buffers.
        """
        ids = [row.sequence.token_ids[row.start : row.end] for row in rows]
        positions = [np.arange(row.start, row.end) for row in rows]
        tables_RB = self._padded(tables)
        blocks = [
            tables_RB[index, positions_t // self._block_size]
            for index, positions_t in enumerate(positions)
        ]
        positions_T = np.concatenate(positions)
        slots_T = np.concatenate(blocks) * self._block_size + positions_T % self._block_size
        batch = AttentionBatch(
            query_lens=tuple(row.num_new_tokens for row in rows),
            context_lens=tuple(row.start for row in rows),
            block_tables_RB=self._write_tables(tables_RB),
            slots_T=_write(self._slots_T, slots_T),
        )
        return (
            _write(self._ids_T, np.concatenate([np.asarray(part) for part in ids])),
            _write(self._positions_T, positions_T),
            batch,
        )

    def _padded(self, tables: Sequence[Sequence[int]]) -> np.ndarray:
        padded_RB = np.full((len(tables), max(map(len, tables))), NULL_BLOCK, dtype=np.int64)
        for index, table in enumerate(tables):
            padded_RB[index, : len(table)] = table
        return padded_RB

    def _write_tables(self, tables_RB: np.ndarray) -> torch.Tensor:
        num_rows, num_blocks = tables_RB.shape
        # Contiguous, so that a backend can use it as one index.
        view_RB = self._tables_RB.view(-1)[: num_rows * num_blocks].view(num_rows, num_blocks)
        view_RB.copy_(torch.from_numpy(tables_RB))
        return view_RB


def _write(buffer_T: torch.Tensor, values_T: np.ndarray) -> torch.Tensor:
    view_T = buffer_T[: len(values_T)]
    view_T.copy_(torch.from_numpy(values_T))
    return view_T
