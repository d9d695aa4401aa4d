"""Which part of a checkpoint's tensor each of several tensor-parallel ranks holds.

A *rule* belongs to a checkpoint name and is the same on every rank. Resolved for one rank it is a
*shard*: ranges of the whole tensor along one dimension, which lie one after the other in the rank's
own tensor. Sources and updates bring whole tensors on every rank; each rank takes its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torpor.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from torpor.sleep.source import FileExtent

Unit = Literal["head", "kv_head", "column", "token"]
"""What is never cut in two, and what happens when the ranks do not divide the number of them:

- ``head``, a query head, and ``column``, an element of an MLP's inner width: refused.
- ``kv_head``: neighbouring ranks hold the same one, if their number is a multiple of the heads'.
- ``token``, a row of the vocabulary: ranks hold equal numbers, the last of them padded with zeros.
"""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One of the ranks that hold a model together.

    Raises:
        ArgumentError: no ranks, or one that is not among them.
    """

    rank: int = 0
    size: int = 1
    """Number of ranks, ``tensor_parallel_size``."""

    def __post_init__(self) -> None:
        if not _is_count(self.size) or self.size < 1:
            raise ArgumentError(
                f"tensor_parallel_size is {self.size!r:.80}; give a whole number of at least 1"
            )
        if not _is_count(self.rank) or self.rank >= self.size:
            raise ArgumentError(
                f"rank is {self.rank!r:.80}; with tensor_parallel_size {self.size} give a whole "
                f"number from 0 to {self.size - 1}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


ALONE = TensorParallel()
"""The only rank, which holds everything."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of equal units along the dimension that is split."""

    unit: Unit
    count: int
    """Units in the whole tensor."""
    width: int = 1
    """Elements of one unit along the dimension."""

    def share(self, tp: TensorParallel) -> tuple[int, int, int]:
        """A rank's first element, its number of elements, and its padding after them.

        Raises:
            ArgumentError: the ranks divide the units neither exactly nor as their kind allows.
        """
        own, start = self.count // tp.size, tp.rank * (self.count // tp.size)
        padding = 0
        if self.unit == "token":
            per_rank = -(-self.count // tp.size)
            start = min(tp.rank * per_rank, self.count)
            own = min(per_rank, self.count - start)
            padding = per_rank - own
        elif self.unit == "kv_head" and tp.size % self.count == 0:
            own, start = 1, tp.rank // (tp.size // self.count)
        elif self.count % tp.size:
            raise ArgumentError(
                f"tensor_parallel_size is {tp.size}, which does not divide {self.count} of unit "
                f"{self.unit!r}; choose one that does"
            )
        return start * self.width, own * self.width, padding * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRule:
    """How a checkpoint's tensor is divided among ranks; without blocks it is not."""

    dim: int = 0
    """Dimension of the checkpoint's tensor that is split. Of a linear weight [out, in], 0 is vLLM's
    ``output_dim`` (column-parallel) and 1 its ``input_dim`` (row-parallel)."""
    blocks: tuple[Block, ...] = ()
    """What lies one after the other along it, together all of it. Each is split by itself, so that
    a rank holds its heads of each projection of a fused tensor."""
    first_rank_only: bool = False
    """Whether rank 0 alone holds it: a bias after a row-parallel product, whose ranks' results are
    summed, must be added once. The other ranks have no such parameter."""

    def shard(self, tp: TensorParallel) -> Shard | None:
        """What a rank holds; None for the whole tensor.

        Raises:
            ArgumentError: as `Block.share`.
        """
        if tp.size == 1 or not self.blocks:
            return None
        ranges, first, padding = [], 0, 0
        for block in self.blocks:
            start, length, padding = block.share(tp)
            ranges.append((first + start, length))
            first += block.count * block.width
        assert padding == 0 or len(self.blocks) == 1, "padding in the middle of a tensor"
        return Shard(dim=self.dim, size=first, ranges=tuple(ranges), padding=padding)


REPLICATED = ShardRule()
"""Every rank holds all of it."""

FIRST_RANK_ONLY = ShardRule(first_rank_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of one checkpoint tensor that one rank holds."""

    dim: int
    size: int
    """Elements of the whole tensor along `dim`."""
    ranges: tuple[tuple[int, int], ...]
    """First element and number of elements in the whole tensor, in the order in which they lie in
    the rank's own."""
    padding: int = 0
    """Elements of the rank's own tensor after those, which no checkpoint holds: zeros."""

    @property
    def length(self) -> int:
        """Elements of the rank's own tensor along `dim`."""
        return sum(length for _, length in self.ranges) + self.padding

    @property
    def label(self) -> str:
        """The part as an index of the whole tensor, such as ``[:, 8:16]``."""
        spans = ",".join(f"{start}:{start + length}" for start, length in self.ranges)
        return f"[{':, ' * self.dim}{spans}]"

    def without_padding(self, own: torch.Tensor) -> torch.Tensor:
        """The elements of a rank's own tensor that a checkpoint holds."""
        return own.narrow(self.dim, 0, self.length - self.padding)

    def whole_shape(self, own: torch.Tensor) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, from the rank's own."""
        shape = tuple(own.shape)
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def copies(
        self, own: torch.Tensor, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of a rank's own tensor and what goes there: views of the checkpoint's, of which no
        more is read than is used, and zeros for the padding."""
        reached = 0
        for start, length in self.ranges:
            piece = own.narrow(self.dim, reached, length)
            yield piece, whole.narrow(self.dim, start, length)
            reached += length
        if self.padding:
            rest = own.narrow(self.dim, reached, self.padding)
            yield rest, whole.new_zeros(()).expand(rest.shape)

    def extents(self, whole: FileExtent) -> list[FileExtent]:
        """Where the rank's own bytes lie in the file, in order; empty where they lie scattered, or
        where padding follows that no file holds."""
        if self.dim or self.padding:
            return []
        row = whole.nbytes // self.size
        return [
            replace(whole, offset=whole.offset + start * row, nbytes=length * row)
            for start, length in self.ranges
        ]
