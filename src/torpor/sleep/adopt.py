"""Adoption: moving the bytes of existing tensors into arenas, storage by storage.

Nothing Python changes: the storage's data pointer is swapped, so every parameter, tie, view and
hidden alias looks at the arena afterwards. What cannot move stays resident, and the ledger says
why. One storage in the arena for each adopted one (never slices of one giant tensor: saving a
single norm would write the arena). Peak memory is the model plus its largest tensor: arena pages
appear as they are written, and each old storage goes as soon as its bytes have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from torpor.errors import OwnershipError
from torpor.sleep.arena import SLOT_ALIGNMENT, Arena, aligned
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.ledger import Entry, Ledger, entry_for, weak_way
from torpor.sleep.procfs import MemoryMap
from torpor.sleep.residents import DECLARED
from torpor.sleep.storage import (
    Aliases,
    aliases_by_storage,
    nbytes_of,
    refusal,
    relocate,
    storage_key,
    swap_available,
)

if TYPE_CHECKING:
    from torpor.sleep.device import Device
    from torpor.sleep.walk import Found

Way = Callable[[torch.Tensor], Callable[[], "torch.Tensor | None"]]

_SHARED = "its memory is shared with other processes, or with a file that writes go to"
_HANDED_OUT = "its memory was handed out before (to numpy or another Sleeper), or is foreign"
_STEP_BYTES = 16 * 1024 * 1024

# When one storage has names of several classes, the one that demands most of a reload wins.
_RANK = {OwnershipClass.PARAMETER: 0, OwnershipClass.BUFFER: 1}


@dataclass(slots=True)
class _Group:
    """All names that look at one storage."""

    storage: torch.UntypedStorage
    found: list[Found] = field(default_factory=list)

    @property
    def leader(self) -> Found:
        return min(self.found, key=lambda found: _RANK.get(found.cls, 2))


def adopt(
    ledger: Ledger, device: Device, found: Iterable[Found], way: Way = weak_way
) -> list[Entry]:
    """Move every storage that can move into new arenas, each of one tag, in the order found.

    Returns:
        The new entries. Storages that are owned already only gain their new names.

    Raises:
        OwnershipError: inference mode is on, or another storage has a name already.
        OutOfMemoryError: there is no room for the largest tensor, and nothing has changed; or
            somebody took the memory meanwhile, and what has moved is owned and valid.
    """
    items = list(found)
    check_names(ledger, items)
    groups = _movable(ledger, device, items, way)
    if groups:
        refuse_inference_mode()
    entries: list[Entry] = []
    by_arena: dict[tuple[str, bool], list[_Group]] = {}
    for group in groups:
        by_arena.setdefault((group.leader.tag, group.leader.fleeting), []).append(group)
    for (tag, _fleeting), members in by_arena.items():
        entries += _move_all(ledger, device, tag, members, way)
    return entries


def refuse_inference_mode() -> None:
    """Raise when inference mode is on: tensors made or moved under it lose their version counter.

    Raises:
        OwnershipError: inference mode is on.
    """
    if torch.is_inference_mode_enabled():
        raise OwnershipError(
            "inference mode is on here; adopt and update outside torch.inference_mode()"
        )


def check_names(ledger: Ledger, found: Iterable[Found]) -> None:
    """Raise unless every name is free, or belongs to the same storage already.

    Raises:
        OwnershipError: two storages with one name.
    """
    given: dict[str, int] = {}
    for item in found:
        if refusal(item.tensor, item.tensor.device) is not None:
            continue
        storage = item.tensor.untyped_storage()
        key = storage_key(storage)
        entry = ledger.get(item.name)
        taken = entry is not None and entry is not ledger.of_storage(storage)
        if taken or given.setdefault(item.name, key) != key:
            raise OwnershipError(
                f"{item.name!r} is the name of another tensor; use another name for this one"
            )


def refusals(ledger: Ledger, device: Device, found: Iterable[Found]) -> dict[int, str]:
    """Why bytes cannot be moved, by the ``id`` of the tensor; those that can are not in it."""
    reasons: dict[int, str] = {}
    doubtful: list[torch.Tensor] = []
    for item in found:
        tensor = item.tensor
        reason = refusal(tensor, device.torch_device)
        if reason is not None:
            reasons[id(tensor)] = reason
        elif ledger.of_storage(tensor.untyped_storage()) is None and _is_doubtful(tensor):
            doubtful.append(tensor)
    memory = MemoryMap() if doubtful and device.torch_device.type == "cpu" else None
    for tensor in doubtful:
        storage = tensor.untyped_storage()
        if memory is not None and not _is_private_file(memory, storage.data_ptr()):
            reasons[id(tensor)] = _SHARED if storage.is_shared() else _HANDED_OUT
    return reasons


def _is_doubtful(tensor: torch.Tensor) -> bool:
    """Whether somebody else may know the address: torch says so of every file mapping too."""
    storage = tensor.untyped_storage()
    return storage.is_shared() or not storage.resizable()


def _is_private_file(memory: MemoryMap, address: int) -> bool:
    """Whether the bytes are a file's, and writes to them stay in this process."""
    mapping = memory.find(address)
    return mapping is not None and mapping.is_file and mapping.permissions.endswith("p")


