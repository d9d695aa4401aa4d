"""Declaring owners by hand: tensors that are neither parameters nor registered buffers.

A declaration says the class, and how the content comes back: from which sources and by which
rebuild, or by which reset. Declaring a tensor that is owned already changes its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import ArgumentError, OwnershipError
from torpor.sleep.adopt import adopt, check_names, refusals, refuse_inference_mode, tensor_in
from torpor.sleep.arena import Arena
from torpor.sleep.choices import one_of
from torpor.sleep.classes import POLICIES, TAGS, AtSleep, OwnershipClass
from torpor.sleep.coverage import fill_up
from torpor.sleep.derive import rebuild_stale, refuse_cycle
from torpor.sleep.ledger import Entry, entry_for, strong_way
from torpor.sleep.residents import DECLARED_RUNTIME, DECLARED_SYNC
from torpor.sleep.status import take_digests
from torpor.sleep.storage import (
    Aliases,
    aliases_by_storage,
    alive,
    nbytes_of,
    relocate,
    storage_key,
    storage_of,
)
from torpor.sleep.walk import Found, nested_tensors

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Rebuild

Names = Mapping[str, Callable[[], "torch.Tensor | None"]]
_DISCARDED = frozenset(
    cls for cls, policy in POLICIES.items() if policy.level2 is AtSleep.DISCARD
) - {OwnershipClass.PARAMETER}
"""Classes whose bytes level 2 throws away on the word of their declaration alone."""
_DECLARED_FIELDS = ("cls", "sources", "rebuild", "reset", "stale", "valid", "in_checkpoint")


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
        The entries; none for what stays resident (``RUNTIME``, or ``SYNC`` without a reset) and for
        empty tensors.

    Raises:
        OwnershipError: a leaf is not a tensor, a source has no owner or is computed from the
            tensor itself, the tensor cannot be moved, or its rebuild fails; nothing is owned that
            was not before.
        ArgumentError: the declaration lacks what its class needs.
    """
    refuse_inference_mode()
    sources = _checked_sources(context, declaration)
    named = list(nested_tensors(declaration.name, tensors, strict=True))
    if not named:
        raise OwnershipError(f"{declaration.name!r} holds no tensor; declare it when it does")
    if stays_resident(declaration):
        for name, tensor in named:
            _let_go(context, tensor)
            context.ledger.residents.note(name, tensor, _resident_reason(declaration))
        return []
    tag = _tag_of(declaration)
    found = [Found(name, tensor, declaration.cls, tag) for name, tensor in named]
    _check_movable(context, found)
    if declaration.cls in _DISCARDED:
        _check_whole(context, found)
    refuse_cycle(context.ledger, declaration.name, _owned(context, found), sources)
    before = [_Instructions(entry) for entry in _owned(context, found) if entry.tag == tag]
    old_names = [(item.tensor, _make_room(context, item.tensor, tag)) for item in found]
    moved = adopt(context.ledger, context.device, found, way=strong_way)
    _give_names_back(context, old_names)
    entries = _owned(context, found)
    try:
        for entry in entries:
            _instruct(entry, declaration, sources)
        _make_official(context, entries)
    except BaseException:
        for instructions in before:
            instructions.put_back()
        _disown(context, moved)
        raise
    return entries


def allocate(
    context: Context, shape: Sequence[int], dtype: torch.dtype, declaration: Declaration
) -> torch.Tensor:
    """A zeroed contiguous tensor made straight in an arena of its own.

    Raises:
        OutOfMemoryError: there is no memory for it.
        OwnershipError: the name is taken, a source has no owner, or the rebuild fails.
        ArgumentError: an impossible shape or dtype, or the declaration lacks what its class needs.
    """
    refuse_inference_mode()
    sources = _checked_sources(context, declaration)
    if stays_resident(declaration):
        raise ArgumentError(f"{declaration.cls.value} memory is not released; use torch.zeros")
    if declaration.name in context.ledger:
        raise OwnershipError(f"{declaration.name!r} is owned already; allocate under another name")
    nbytes = max(_bytes_needed(shape, dtype), 1)
    arena = Arena(context.device, nbytes, declaration.name)
    arena.map()
    offset = arena.allocate(nbytes)
    tensor = tensor_in(arena, offset, tuple(shape), dtype)
    entry = entry_for(
        declaration.name, declaration.cls, _tag_of(declaration), arena, offset,
        tensor.untyped_storage(), dtype,
    )  # fmt: skip
    entry.aliases = {declaration.name: strong_way(tensor)}
    _instruct(entry, declaration, sources)
    context.ledger.add(entry)
    try:
        _make_official(context, [entry])
    except BaseException:
        context.ledger.remove([entry])
        raise
    return tensor


def leave(context: Context) -> None:
    """Move every owned byte back to ordinary memory; the arenas go with their last storage."""
    _disown(context, list(context.ledger))


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
        known, what = source if source in context.ledger else None, repr(source)
    else:
        known, what = _name_of(context, source), f"a {tuple(source.shape)} tensor"
    if known is None:
        raise OwnershipError(f"source {what} of {name!r} has no owner; declare sources first")
    return known


