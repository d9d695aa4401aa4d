"""Where official content comes from: weight sources, the files behind them, and the slice table.

A *source* yields (checkpoint name, tensor) pairs. The *slice table* says which rows of which owned
tensor each checkpoint name fills, and how ranks divide it; the same table serves load, reload,
update, digests and coverage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torpor.errors import WeightsMismatchError
from torpor.sleep.shards import REPLICATED, Shard, ShardRule, TensorParallel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FileExtent:
    """Where the raw, row-major bytes of one tensor lie in a file."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    dtype: torch.dtype


@runtime_checkable
class WeightSource(Protocol):
    """A checkpoint that can be read again: what level 2 reloads from."""

    def names(self) -> Collection[str]:
        """Every checkpoint name the source holds, without reading tensors."""
        ...

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor) once. Tensors may be views of a file mapping.

        Raises:
            CheckpointError: a file is damaged, truncated or missing.
        """
        ...

    def extent(self, name: str) -> FileExtent | None:
        """Where the tensor's bytes lie in a file, or None when no file holds them as they are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """One checkpoint name and the rows of the owned tensor that it fills."""

    name: str
    """Name in the checkpoint."""
    parameter: str
    """Fully qualified name of the parameter or buffer in the module."""
    start: int = 0
    """First row along dim 0."""
    length: int | None = None
    """Number of rows along dim 0; None means the whole tensor."""
    rule: ShardRule = REPLICATED
    """How ranks divide the checkpoint's tensor."""
    shard: Shard | None = None
    """The part of it that fills the rows here; None for all of it."""
    admit: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """Looks at a name's value before it is written: gives it in the shape of the rows, or raises a
    `WeightsError`."""

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of the owned tensor that this slice speaks of, detached."""
        whole = tensor.detach()
        return whole if self.length is None else whole[self.start : self.start + self.length]

    def whole_shape(self, rows: torch.Tensor) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, from the rows it fills."""
        return tuple(rows.shape) if self.shard is None else self.shard.whole_shape(rows)

    def copies(
        self, rows: torch.Tensor, value: torch.Tensor
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """What goes where when the checkpoint's tensor fills its rows: targets, and views of it."""
        return ((rows, value),) if self.shard is None else self.shard.copies(rows, value)

    def extents(self, whole: FileExtent) -> list[FileExtent]:
        """Where the rows' bytes lie in the file that holds the checkpoint's tensor, in order; empty
        where they do not lie there as they are."""
        return [whole] if self.shard is None else self.shard.extents(whole)

    def portable(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What a portable digest is taken of, and its name: the checkpoint's, with the index of the
        part where only a part is here."""
        rows = self.rows_of(tensor)
        if self.shard is None:
            return self.name, rows
        return self.name + self.shard.label, self.shard.without_padding(rows)


class SliceTable:
    """Every checkpoint name a model accepts, and where each one goes."""

    def __init__(
        self,
        slices: Collection[WeightSlice],
        ignored: Collection[str] = (),
        ignored_prefixes: Collection[str] = (),
    ) -> None:
        """Build the table.

        Args:
            slices: one entry per checkpoint name.
            ignored: checkpoint names that are accepted and dropped (such as the tied head).
            ignored_prefixes: the same of all names that begin with one of these (such as layers
                for another purpose).

        Raises:
            WeightsMismatchError: a name appears twice.
        """
        self._by_name: dict[str, WeightSlice] = {}
        for entry in slices:
            if entry.name in self._by_name:
                raise WeightsMismatchError(f"slice table names {entry.name!r} twice; remove one")
            self._by_name[entry.name] = entry
        self._ignored = frozenset(ignored)
        self._ignored_prefixes = tuple(ignored_prefixes)
        self._by_parameter = _grouped(self._by_name.values())

    @classmethod
    def identity(cls, names: Collection[str]) -> SliceTable:
        """A table in which every checkpoint name fills the whole tensor of the same name."""
        return cls([WeightSlice(name=name, parameter=name) for name in names])

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> WeightSlice:
        return self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[WeightSlice]:
        return iter(self._by_name.values())

    def for_rank(self, tp: TensorParallel) -> SliceTable:
        """The table of one rank, from the one of the whole model.

        Raises:
            ArgumentError: the ranks do not divide a tensor.
        """
        if tp.size == 1:
            return self
        slices, ignored = [], set(self._ignored)
        reached: dict[str, int] = {}
        for entry in self:
            if entry.rule.first_rank_only and tp.rank:
                ignored.add(entry.name)
                continue
            shard, start, length = entry.rule.shard(tp), 0, entry.length
            if length is not None:
                start = reached.get(entry.parameter, 0)
                length = length if shard is None or shard.dim else shard.length
                reached[entry.parameter] = start + length
            slices.append(replace(entry, start=start, length=length, shard=shard))
        return SliceTable(slices, ignored, self._ignored_prefixes)

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold the name and it is dropped."""
        return name in self._ignored or name.startswith(self._ignored_prefixes)

    def by_parameter(self) -> Mapping[str, tuple[WeightSlice, ...]]:
        """The slices of each parameter, in row order."""
        return self._by_parameter


def _grouped(slices: Iterable[WeightSlice]) -> Mapping[str, tuple[WeightSlice, ...]]:
    grouped: dict[str, list[WeightSlice]] = {}
    for entry in slices:
        grouped.setdefault(entry.parameter, []).append(entry)
    return {
        parameter: tuple(sorted(entries, key=lambda entry: entry.start))
        for parameter, entries in grouped.items()
    }
