"""Where each layer's keys and values lie inside a block of the KV arena.

The arena is block-major: [num_blocks, elements_per_block]. A block holds layer after layer, each
layer's keys before its values. Inside, a KV head's positions lie together, [num_kv_heads,
block_size, dim]: one *strip* of ``block_size * dim`` elements per head. So strips gathered head by
head are what a batched matrix product takes, without another copy.

Shape letters: N blocks of the arena, H KV heads, B positions of a block, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionSpec
from torpor.model.attention.kv_fp8 import FP8, KVScales


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long pieces of the arena as rows of one matrix, so that one index gathers them.

    Piece `i` of head `h` in block `b` is row ``b * per_block + h * per_head + i * per_piece``.
    """

    matrix: torch.Tensor
    """[rows, length]; rows overlap in memory where the lengths of a block do not divide it."""
    per_block: int
    per_head: int
    per_piece: int

    @property
    def overlap(self) -> bool:
        """Whether rows share memory, which torch refuses to write through."""
        return self.matrix.stride(0) < self.matrix.shape[1]


class KVLayout:
    """Offsets of all layers inside one block.

    Args:
        specs: every layer's attention; layers may differ in heads and head sizes.
        block_size: tokens of a block.
        dtype: of the cached keys and values.
        scales: of every layer by its index, for float8_e4m3fn; None for other dtypes.

    Raises:
        ArgumentError: no layers, a layer twice, a size that is not positive, or scales for a dtype
            that has none, or none for one that needs them.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        block_size: int,
        dtype: torch.dtype,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        if block_size < 1:
            raise ArgumentError(f"block_size is {block_size}; give a positive number of tokens")
        if not specs:
            raise ArgumentError("no attention layers given; a KV layout needs at least one")
        wanted = {spec.layer for spec in specs} if dtype == FP8 else set()
        self.scales = dict(scales or {})
        if self.scales.keys() != wanted:
            raise ArgumentError(
                f"scales are given for {len(self.scales)} layers, and a cache of {dtype} needs "
                f"them for {len(wanted)}; give one pair for each layer of a float8_e4m3fn cache"
            )
        self.block_size = block_size
        self.dtype = dtype
        self.specs: dict[int, AttentionSpec] = {}
        self._offsets: dict[int, int] = {}
        offset = 0
        for spec in specs:
            _check(spec)
            if spec.layer in self.specs:
                raise ArgumentError(f"layer {spec.layer} is given twice; number layers uniquely")
            self.specs[spec.layer] = spec
            self._offsets[spec.layer] = offset
            offset += block_size * spec.num_kv_heads * (spec.k_dim + spec.v_dim)
        self.elements_per_block = offset

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return self.elements_per_block * self.dtype.itemsize

    def key_offset(self, layer: int) -> int:
        """Elements from a block's start to the layer's keys."""
        return self._offsets[layer]

    def value_offset(self, layer: int) -> int:
        """Elements from a block's start to the layer's values."""
        spec = self.specs[layer]
        return self._offsets[layer] + self.block_size * spec.num_kv_heads * spec.k_dim

    def keys(self, kv: torch.Tensor, layer: int) -> torch.Tensor:
        """A view [num_blocks, block_size, num_kv_heads, k_dim] of one layer's keys in `kv`."""
        spec = self.specs[layer]
        return self._view(kv, self._offsets[layer], spec.num_kv_heads, spec.k_dim)

    def values(self, kv: torch.Tensor, layer: int) -> torch.Tensor:
        """A view [num_blocks, block_size, num_kv_heads, v_dim] of one layer's values in `kv`."""
        spec = self.specs[layer]
        return self._view(kv, self.value_offset(layer), spec.num_kv_heads, spec.v_dim)

    def key_strips(self, kv: torch.Tensor, layer: int, *, heads: int) -> Rows:
        """Strips from the layer's first key head on; the value heads follow the key heads."""
        return self._rows(kv, self._offsets[layer], heads, self.specs[layer].k_dim, whole=True)

    def value_strips(self, kv: torch.Tensor, layer: int) -> Rows:
        """Strips of the layer's value heads."""
        spec = self.specs[layer]
        offset = self.value_offset(layer)
        return self._rows(kv, offset, spec.num_kv_heads, spec.v_dim, whole=True)

    def key_tokens(self, kv: torch.Tensor, layer: int) -> Rows:
        """Single keys, as rows of k_dim."""
        spec = self.specs[layer]
        return self._rows(kv, self._offsets[layer], spec.num_kv_heads, spec.k_dim, whole=False)

    def value_tokens(self, kv: torch.Tensor, layer: int) -> Rows:
        """Single values, as rows of v_dim."""
        spec = self.specs[layer]
        offset = self.value_offset(layer)
        return self._rows(kv, offset, spec.num_kv_heads, spec.v_dim, whole=False)

    def check_arena(self, kv: torch.Tensor) -> None:
        """Raise ArgumentError unless `kv` is a contiguous arena of this layout."""
        fits = kv.dim() == 2 and kv.shape[1] == self.elements_per_block and kv.is_contiguous()
        if not fits or kv.dtype != self.dtype:
            raise ArgumentError(
                f"the KV arena is {kv.dtype} {tuple(kv.shape)}; this layout needs a contiguous "
                f"{self.dtype} tensor of shape (num_blocks, {self.elements_per_block})"
            )

    def _view(self, kv: torch.Tensor, offset: int, heads: int, dim: int) -> torch.Tensor:
        part_NE = kv.narrow(1, offset, heads * self.block_size * dim)
        return part_NE.view(-1, heads, self.block_size, dim).transpose(1, 2)

    def _rows(self, kv: torch.Tensor, offset: int, heads: int, dim: int, *, whole: bool) -> Rows:
        strip = self.block_size * dim
        length = strip if whole else dim
        # The largest step that reaches every piece; the pieces themselves where sizes are equal.
        step = math.gcd(self.elements_per_block, length)
        last = (kv.shape[0] - 1) * self.elements_per_block + heads * strip - length
        matrix = kv.as_strided((last // step + 1, length), (step, 1), kv.storage_offset() + offset)
        return Rows(matrix, self.elements_per_block // step, strip // step, dim // step)


def _check(spec: AttentionSpec) -> None:
    sizes = (spec.num_heads, spec.num_kv_heads, spec.k_dim, spec.v_dim)
    if min(sizes) < 1 or spec.num_heads % spec.num_kv_heads:
        raise ArgumentError(
            f"layer {spec.layer} has {spec.num_heads} heads over {spec.num_kv_heads} KV heads of "
            f"sizes {spec.k_dim} and {spec.v_dim}; sizes must be positive and heads divisible"
        )
    if spec.window is not None and spec.window < 1:
        raise ArgumentError(f"layer {spec.layer} has window {spec.window}; use None or at least 1")
