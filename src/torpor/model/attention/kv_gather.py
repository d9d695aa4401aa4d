"""Gathering scattered blocks into one workspace, head by head.

Shape letters: R rows, N blocks per row, P pairs of row and KV head, S positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionSpec
from torpor.model.attention.kv_fp8 import FP8, as_bytes
from torpor.model.attention.kv_layout import KVLayout, Rows
from torpor.model.machine.scratch import Allocate


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Views of one layer's part of the arena, made once."""

    spec: AttentionSpec
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    """Of what is stored, and all views are of bytes then; None where it is stored as it is."""
    key_strips: Rows
    value_strips: Rows | None
    """None where keys and values are equally long: then `key_strips` reaches the values too."""
    key_tokens: Rows
    value_tokens: Rows
    keys_NBHD: torch.Tensor
    values_NBHD: torch.Tensor

    @classmethod
    def of(cls, layout: KVLayout, kv: torch.Tensor, spec: AttentionSpec) -> LayerRows:
        """The views of layer ``spec.layer``."""
        layer, heads = spec.layer, spec.num_kv_heads
        same = spec.k_dim == spec.v_dim
        kv, scales = as_bytes(kv), layout.scales.get(layer)
        return cls(
            spec=spec,
            k_scale=None if scales is None else scales.k_scale,
            v_scale=None if scales is None else scales.v_scale,
            key_strips=layout.key_strips(kv, layer, heads=2 * heads if same else heads),
            value_strips=None if same else layout.value_strips(kv, layer),
            key_tokens=layout.key_tokens(kv, layer),
            value_tokens=layout.value_tokens(kv, layer),
            keys_NBHD=layout.keys(kv, layer),
            values_NBHD=layout.values(kv, layer),
        )


@dataclass(frozen=True, slots=True)
class Gather:
    """What to fetch and where it goes, for all layers of one geometry; made by `Workspace`."""

    key_strips: torch.Tensor
    """int64 row numbers in (row, KV head, block) order; the values' follow if as long."""
    value_strips: torch.Tensor | None
    dirty: torch.Tensor | None
    """int64 [*]: positions of the fetched keys, counted over all pairs, that no token wrote."""
    key_room: torch.Tensor
    """Workspace that takes `key_strips`, and `value_room` that takes `value_strips`."""
    value_room: torch.Tensor
    widening: tuple[torch.Tensor, torch.Tensor] | None
    """Copy the second, all that was fetched, to the first, in float32."""
    keys_PSD: torch.Tensor
    values_PSD: torch.Tensor
    """What was fetched, until the next `load`."""

    @property
    def positions(self) -> int:
        """Per pair; whole blocks."""
        return self.keys_PSD.shape[1]

    def load(self, layer: LayerRows) -> None:
        """Fetch into `keys_PSD` and `values_PSD`; unwritten positions read as zero."""
        keys, values = layer.key_strips.matrix, layer.value_strips
        torch.index_select(keys, 0, self.key_strips, out=self.key_room)
        if values is not None:
            assert self.value_strips is not None
            torch.index_select(values.matrix, 0, self.value_strips, out=self.value_room)
        if self.widening is not None:
            self.widening[0].copy_(self.widening[1])
        for part, scale in ((self.keys_PSD, layer.k_scale), (self.values_PSD, layer.v_scale)):
            if scale is not None:
                part.mul_(scale)
        if self.dirty is not None:
            for part in (self.keys_PSD, self.values_PSD):
                part.view(-1, part.shape[2]).index_fill_(0, self.dirty, 0.0)