def _movable(ledger: Ledger, device: Device, found: list[Found], way: Way) -> list[_Group]:
    """Group what can move by storage; note the rest as resident, and new names of owned bytes."""
    reasons = refusals(ledger, device, found)
    groups: dict[int, _Group] = {}
    for item in found:
        reason = reasons.get(id(item.tensor))
        if reason is not None:
            ledger.residents.note(item.name, item.tensor, reason)
            continue
        storage = item.tensor.untyped_storage()
        owned = ledger.of_storage(storage)
        if owned is not None:
            if item.name not in owned.aliases:
                ledger.add_alias(owned, item.name, way(item.tensor))
        elif storage.nbytes() > 0 and ledger.residents.reason(item.tensor) not in DECLARED:
            group = groups.setdefault(storage_key(storage), _Group(storage))
            group.found.append(item)
    return list(groups.values())


def _move_all(
    ledger: Ledger, device: Device, tag: str, groups: list[_Group], way: Way
) -> list[Entry]:
    sizes = [aligned(group.storage.nbytes(), SLOT_ALIGNMENT) for group in groups]
    arena = Arena(device, sum(sizes), tag)
    # Mapped as it fills, so that no more room is asked for than the move needs at its peak.
    step = max(*sizes, _STEP_BYTES)
    aliases = aliases_by_storage()
    entries: list[Entry] = []
    for group, size in zip(groups, sizes, strict=True):
        needed = arena.used_bytes + SLOT_ALIGNMENT + size
        if needed > arena.mapped_bytes:
            # What the last steps left in the allocator's hands goes back first.
            device.trim()
            target = min(arena.nbytes, max(needed, arena.mapped_bytes + step))
            arena.map(target, populate=True)
        entry = _move(ledger, arena, group, way, aliases)
        entries += [] if entry is None else [entry]
    device.trim()
    return entries


def _move(ledger: Ledger, arena: Arena, group: _Group, way: Way, aliases: Aliases) -> Entry | None:
    storage, nbytes, leader = group.storage, group.storage.nbytes(), group.leader
    offset = arena.allocate(nbytes)
    new = arena.storage(offset, nbytes)
    holder = storage if swap_available() else new
    entry = entry_for(
        leader.name, leader.cls, leader.tag, arena, offset, holder, leader.tensor.dtype
    )
    entry.aliases = {item.name: way(item.tensor) for item in group.found}
    # Known before it moves: an interrupt must not leave bytes in an arena that nobody keeps.
    ledger.add(entry)
    arena.device.move(entry.address, storage.data_ptr(), nbytes)
    if not relocate(storage, new, aliases):
        ledger.remove([entry])
        ledger.residents.note(leader.name, leader.tensor, "an alias of it is known to C++ only")
        return None
    ledger.residents.forget(leader.tensor)
    # Without the swap this lets go of the old memory now, not when the last group has moved.
    group.storage = holder
    return entry


