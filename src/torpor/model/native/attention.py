"""Attention over the paged cache by the compiled kernels: no block is gathered or copied.

A token's bits depend on its row up to it: neither on the other rows, nor on how its row is chunked,
nor on the number of threads.

Shape letters: T new tokens of all rows, R rows, B blocks of a table, H heads, D head size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from torpor.model.attention.interface import (
    AttentionBatch,
    AttentionSpec,
    Capabilities,
    LseAttention,
)
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.machine.scratch import Allocate
from torpor.model.native.calls import Calls
from torpor.model.native.library import SUFFIXES, Layer, Library, Step, Tokens

FEW_QUERIES = 16
"""Queries of a row, over the heads that share a KV head, up to which each attends by itself,
one after the other."""

_FEW, _TILE = 0, 1


@dataclass(frozen=True, slots=True)
class _Batch:
    """Arrays of one step; the C structures point into them."""

    batch: AttentionBatch
    tables_RB: torch.Tensor
    slots_T: torch.Tensor
    starts_R: np.ndarray
    contexts_R: np.ndarray


class NativeAttention(LseAttention):
    """`AttentionBackend` for a CPU.

    Args:
        kv: the arena [num_blocks, layout.elements_per_block].
        layout: where layers lie in a block.
        library: the kernels; they have float32 and bfloat16, for layers and for the cache.
        calls: of one engine, those of its layers included; None for calls of its own.
        allocate: gives scratch memory, see `Allocate`; called only here.

    Raises:
        ArgumentError: the arena does not fit the layout.
    """

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KVLayout,
        *,
        library: Library,
        calls: Calls | None = None,
        allocate: Allocate,
    ) -> None:
        layout.check_arena(kv)
        self._kv = kv
        self._library = library
        self._calls = Calls(library) if calls is None else calls
        self._kernels = {dtype: library.kernel("attend", dtype, kv.dtype) for dtype in SUFFIXES}
        self._layers = {layer: _layer(kv, layout, spec) for layer, spec in layout.specs.items()}
        self._threads = torch.get_num_threads()
        self._stride = max(map(library.scratch_floats, self._layers.values()))
        self._scratch = allocate((self._threads, self._stride), torch.float32, "attention")
        self._tile_tokens = {
            layer: library.tokens_of_a_tile(each) for layer, each in self._layers.items()
        }
        self._parts, self._team = self._threads, library.team(self._threads)
        self._batch: _Batch | None = None
        self._steps: dict[tuple[int, int], tuple[Step, np.ndarray]] = {}
        """By heads of a KV head and tokens of a tile. Kept calls know a structure by its address:
        each step writes into the same ones."""

    @property
    def capabilities(self) -> Capabilities:
        """See `AttentionBackend`."""
        return Capabilities(
            name="native",
            block_sizes=None,
            reads_past_length=False,
            returns_lse=True,
            k_v_dims_differ=True,
            windows=True,
            batch_invariant=True,
        )

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        lens_R = np.array(batch.query_lens, dtype=np.int64)
        starts_R = np.cumsum(lens_R) - lens_R
        tables_RB, slots_T = batch.block_tables_RB.contiguous(), batch.slots_T.contiguous()
        contexts_R = np.array(batch.context_lens, dtype=np.int64)
        self._batch = _Batch(batch, tables_RB, slots_T, starts_R, contexts_R)
        # Scratch memory is for the threads there were; torch may have been told of another number.
        self._parts = min(torch.get_num_threads(), self._threads)
        self._team = self._library.team(self._parts)
        for geometry, (step, _) in self._steps.items():
            self._steps[geometry] = step, self._plan(step, *geometry)

    def _attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        *,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q_THD, k_THD, v_THD = map(_with_heads_together, (q_THD, k_THD, v_THD))
        out_THD = self._calls.empty((*q_THD.shape[:2], spec.v_dim), q_THD.dtype)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32) if with_lse else None
        address = self._calls.address
        tokens = Tokens(
            address(q_THD),
            address(k_THD),
            address(v_THD),
            q_THD.stride(0),
            k_THD.stride(0),
            v_THD.stride(0),
            address(out_THD),
            address(lse_TH),
        )
        self._calls.call(
            self._kernels[q_THD.dtype],
            self._team,
            ctypes.addressof(self._layers[spec.layer]),
            ctypes.addressof(self._step(spec)),
            self._calls.pin(tokens),
            self._scratch.data_ptr(),
            self._stride,
        )
        return out_THD, lse_TH

    def _step(self, spec: AttentionSpec) -> Step:
        group, tile = spec.num_heads // spec.num_kv_heads, self._tile_tokens[spec.layer]
        made = self._steps.get((group, tile))
        if made is None:
            step = Step()
            made = self._steps[group, tile] = step, self._plan(step, group, tile)
        return made[0]

    def _plan(self, step: Step, group: int, tile: int) -> np.ndarray:
        """Write a step's structure; the items it points to."""
        rows = self._batch
        assert rows is not None, "attend() before begin()"
        batch = rows.batch
        items: list[tuple[int, int, int, int]] = []
        for row, count in enumerate(batch.query_lens):
            few = count * group <= FEW_QUERIES
            size, form = (FEW_QUERIES, _FEW) if few else (tile, _TILE)
            items += (
                (row, first, min(size, count - first), form) for first in range(0, count, size)
            )
        contexts, parts = batch.context_lens, self._parts
        # Each thread begins with a part, of tokens whose queries it likely turned. The longest
        # first, so that threads end together.
        bounds = [part * len(items) // parts for part in range(parts + 1)]
        items = [
            item
            for first, last in pairwise(bounds)
            for item in sorted(
                items[first:last],
                key=lambda item: -item[2] * (contexts[item[0]] + item[1] + item[2]),
            )
        ]
        items_N4 = np.array(items, dtype=np.int64)
        step.tables = rows.tables_RB.data_ptr()
        step.table_width = rows.tables_RB.shape[1]
        step.starts = rows.starts_R.ctypes.data
        step.contexts = rows.contexts_R.ctypes.data
        step.slots = rows.slots_T.data_ptr()
        step.tokens = len(rows.slots_T)
        step.items = items_N4.ctypes.data
        step.num_items = len(items)
        return items_N4


def _with_heads_together(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


def _layer(kv: torch.Tensor, layout: KVLayout, spec: AttentionSpec) -> Layer:
    return Layer(
        kv.data_ptr(),
        layout.elements_per_block,
        layout.key_offset(spec.layer),
        layout.value_offset(spec.layer),
        spec.num_heads,
        spec.num_kv_heads,
        spec.k_dim,
        spec.v_dim,
        layout.block_size,
        spec.window or 0,
        spec.scale,
    )
