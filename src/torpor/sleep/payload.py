"""What comes through the door: (name, tensor) pairs, and whether each of them fits."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import (
    ArgumentError,
    AsleepError,
    OwnershipError,
    WeightsError,
    WeightsMismatchError,
)
from torpor.sleep.source import SliceTable, WeightSource
from torpor.sleep.storage import storage_of

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry

Payload = WeightSource | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

Copies = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Parts of owned tensors, and the values that go there."""

PIECE_ELEMENTS = 32_000
"""Just under ``at::internal::GRAIN_SIZE`` (32,768 elements), below which torch uses one thread."""


def pairs_of(payload: Payload) -> Iterable[tuple[str, torch.Tensor]]:
    """The pairs of anything an update accepts.

    Raises:
        ArgumentError: it cannot hold pairs.
    """
    if isinstance(payload, Mapping):
        return payload.items()
    if isinstance(payload, WeightSource):
        return payload.pairs()
    given: object = payload  # Callers without a type checker pass anything.
    if not isinstance(given, Iterable):
        raise ArgumentError(
            f"a {type(given).__name__} holds no weights; pass a WeightSource, a mapping, or "
            "(name, tensor) pairs"
        )
    return payload


def wanted_pairs(source: WeightSource, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of a source whose names are wanted."""
    wanted = frozenset(names)
    return ((name, value) for name, value in source.pairs() if name in wanted)


def checked_pair(item: Any) -> tuple[str, torch.Tensor]:
    """One pair, if it is one.

    Raises:
        ArgumentError: it is something else.
    """
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        raise ArgumentError(f"expected (name, tensor) pairs, got {type(item).__name__}")
    if not isinstance(item[1], torch.Tensor):
        raise ArgumentError(f"the value of {item[0]!r} is a {type(item[1]).__name__}, not a tensor")
    return item


def find(context: Context, name: str, value: torch.Tensor) -> tuple[Entry, Copies]:
    """The owned tensor that a checkpoint name fills, and what goes where in it.

    Raises:
        WeightsMismatchError: the name, shape or dtype does not fit.
        WeightsError: the value is NaN.
        OwnershipError: the tensor has left its memory.
        AsleepError: its memory is released.
    """
    if name not in context.slices:
        raise WeightsMismatchError(f"the model has no weight {name!r}{_hint(name, context.slices)}")
    part = context.slices[name]
    entry = context.ledger.get(part.parameter)
    target = None if entry is None else entry.tensor(part.parameter)
    if entry is None or target is None or not _in_slot(entry, target):
        raise OwnershipError(
            f"{part.parameter!r} has left its memory (moved or replaced); adopt() it again before "
            "updating it"
        )
    if not entry.arena.is_mapped:
        raise AsleepError(f"{part.parameter!r} is asleep; wake_up([{entry.tag!r}]) first")
    rows = part.rows_of(target)
    _check_fits(name, value, rows, part.whole_shape(rows))
    copies = tuple(part.copies(rows, value))
    if context.check_nan and value.is_floating_point():
        _refuse_nan(name, copies)
    return entry, copies


def admitted(slices: SliceTable, name: str, value: torch.Tensor) -> torch.Tensor:
    """A value as the owner of its name wants it, who may have something to say about it.

    Raises:
        WeightsError: the owner refuses it.
    """
    admit = slices[name].admit if name in slices else None
    return value if admit is None else admit(name, value)


def put(copies: Copies) -> None:
    """Write values that fit."""
    for rows, value in copies:
        with torch.inference_mode() if rows.is_inference() else torch.no_grad():
            in_pieces = all(t.device.type == "cpu" and t.is_contiguous() for t in (rows, value))
            targets, pieces = (_pieces(rows), _pieces(value)) if in_pieces else ((rows,), (value,))
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor in pieces that torch reads on the calling thread.

    On the CPU a larger loop is shared among threads, and the share of a thread that has to wait for
    a busy core holds up the whole: hundreds of tensors then take seconds instead of a tenth of one.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return (tensor,)
    pieces: tuple[torch.Tensor, ...] = tensor.view(-1).split(PIECE_ELEMENTS)
    return pieces


def _in_slot(entry: Entry, tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage.data_ptr() == entry.address


def _check_fits(
    name: str, value: torch.Tensor, target: torch.Tensor, shape: tuple[int, ...]
) -> None:
    if tuple(value.shape) != shape:
        raise WeightsMismatchError(
            f"{name!r} has shape {tuple(value.shape)}; the model needs {shape}"
        )
    both_float = value.is_floating_point() and target.is_floating_point()
    if value.dtype != target.dtype and not both_float:
        raise WeightsMismatchError(
            f"{name!r} is {value.dtype}, which cannot become {target.dtype} as it is; convert it "
            "first"
        )
    if value.is_meta or value.layout != torch.strided:
        what = "on the meta device and has no values" if value.is_meta else f"{value.layout}"
        raise WeightsMismatchError(f"{name!r} is {what}; send a plain tensor")


def _refuse_nan(name: str, copies: Copies) -> None:
    if any(_has_nan(value) for _, value in copies):
        raise WeightsError(
            f"{name!r} contains NaN; check the training step or file it comes from, or pass "
            "check_nan=False to load it anyway"
        )


def _has_nan(value: torch.Tensor) -> bool:
    value = value.detach()
    if value.element_size() == 1:  # fp8 has no reductions
        value = value.to(torch.float32)
    # A finite sum proves that no NaN is in it, at the speed of reading once; inf needs a look.
    if math.isfinite(sum(float(piece.sum(dtype=torch.float32)) for piece in _pieces(value))):
        return False
    return bool(torch.isnan(value).any())


def _hint(name: str, slices: SliceTable) -> str:
    close = difflib.get_close_matches(name, [part.name for part in slices], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; check the names of the source"
