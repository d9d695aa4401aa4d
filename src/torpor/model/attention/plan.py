"""Which rows of a step attend together, over which keys.

Rows with one new token (decode) are fetched and attended in groups of similar length. A row with
more new tokens (prefill) is cut into pieces: its own new tokens, causally, and fetched blocks,
which are visible to all of them unless the layer has a window.

Shape letters: R rows, N blocks per row, S positions, T queries, P pairs of row and KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torpor.model.attention.interface import AttentionBatch
from torpor.model.attention.kv_gather import Gather, LayerRows, Workspace
from torpor.model.attention.partial import HIDDEN

WINDOW_TILE = 512
"""Queries that share one fetch in a windowed layer; its mask is this by window plus this."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one new token each that attend in one batched product."""

    tokens: slice | torch.Tensor
    """Where their tokens are along T."""
    gather: Gather
    keys_PSD: torch.Tensor
    values_PSD: torch.Tensor
    """What is used of that fetched."""
    mask_P1S: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys that a prefill row's queries see, wholly or under a mask."""

    queries: slice
    """Along T."""
    gather: Gather | None
    """None for the row's own new tokens, straight from the layer."""
    keys: slice
    """Along T for new tokens, else along the fetched positions."""
    causal: bool = False
    mask_TS: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Queries of one row and all pieces they see."""

    queries: slice
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How the rows of one step attend in layers of one geometry."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillTile, ...]


class StepPlanner:
    """Plans one step for layers like `layer`.

    Args:
        batch: the step's rows.
        layer: views of a layer of the geometry.
        workspace: what gathers go through.
        group: positions that a decode group of more than one row should not exceed.
    """

    def __init__(
        self, batch: AttentionBatch, layer: LayerRows, workspace: Workspace, *, group: int
    ) -> None:
        self._batch = batch
        self._layer = layer
        self._workspace = workspace
        self._capacity = workspace.positions(layer.spec)
        self._group = min(group, self._capacity)
        self._block_size = layer.keys_NBHD.shape[1]
        self._window = layer.spec.window
        self._device = batch.block_tables_RB.device
        self._bands: dict[tuple[int, int, int], torch.Tensor] = {}

    def plan(self) -> StepPlan:
        """The groups and tiles of all rows."""
        decode: list[_DecodeRow] = []
        prefill: list[PrefillTile] = []
        start = 0
        lengths = zip(self._batch.query_lens, self._batch.context_lens, strict=True)
        for row, (new, context) in enumerate(lengths):
            if not new:
                continue
            candidate = _DecodeRow.of(row, start, context + 1, self._window, self._block_size)
            if new == 1 and candidate.positions <= self._capacity:
                decode.append(candidate)
            else:
                prefill.extend(self._tiles(row, start, new, context))
            start += new
        groups = group_rows(decode, self._group)
        return StepPlan(tuple(self._decode(rows) for rows in groups), tuple(prefill))

    def _decode(self, rows: Sequence[_DecodeRow]) -> DecodeGroup:
        size = self._block_size
        blocks = max(row.positions for row in rows) // size
        first_R1 = self._column([row.low // size for row in rows])
        count_R1 = self._column([row.positions // size for row in rows])
        block_N = torch.arange(blocks, device=self._device)
        # Past its end a row repeats its own first block: another row's, or the null block, may
        # hold what would not vanish under a mask.
        column_RN = first_R1 + torch.where(block_N < count_R1, block_N, 0)
        tables_RB = self._batch.block_tables_RB[self._index([row.row for row in rows])]
        blocks_RN = tables_RB.gather(1, column_RN)
        tokens = self._tokens([row.token for row in rows])
        skip, length = rows[0].skip, rows[0].visible
        if all((row.skip, row.visible) == (skip, length) for row in rows):
            gather = self._workspace.gather(self._layer, blocks_RN)
            used = slice(skip, skip + length)
            return DecodeGroup(
                tokens, gather, gather.keys_PSD[:, used], gather.values_PSD[:, used], None
            )
        place_S = torch.arange(blocks * size, device=self._device)
        skip_R1 = self._column([row.skip for row in rows])
        end_R1 = skip_R1 + self._column([row.visible for row in rows])
        shown_RS = (place_S >= skip_R1) & (place_S < end_R1)
        source_RS = torch.where(place_S < count_R1 * size, place_S, place_S % size)
        gather = self._workspace.gather(self._layer, blocks_RN, source_RS >= end_R1)
        mask_RS = torch.where(shown_RS, 0.0, HIDDEN)
        heads = self._layer.spec.num_kv_heads
        mask_P1S = mask_RS.repeat_interleave(heads, dim=0)[:, None]
        return DecodeGroup(tokens, gather, gather.keys_PSD, gather.values_PSD, mask_P1S)

    def _tiles(self, row: int, start: int, new: int, context: int) -> list[PrefillTile]:
        if self._window is None or self._window >= context + new:
            queries = slice(start, start + new)
            own = Piece(queries, None, queries, causal=True)
            fetched = self._fetched(row, queries, 0, context)
            return [PrefillTile(queries, (own, *fetched))]
        tiles = []
        for first in range(0, new, WINDOW_TILE):
            last = min(first + WINDOW_TILE, new)
            queries = slice(start + first, start + last)
            low = max(0, context + first - self._window + 1)
            high = context + last
            if low >= context:
                keys = slice(start + low - context, start + high - context)
                mask_TS = self._band(context + first, last - first, low, high)
                pieces: tuple[Piece, ...] = (Piece(queries, None, keys, mask_TS=mask_TS),)
            else:
                pieces = self._fetched(row, queries, low, high, first=context + first)
            tiles.append(PrefillTile(queries, pieces))
        return tiles

    def _fetched(
        self, row: int, queries: slice, low: int, high: int, *, first: int | None = None
    ) -> tuple[Piece, ...]:
        """Pieces of cached positions `low` to `high`; masked if `first`, where the
        first query is, is given."""
        size = self._block_size
        table_B = self._batch.block_tables_RB[row]
        pieces = []
        for begin in range(low // size * size, high, self._capacity):
            end = min(begin + self._capacity, high)
            blocks_1N = table_B[None, begin // size : -(-end // size)]
            begin_shown = max(begin, low)
            mask_TS = None
            if first is not None:
                mask_TS = self._band(first, queries.stop - queries.start, begin_shown, end)
            keys = slice(begin_shown - begin, end - begin)
            gather = self._workspace.gather(self._layer, blocks_1N)
            pieces.append(Piece(queries, gather, keys, mask_TS=mask_TS))
        return tuple(pieces)

    def _band(self, first: int, queries: int, low: int, high: int) -> torch.Tensor:
        """Mask [T, S] of queries from position `first` over keys `low` to `high`."""
        assert self._window is not None
        # Tiles in the middle of a row have masks alike.
        key = (first - low, queries, high - low)
        mask_TS = self._bands.get(key)
        if mask_TS is None:
            query_T1 = torch.arange(first, first + queries, device=self._device)[:, None]
            behind_TS = query_T1 - torch.arange(low, high, device=self._device)
            shown_TS = (behind_TS >= 0) & (behind_TS < self._window)
            mask_TS = self._bands[key] = torch.where(shown_TS, 0.0, HIDDEN)
        return mask_TS

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: list[int]) -> torch.Tensor:
        return self._index(values)[:, None]

    def _tokens(self, tokens: list[int]) -> slice | torch.Tensor:
        if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
            return slice(tokens[0], tokens[0] + len(tokens))
        return self._index(tokens)


@dataclass(frozen=True, slots=True)
class _DecodeRow:
    row: int
    token: int
    low: int
    """First position fetched, at a block's start."""
    positions: int
    """Fetched, in whole blocks."""
    skip: int
    """Fetched positions before the window."""
    visible: int

    @classmethod
    def of(cls, row: int, token: int, length: int, window: int | None, size: int) -> _DecodeRow:
        first = 0 if window is None else max(0, length - window)
        low = first // size * size
        positions = -(-(length - low) // size) * size
        return cls(row, token, low, positions, first - low, length - first)


def group_rows(rows: Sequence[_DecodeRow], limit: int) -> list[list[_DecodeRow]]:
    """Cut rows into groups of at most `limit` padded positions; a longer row is a group itself.

    Rows stay in order, where their tokens lie together, if padding costs at most a quarter more;
    else they are grouped by length.
    """
    groups = _cut(rows, limit, slack=None)
    padded = sum(len(group) * max(row.positions for row in group) for group in groups)
    if padded <= 1.25 * sum(row.positions for row in rows):
        return groups
    return _cut(sorted(rows, key=lambda row: -row.positions), limit, slack=0.75)


def _cut(rows: Sequence[_DecodeRow], limit: int, *, slack: float | None) -> list[list[_DecodeRow]]:
    groups: list[list[_DecodeRow]] = []
    longest = 0
    for row in rows:
        grown = max(longest, row.positions)
        similar = slack is None or row.positions >= slack * grown or grown <= 64
        if groups and similar and grown * (len(groups[-1]) + 1) <= limit:
            groups[-1].append(row)
            longest = grown
        else:
            groups.append([row])
            longest = row.positions
    return groups