def _name_of(context: Context, tensor: torch.Tensor) -> str | None:
    storage = storage_of(tensor)
    entry = None if storage is None else context.ledger.of_storage(storage)
    if entry is None:
        return None
    # A tie may end: the name under which the owner knows it is the one to follow.
    return next((name for name, way in entry.aliases.items() if way() is tensor), entry.name)


def _tag_of(declaration: Declaration) -> str:
    tag = declaration.tag or POLICIES[declaration.cls].tag
    assert tag is not None, "only resident classes have no tag"
    return tag


def _resident_reason(declaration: Declaration) -> str:
    runtime = declaration.cls is OwnershipClass.RUNTIME
    return DECLARED_RUNTIME if runtime else DECLARED_SYNC


def _bytes_needed(shape: Sequence[int], dtype: torch.dtype) -> int:
    try:
        return nbytes_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(f"cannot allocate shape {shape!r} of {dtype!r}: {error}") from error


def _check_movable(context: Context, found: Sequence[Found]) -> None:
    """Raise before anything has moved when one of the tensors cannot."""
    reasons = refusals(context.ledger, context.device, found)
    for item in found:
        reason = reasons.get(id(item.tensor))
        if reason is not None:
            raise OwnershipError(f"cannot own {item.name!r}: {reason}")
    check_names(context.ledger, found)


def _check_whole(context: Context, found: Sequence[Found]) -> None:
    """Raise when bytes that the declaration does not speak of would be discarded with it."""
    by_storage: dict[int, list[Found]] = {}
    for item in found:
        by_storage.setdefault(storage_key(item.tensor.untyped_storage()), []).append(item)
    for items in by_storage.values():
        name, storage = items[0].name, items[0].tensor.untyped_storage()
        entry = context.ledger.of_storage(storage)
        if not fill_up([item.tensor for item in items], storage.nbytes()):
            raise OwnershipError(
                f"{name!r} is a part of a storage of {storage.nbytes()} bytes, and sleep would "
                "discard the rest with it; declare the whole tensor that it is a view of, or copy "
                "it into memory of its own"
            )
        is_parameter = entry is not None and entry.cls is OwnershipClass.PARAMETER
        if is_parameter and items[0].cls is not OwnershipClass.DERIVED:
            raise OwnershipError(
                f"{name!r} is the memory of a parameter, and its content would be lost; declare "
                "memory of its own"
            )


def _owned(context: Context, found: Sequence[Found]) -> list[Entry]:
    owners = (context.ledger.of_storage(item.tensor.untyped_storage()) for item in found)
    return list(dict.fromkeys(entry for entry in owners if entry is not None))


class _Instructions:
    """How one entry was declared before."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._fields = {name: getattr(entry, name) for name in _DECLARED_FIELDS}

    def put_back(self) -> None:
        for name, value in self._fields.items():
            setattr(self._entry, name, value)


def _make_room(context: Context, tensor: torch.Tensor, tag: str) -> Names:
    """Let go of a tensor owned under another tag, since memory is released tag by tag."""
    entry = context.ledger.of_storage(tensor.untyped_storage())
    return {} if entry is None or entry.tag == tag else _let_go(context, tensor)


def _let_go(context: Context, tensor: torch.Tensor) -> Names:
    """Take a tensor out of its arena if it is owned; returns the names that it had."""
    storage = storage_of(tensor)
    entry = None if storage is None else context.ledger.of_storage(storage)
    if entry is None:
        return {}
    _disown(context, [entry])
    if context.ledger.of_storage(tensor.untyped_storage()) is entry:
        raise OwnershipError(f"{entry.name!r} cannot move again: an alias is known to C++ only")
    return entry.aliases


def _give_names_back(context: Context, old_names: Sequence[tuple[torch.Tensor, Names]]) -> None:
    for tensor, aliases in old_names:
        entry = context.ledger.of_storage(tensor.untyped_storage())
        for name, way in aliases.items():
            if entry is not None and name not in context.ledger:
                context.ledger.add_alias(entry, name, way)


def _disown(context: Context, entries: Sequence[Entry]) -> None:
    """Move entries to ordinary memory; one that cannot move stays in its arena, and owned."""
    aliases = aliases_by_storage()
    gone = [entry for entry in entries if _to_ordinary_memory(entry, aliases)]
    context.ledger.remove(gone)


def _to_ordinary_memory(entry: Entry, aliases: Aliases) -> bool:
    storage = alive(entry.storage)
    if storage is None or storage.data_ptr() != entry.address:
        return True
    ordinary = torch.UntypedStorage(storage.nbytes(), device=storage.device)
    ordinary.copy_(storage)
    return relocate(storage, ordinary, aliases)


def _instruct(entry: Entry, declaration: Declaration, sources: tuple[str, ...]) -> None:
    entry.cls = declaration.cls
    entry.sources = sources
    entry.rebuild = declaration.rebuild
    entry.reset = declaration.reset
    entry.stale = declaration.rebuild is not None
    entry.in_checkpoint = declaration.cls is OwnershipClass.PARAMETER


def _make_official(context: Context, entries: list[Entry]) -> None:
    take_digests(context, [*entries, *rebuild_stale(context)])