class Workspace:
    """Memory that gathered keys and values pass through, one gather at a time.

    Args:
        layout: of the arena.
        nbytes: budget; a single block of any layer always fits, whatever the budget.
        widen: hand out float32 whatever the cache's dtype; needed where that has scales.
        allocate: gives the memory; see `Allocate`.
        positions: positions of one row that must fit at the least.
    """

    def __init__(
        self,
        layout: KVLayout,
        nbytes: int,
        *,
        widen: bool,
        allocate: Allocate,
        positions: int = 1,
    ) -> None:
        if nbytes < 1:
            raise ArgumentError(f"workspace_bytes is {nbytes}; give a positive number of bytes")
        size = layout.block_size
        blocks = -(-positions // size)
        least = max(size * blocks * _width(spec) for spec in layout.specs.values())
        widen = widen and layout.dtype != torch.float32
        assert widen or layout.dtype != FP8, "nothing is computed in eight bits"
        itemsize = layout.dtype.itemsize + (torch.float32.itemsize if widen else 0)
        elements = max(nbytes // itemsize, least)
        self._block_size = size
        stored = allocate((elements,), layout.dtype, "attention_gather")
        self._narrow, self._stored = as_bytes(stored), stored
        self._wide = None
        if widen:
            self._wide = allocate((elements,), torch.float32, "attention_gather_float32")

    def positions(self, spec: AttentionSpec) -> int:
        """How many positions of one layer fit at once, in whole blocks."""
        size = self._block_size
        return self._narrow.numel() // (_width(spec) * size) * size

    def gather(
        self, layer: LayerRows, blocks_RN: torch.Tensor, dirty_RS: torch.Tensor | None = None
    ) -> Gather:
        """Plan to fetch these blocks.

        Args:
            layer: any layer of the geometry.
            blocks_RN: int64 block ids, as many per row.
            dirty_RS: bool [R, N * block_size], True where the slot must read as zero; it may hold
                anything, and zero times NaN is NaN.
        """
        spec, heads = layer.spec, layer.spec.num_kv_heads
        rows, blocks = blocks_RN.shape
        pairs, positions = rows * heads, blocks * self._block_size
        split = pairs * positions * spec.k_dim
        end = split + pairs * positions * spec.v_dim
        keys = _strip_numbers(layer.key_strips, blocks_RN, heads)
        key_room = self._narrow[:split]
        values = None
        if layer.value_strips is None:
            keys = torch.cat((keys, keys + heads * layer.key_strips.per_head))
            key_room = self._narrow[:end]
        else:
            values = _strip_numbers(layer.value_strips, blocks_RN, heads)
        dirty = None
        if dirty_RS is not None:
            dirty = dirty_RS[:, None].expand(-1, heads, -1).reshape(-1).nonzero().view(-1)
        fetched = self._narrow if self._wide is None else self._wide
        return Gather(
            key_strips=keys,
            value_strips=values,
            dirty=dirty,
            key_room=key_room.view(keys.numel(), -1),
            value_room=self._narrow[split:end].view(pairs * blocks, -1),
            widening=None if self._wide is None else (self._wide[:end], self._stored[:end]),
            keys_PSD=fetched[:split].view(pairs, positions, spec.k_dim),
            values_PSD=fetched[split:end].view(pairs, positions, spec.v_dim),
        )


def _strip_numbers(rows: Rows, blocks_RN: torch.Tensor, heads: int) -> torch.Tensor:
    head_H = torch.arange(heads, device=blocks_RN.device) * rows.per_head
    return (blocks_RN[:, None] * rows.per_block + head_H[:, None]).view(-1)


def _width(spec: AttentionSpec) -> int:
    return spec.num_kv_heads * (spec.k_dim + spec.v_dim)


def write_tokens(
    rows: Rows,
    slots_NBHD: torch.Tensor,
    where: torch.Tensor | Sequence[torch.Tensor],
    new_THD: torch.Tensor,
) -> None:
    """Store new keys or values of one layer.

    Args:
        rows: the layer's tokens as rows.
        slots_NBHD: the same as a view, used where the rows overlap.
        where: row numbers [T * H], or blocks [T] and offsets [T] where the rows overlap.
        new_THD: what to store; any strides.
    """
    if isinstance(where, torch.Tensor):
        # A single index on a matrix is the form that torch stores fastest.
        rows.matrix.index_put_((where,), new_THD.reshape(-1, rows.matrix.shape[1]))
    else:
        slots_NBHD.index_put_(tuple(where), new_THD)


def token_rows(
    rows: Rows, heads: int, blocks_T: torch.Tensor, offsets_T: torch.Tensor
) -> torch.Tensor | Sequence[torch.Tensor]:
    """The `where` of `write_tokens` for slots given as blocks and offsets."""
    if rows.overlap:
        return blocks_T, offsets_T
    token_T = blocks_T * rows.per_block + offsets_T * rows.per_piece
    head_H = torch.arange(heads, device=blocks_T.device) * rows.per_head
    return (token_T[:, None] + head_H).view(-1)
