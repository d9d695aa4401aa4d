"""Attention whose bits for a token depend on that token's row up to it, and on nothing else.

Keys are visited in tiles at fixed positions, queries in tiles of a fixed size, so that every
product has one shape, however a row was chunked and whoever it shares the step with. Tiles are
folded one after another; one that a query does not see contributes exactly nothing. Everything is
float32.

What this leans on: a fixed-size problem of the fused kernel gives a query the same bits at every
place in its tile. Tests prove it on the machine they run on.

Shape letters: V query tiles, M query rows of a tile (tokens x heads of a KV head), K KV heads,
S positions of a key tile, T tokens, H query heads, D head size, R rows, N blocks of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from torpor.model.attention.interface import AttentionBatch, AttentionSpec
from torpor.model.attention.kv_gather import Gather, LayerRows, Workspace
from torpor.model.attention.partial import HIDDEN, QUERY_ROWS, attend_tiles, exp

KEY_TILE = 256


def tile_positions(block_size: int) -> int:
    """Positions of a key tile: about `KEY_TILE`, in whole blocks."""
    return block_size * max(1, KEY_TILE // block_size)


def tile_tokens(spec: AttentionSpec) -> int:
    """Tokens of a query tile."""
    return max(1, QUERY_ROWS // (spec.num_heads // spec.num_kv_heads))


@dataclass(frozen=True, slots=True)
class _Call:
    """One key tile under some of the query tiles of a plan."""

    gather: Gather | None
    """None to use again what the call before fetched."""
    tiles: slice
    """Of the query tiles, along V."""
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """Query tiles that are folded together, and all calls for them in order."""

    tokens_VT: torch.Tensor
    """int64 [V, tokens of a tile]: where each query is along T; the end repeats the last."""
    out: torch.Tensor | slice
    """Where results go along T."""
    kept: slice
    """Which of the V * tokens results are kept: all but repeats."""
    calls: tuple[_Call, ...]


class InvariantSteps:
    """Attends the rows of one step after another; `workspace` must hand out float32."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._batch: AttentionBatch | None = None
        self._plans: dict[tuple[int, int, int, int, int | None], tuple[_Plan, ...]] = {}

    def begin(self, batch: AttentionBatch) -> None:
        """Forget the last step's plans."""
        self._batch = batch
        self._plans.clear()

    def attend(self, layer: LayerRows, q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [T, H, v_dim] and log-sum-exp [T, H]; all keys must be in the cache."""
        spec = layer.spec
        key = (spec.num_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim, spec.window)
        plans = self._plans.get(key)
        if plans is None:
            assert self._batch is not None, "attend() before begin()"
            plans = self._plans[key] = tuple(self._plan(self._batch, layer))
        out_THD = q_THD.new_empty((*q_THD.shape[:2], spec.v_dim))
        lse_TH = q_THD.new_empty(q_THD.shape[:2])
        for plan in plans:
            out, lse = self._run(layer, plan, q_THD)
            out_THD[plan.out] = out[plan.kept]
            lse_TH[plan.out] = lse[plan.kept]
        return out_THD, lse_TH

    def _run(
        self, layer: LayerRows, plan: _Plan, q_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = layer.spec
        kv_heads = spec.num_kv_heads
        tiles, tokens = plan.tokens_VT.shape
        q_VTKGD = q_THD[plan.tokens_VT].unflatten(2, (kv_heads, -1))
        q_VKMD = q_VTKGD.transpose(1, 2).flatten(2, 3)
        fold = _Fold(q_VKMD, spec.v_dim)
        keys: tuple[torch.Tensor, torch.Tensor] | None = None
        for call in plan.calls:
            if call.gather is not None:
                call.gather.load(layer)
                keys = (
                    call.gather.keys_PSD.unflatten(0, (-1, kv_heads)),
                    call.gather.values_PSD.unflatten(0, (-1, kv_heads)),
                )
            assert keys is not None
            part = attend_tiles(q_VKMD[call.tiles], *keys, spec.scale, call.mask)
            fold.add(call.tiles, *part)
        out_VKMD, lse_VKM = fold.result()
        group = spec.num_heads // kv_heads
        out = out_VKMD.unflatten(2, (tokens, group)).transpose(1, 2)
        lse = lse_VKM.unflatten(2, (tokens, group)).transpose(1, 2)
        total = tiles * tokens
        return (
            out.reshape(total, spec.num_heads, spec.v_dim),
            lse.reshape(total, spec.num_heads),
        )

    def _plan(self, batch: AttentionBatch, layer: LayerRows) -> Iterator[_Plan]:
        planner = _Planner(batch, layer, self._workspace)
        single: list[tuple[int, int, int]] = []
        start = 0
        for row, (new, context) in enumerate(
            zip(batch.query_lens, batch.context_lens, strict=True)
        ):
            if new == 1:
                single.append((row, start, context))
            elif new:
                yield planner.shared(row, start, new, context)
            start += new
        # Longest first: rows that have no further tile drop off the end.
        single.sort(key=lambda item: -planner.count(item[2]))
        fit = self._workspace.positions(layer.spec) // planner.tile
        for first in range(0, len(single), fit):
            yield planner.separate(single[first : first + fit])


class _Planner:
    def __init__(self, batch: AttentionBatch, layer: LayerRows, workspace: Workspace) -> None:
        self._batch = batch
        self._layer = layer
        self._workspace = workspace
        self._size = layer.keys_NBHD.shape[1]
        self._window = layer.spec.window
        self._tokens = tile_tokens(layer.spec)
        self._group = layer.spec.num_heads // layer.spec.num_kv_heads
        self.tile = tile_positions(self._size)
        self._nothing_hidden = torch.zeros(1, 1, 1, self.tile)

    def count(self, position: int) -> int:
        """Key tiles that a query at this position needs."""
        return position // self.tile - self._low(position) // self.tile + 1

    def shared(self, row: int, start: int, new: int, context: int) -> _Plan:
        """One row of several tokens: its query tiles share every key tile."""
        tiles = -(-new // self._tokens)
        token_VT = torch.arange(tiles * self._tokens).clamp_(max=new - 1).view(tiles, -1)
        calls: list[_Call] = []
        low, high = self._low(context), context + new
        for begin in range(low // self.tile * self.tile, high, self.tile):
            gather: Gather | None = self._gather([row], [begin], [low], [high])
            kinds = [
                self._kind(context + first, min(context + first + self._tokens, high), begin)
                for first in range(0, new, self._tokens)
            ]
            for kind, members in groupby(range(tiles), key=kinds.__getitem__):
                if kind == "hidden":
                    continue
                run = list(members)
                chosen = slice(run[0], run[-1] + 1)
                mask = self._nothing_hidden
                if kind == "edge":
                    position_VM = (token_VT[chosen] + context).repeat_interleave(self._group, 1)
                    mask = self._mask(position_VM[:, None], torch.tensor([begin]))
                calls.append(_Call(gather, chosen, mask))
                gather = None
        out = slice(start, start + new)
        return _Plan(token_VT + start, out, slice(0, new), tuple(calls))

    def separate(self, rows: list[tuple[int, int, int]]) -> _Plan:
        """Rows of one token, most tiles first; each has a query tile and key tiles of its own."""
        calls = []
        counts = [self.count(position) for _, _, position in rows]
        for step in range(counts[0]):
            active = [row for row, count in zip(rows, counts, strict=True) if count > step]
            positions = [position for _, _, position in active]
            lows = [self._low(position) for position in positions]
            begins = [(low // self.tile + step) * self.tile for low in lows]
            gather = self._gather(
                [row for row, _, _ in active], begins, lows, [p + 1 for p in positions]
            )
            position_V11 = torch.tensor(positions).view(-1, 1, 1)
            mask = self._mask(position_V11, torch.tensor(begins))
            calls.append(_Call(gather, slice(0, len(active)), mask))
        tokens = torch.tensor([token for _, token, _ in rows])
        token_VT = tokens[:, None].expand(-1, self._tokens)
        # Every token of a tile is the same one: the first is kept.
        kept = slice(0, len(rows) * self._tokens, self._tokens)
        return _Plan(token_VT, tokens, kept, tuple(calls))

    def _low(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _kind(self, first: int, end: int, begin: int) -> str:
        """How queries `first` to `end` see the key tile at `begin`."""
        last_key = begin + self.tile - 1
        window = self._window
        if end <= begin or (window is not None and first - window >= last_key):
            return "hidden"
        whole = first >= last_key and (window is None or end - window <= begin)
        return "full" if whole else "edge"

    def _mask(self, position_VXM: torch.Tensor, begin_V: torch.Tensor) -> torch.Tensor:
        """[V, 1, M, S] for queries at `position_VXM` [V, 1, M] over the tiles at `begin_V`."""
        key_VS = begin_V[:, None] + torch.arange(self.tile)
        behind = position_VXM[..., None] - key_VS[:, None, None]
        shown = behind >= 0
        if self._window is not None:
            shown &= behind < self._window
        return torch.where(shown, 0.0, HIDDEN)

    def _gather(
        self, rows: list[int], begins: list[int], lows: list[int], highs: list[int]
    ) -> Gather:
        """One key tile per row; positions outside ``low .. high`` may be anything, so cleared."""
        begin_R1 = torch.tensor(begins)[:, None]
        tables_RB = self._batch.block_tables_RB[rows]
        column_RN = begin_R1 // self._size + torch.arange(self.tile // self._size)
        blocks_RN = tables_RB.gather(1, column_RN.clamp_(max=tables_RB.shape[1] - 1))
        key_RS = begin_R1 + torch.arange(self.tile)
        low_R1, high_R1 = torch.tensor(lows)[:, None], torch.tensor(highs)[:, None]
        dirty_RS = (key_RS < low_R1) | (key_RS >= high_R1)
        return self._workspace.gather(self._layer, blocks_RN, dirty_RS)


class _Fold:
    """The softmax over all tiles so far: numerator, denominator and the largest exponent.

    Only sums, products, maxima and quotients, which round alike wherever they are computed, and
    exponentials in float64, whose last digit does not reach float32.
    """

    def __init__(self, q_VKMD: torch.Tensor, v_dim: int) -> None:
        self._sum_VKMD = q_VKMD.new_zeros((*q_VKMD.shape[:3], v_dim))
        self._weight_VKM = q_VKMD.new_zeros(q_VKMD.shape[:3])
        self._top_VKM = q_VKMD.new_full(q_VKMD.shape[:3], -torch.inf)

    def add(self, tiles: slice, out_VKMD: torch.Tensor, lse_VKM: torch.Tensor) -> None:
        """Take in one key tile's result for some of the query tiles."""
        top = torch.maximum(self._top_VKM[tiles], lse_VKM)
        old, new = exp(self._top_VKM[tiles] - top), exp(lse_VKM - top)
        total = self._sum_VKMD[tiles]
        total.mul_(old[..., None]).add_(out_VKMD * new[..., None])
        self._weight_VKM[tiles].mul_(old).add_(new)
        self._top_VKM[tiles] = top

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[V, K, M, v_dim] and its log-sum-exp [V, K, M]."""
        log = self._weight_VKM.double().log_().float()
        return self._sum_VKMD / self._weight_VKM[..., None], self._top_VKM + log
