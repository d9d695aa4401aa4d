"""Declaring owners by hand: tensors that are neither parameters nor registered buffers.

A declaration says the class, and how the content comes back: from which sources and by which
rebuild, or by which reset. Declaring a tensor that is owned already changes its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import ArgumentError, OwnershipError
from torpor.sleep.adopt import adopt, refuse_inference_mode, tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.choices import one_of
from torpor.sleep.classes import POLICIES, TAGS, OwnershipClass
from torpor.sleep.derive import rebuild_stale
from torpor.sleep.ledger import Entry, Resident, entry_for, strong_way
from torpor.sleep.status import take_digests
from torpor.sleep.storage import nbytes_of, swap
from torpor.sleep.walk import Found, nested_tensors

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Rebuild


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What an owner says of its tensors."""

    name: str
    cls: OwnershipClass
    tag: str | None = None
    sources: Sequence[str | torch.Tensor] = ()
    rebuild: Rebuild | None = None
    reset: Callable[[], None] | None = None


def declare(context: Context, tensors: Any, declaration: Declaration) -> list[Entry]:
    """Own a tensor, or every tensor in a nested container.

    Returns:
        The entries; none for what stays resident (``RUNTIME``, or ``SYNC`` without a reset).

    Raises:
        OwnershipError: a leaf is not a tensor, a source has no owner, or the tensor cannot be
            moved.
        ArgumentError: the declaration lacks what its class needs.
    """
    refuse_inference_mode()
    sources = _checked_sources(context, declaration)
    named = list(nested_tensors(declaration.name, tensors, strict=True))
    if not named:
        raise OwnershipError(f"{declaration.name!r} holds no tensor; declare it when it does")
    if stays_resident(declaration):
        for name, tensor in named:
            reason = f"declared {declaration.cls.value}"
            context.ledger.residents[name] = Resident(name, nbytes_of(tensor), reason)
        return []
    tag = _tag_of(declaration)
    for _name, tensor in named:
        _make_room(context, tensor, tag)
    found = [Found(name, tensor, declaration.cls, tag) for name, tensor in named]
    adopt(context.ledger, context.device, found, way=strong_way)
    entries = [entry for name, _ in named if (entry := context.ledger.get(name))]
    if len(entries) < len(named):
        refused = [context.ledger.residents[n] for n, _ in named if n not in context.ledger]
        raise OwnershipError(f"cannot own {refused[0].name!r}: {refused[0].reason}")
    for entry in dict.fromkeys(entries):
        _instruct(entry, declaration, sources)
    _make_official(context, entries)
    return entries


def allocate(
    context: Context, shape: Sequence[int], dtype: torch.dtype, declaration: Declaration
) -> torch.Tensor:
    """A zeroed contiguous tensor made straight in an arena of its own.

    Raises:
        OutOfMemoryError: there is no memory for it.
        ArgumentError: a negative size, or the declaration lacks what its class needs.
    """
    refuse_inference_mode()
    sources = _checked_sources(context, declaration)
    if any(size < 0 for size in shape):
        raise ArgumentError(f"shape {tuple(shape)} has a negative size")
    if stays_resident(declaration):
        raise ArgumentError(f"{declaration.cls.value} memory is not released; use torch.zeros")
    probe = torch.empty(tuple(shape), dtype=dtype, device="meta")
    arena = Arena(context.device, nbytes_of(probe), declaration.name)
    arena.map()
    offset = arena.allocate(max(nbytes_of(probe), 1))
    tensor = tensor_in(arena, offset, tuple(shape), dtype)
    entry = entry_for(
        declaration.name, declaration.cls, _tag_of(declaration), arena, offset, tensor,
        strong_way(tensor),
    )  # fmt: skip
    _instruct(entry, declaration, sources)
    context.ledger.add(entry)
    _make_official(context, [entry])
    return tensor


def leave(context: Context) -> None:
    """Move every owned byte back to ordinary memory; the arenas go with their last storage."""
    for entry in list(context.ledger):
        tensor = entry.tensor()
        if tensor is not None:
            _to_ordinary_memory(tensor)
    context.ledger.remove(list(context.ledger))


def stays_resident(declaration: Declaration) -> bool:
    """Whether the declared tensors are never released."""
    without_reset = declaration.cls is OwnershipClass.SYNC and declaration.reset is None
    return declaration.cls is OwnershipClass.RUNTIME or without_reset


def _checked_sources(context: Context, declaration: Declaration) -> tuple[str, ...]:
    if declaration.cls is OwnershipClass.DERIVED and declaration.rebuild is None:
        raise ArgumentError(
            f"{declaration.name!r} is derived and has no rebuild; pass rebuild= (and sources=)"
        )
    if declaration.tag is not None:
        one_of("tag", declaration.tag, TAGS)
    return tuple(_source_name(context, declaration.name, source) for source in declaration.sources)


def _source_name(context: Context, name: str, source: str | torch.Tensor) -> str:
    if isinstance(source, str):
        entry = context.ledger.get(source)
    else:
        entry = context.ledger.of_storage(source.untyped_storage())
    if entry is None:
        what = repr(source) if isinstance(source, str) else f"a {tuple(source.shape)} tensor"
        raise OwnershipError(f"source {what} of {name!r} has no owner; declare sources first")
    return entry.name


def _tag_of(declaration: Declaration) -> str:
    tag = declaration.tag or POLICIES[declaration.cls].tag
    assert tag is not None, "only resident classes have no tag"
    return tag


def _make_room(context: Context, tensor: torch.Tensor, tag: str) -> None:
    """Let go of a tensor owned under another tag, since memory is released tag by tag."""
    entry = context.ledger.of_storage(tensor.untyped_storage())
    if entry is not None and entry.tag != tag:
        context.ledger.remove([entry])
        _to_ordinary_memory(tensor)


def _to_ordinary_memory(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    ordinary = torch.UntypedStorage(storage.nbytes(), device=storage.device)
    ordinary.copy_(storage)
    swap(storage, ordinary)


def _instruct(entry: Entry, declaration: Declaration, sources: tuple[str, ...]) -> None:
    entry.cls = declaration.cls
    entry.sources = sources
    entry.rebuild = declaration.rebuild
    entry.reset = declaration.reset
    entry.stale = declaration.rebuild is not None
    entry.in_checkpoint = declaration.cls is OwnershipClass.PARAMETER


def _make_official(context: Context, entries: list[Entry]) -> None:
    rebuild_stale(context)
    take_digests(context, entries)
