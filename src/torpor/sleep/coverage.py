"""Which checkpoint names an owned tensor still lacks.

One storage can have many names: ties that look at the same bytes, or views of different parts. It
is covered once every byte that a checkpoint name leads to has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from torpor.sleep.ledger import Entry
    from torpor.sleep.source import SliceTable, WeightSlice

_Span = tuple[int, int]
"""First byte in the storage, and the one after the last."""


def gaps(slices: SliceTable, entry: Entry) -> list[str]:
    """Names to write before the entry's content is complete; of tied names the first known.

    A tensor that the slice table does not reach, or not in full, is named by its owned name.
    """
    by_parameter = slices.by_parameter()
    names = [name for name in entry.aliases if name in by_parameter]
    if not names:
        return [entry.name]
    written = [_span(entry, name) for name in names if _is_written(entry, name, by_parameter[name])]
    missing: list[str] = []
    for name in names:
        span = _span(entry, name)
        if not _inside(span, written):
            parts = by_parameter[name]
            missing += [part.name for part in parts if part.name not in entry.covered] or [name]
            written.append(span)
    return missing


def reaches_all(slices: SliceTable, entry: Entry) -> bool:
    """Whether checkpoint names lead to every byte of an entry, so that it can be filled again.

    Views with gaps count for nothing: where that errs, a host copy is kept that could be spared.
    """
    by_parameter = slices.by_parameter()
    tensors = [
        tensor
        for name in entry.aliases
        if (parts := by_parameter.get(name)) and _are_all_rows(entry, name, parts)
        if (tensor := entry.tensor(name)) is not None
    ]
    return fill_up(tensors, entry.nbytes)


def fill_up(tensors: Iterable[torch.Tensor], nbytes: int) -> bool:
    """Whether tensors of one storage take up all of it together; views with gaps do not count."""
    return _inside((0, nbytes), [_span_of(tensor) for tensor in tensors if _is_dense(tensor)])


def _is_written(entry: Entry, name: str, parts: Sequence[WeightSlice]) -> bool:
    written = all(part.name in entry.covered for part in parts)
    return written and _are_all_rows(entry, name, parts)


def _are_all_rows(entry: Entry, name: str, parts: Sequence[WeightSlice]) -> bool:
    if any(part.length is None for part in parts):
        return True
    tensor = entry.tensor(name)
    reached = 0
    for part in parts:
        if part.start > reached:
            return False
        reached = max(reached, part.start + (part.length or 0))
    return tensor is None or reached >= tensor.shape[0]


def _span(entry: Entry, name: str) -> _Span:
    tensor: torch.Tensor | None = entry.tensor(name)
    return (0, 0) if tensor is None else _span_of(tensor)


def _span_of(tensor: torch.Tensor) -> _Span:
    if tensor.numel() == 0:
        return 0, 0
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum(int((size - 1) * stride) for size, stride in reach)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in one piece, each once, in whatever order of dimensions."""
    step = 1
    sized = ((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in sorted((stride, size) for stride, size in sized if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _inside(span: _Span, written: Sequence[_Span]) -> bool:
    reached, end = span
    for start, stop in sorted(written):
        if start <= reached < stop:
            reached = stop
    return bool(written) and reached >= end