def materialise(
    ledger: Ledger, device: Device, roots: Mapping[str, nn.Module], found: Iterable[Found]
) -> list[Entry]:
    """Give meta parameters real memory in the arena, in place in their modules. Content is invalid.

    Ties are kept: one meta parameter under several names becomes one real parameter under them.

    Raises:
        OwnershipError: a buffer is on meta; its values cannot come from a checkpoint.
    """
    refuse_inference_mode()
    meta = [item for item in found if item.tensor.is_meta]
    buffers = [item.name for item in meta if item.cls is not OwnershipClass.PARAMETER]
    if buffers:
        raise OwnershipError(
            f"buffers on the meta device: {', '.join(buffers)}; compute buffers for real when the "
            "model is built (only parameters come from a checkpoint)"
        )
    by_object: dict[int, list[Found]] = {}
    for item in meta:
        by_object.setdefault(id(item.tensor), []).append(item)
    if not by_object:
        return []
    sizes = [_slot_bytes(group[0].tensor) for group in by_object.values()]
    arena = Arena(device, sum(sizes), "weights")
    arena.map(populate=True)
    return [_fill_in(ledger, arena, roots, group) for group in by_object.values()]


def _fill_in(
    ledger: Ledger, arena: Arena, roots: Mapping[str, nn.Module], group: list[Found]
) -> Entry:
    old = group[0].tensor
    offset = arena.allocate(_slot_bytes(old))
    data = tensor_in(arena, offset, tuple(old.shape), old.dtype)
    # As nn.Parameter makes itself, and for subclasses of it too.
    new: torch.Tensor = torch.Tensor._make_subclass(type(old), data, old.requires_grad)
    new.__dict__.update(old.__dict__)
    for item in group:
        module, attribute = _place(roots, item.name)
        module._parameters[attribute] = new  # type: ignore[assignment]
    name, storage = group[0].name, new.untyped_storage()
    entry = entry_for(name, OwnershipClass.PARAMETER, "weights", arena, offset, storage, new.dtype)
    entry.aliases = {item.name: weak_way(new) for item in group}
    entry.valid = False
    entry.in_checkpoint = True
    ledger.add(entry)
    return entry


def put_back_on_meta(ledger: Ledger, roots: Mapping[str, nn.Module]) -> None:
    """Undo ``materialise``: parameters that never got content are on meta again, ties kept."""
    for entry in ledger:
        real = entry.tensor()
        if entry.valid or entry.cls is not OwnershipClass.PARAMETER or real is None:
            continue
        data = torch.empty_like(real, device="meta", requires_grad=False)
        meta = torch.Tensor._make_subclass(type(real), data, real.requires_grad)
        meta.__dict__.update(real.__dict__)
        for name in entry.aliases:
            module, attribute = _place(roots, name)
            module._parameters[attribute] = meta  # type: ignore[assignment]


def _slot_bytes(tensor: torch.Tensor) -> int:
    # An empty tensor takes a slot too: no two entries may share a byte.
    return aligned(max(nbytes_of(tensor), 1), SLOT_ALIGNMENT)


def tensor_in(
    arena: Arena, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A contiguous tensor over an arena slot."""
    element = torch.empty(0, dtype=dtype, device=arena.device.torch_device)
    numel = 1
    for size in shape:
        numel *= size
    storage = arena.storage(offset, max(numel * element.element_size(), 1))
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return element.set_(storage, 0, shape, tuple(strides))


def _place(roots: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    for prefix, root in roots.items():
        start = f"{prefix}." if prefix else ""
        if name.startswith(start):
            path, _, attribute = name[len(start) :].rpartition(".")
            try:
                module = root.get_submodule(path)
            except AttributeError:
                continue
            if attribute in module._parameters:
                return module, attribute
    raise OwnershipError(f"no module holds a parameter {name!r}")
