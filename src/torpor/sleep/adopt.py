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
from torpor.sleep.ledger import Entry, Ledger, Resident, entry_for, weak_way
from torpor.sleep.procfs import MemoryMap
from torpor.sleep.storage import nbytes_of, rebind, refusal, storage_key, swap, swap_available

if TYPE_CHECKING:
    from torpor.sleep.device import Device
    from torpor.sleep.walk import Found

Way = Callable[[torch.Tensor], Callable[[], "torch.Tensor | None"]]

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
    """Move every storage that can move into one new arena per tag, in the order found.

    Returns:
        The new entries. Storages that are owned already only gain their new names.

    Raises:
        OwnershipError: called under inference mode.
        OutOfMemoryError: no memory for the arena; what has moved stays valid where it is.
    """
    refuse_inference_mode()
    groups = _movable(ledger, device, list(found))
    entries: list[Entry] = []
    for tag in dict.fromkeys(group.leader.tag for group in groups):
        members = [group for group in groups if group.leader.tag == tag]
        sizes = [aligned(group.storage.nbytes(), SLOT_ALIGNMENT) for group in members]
        arena = Arena(device, sum(sizes), tag)
        arena.map()
        entries += [entry for group in members if (entry := _move(ledger, arena, group, way))]
    device.trim()
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


def _movable(ledger: Ledger, device: Device, found: list[Found]) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for item in found:
        reason = refusal(item.tensor, device.torch_device)
        if reason is not None:
            _stay(ledger, item.name, nbytes_of(item.tensor), reason)
            continue
        storage = item.tensor.untyped_storage()
        owned = ledger.of_storage(storage)
        if owned is not None:
            if item.name not in owned.aliases:
                ledger.add_alias(owned, item.name, weak_way(item.tensor))
        elif storage.nbytes() > 0:
            group = groups.setdefault(storage_key(storage), _Group(storage))
            group.found.append(item)
    fixed = [group for group in groups.values() if not group.storage.resizable()]
    memory = MemoryMap() if fixed and device.torch_device.type == "cpu" else None
    exported = {id(group) for group in fixed if memory and _exported(ledger, group, memory)}
    return [group for group in groups.values() if id(group) not in exported]


def _exported(ledger: Ledger, group: _Group, memory: MemoryMap) -> bool:
    storage = group.storage
    # Not resizable and not a file mapping means that somebody outside torch knows the address.
    if memory.is_file(storage.data_ptr()):
        return False
    reason = "its memory was handed out before (to numpy, or built over foreign memory)"
    _stay(ledger, group.leader.name, storage.nbytes(), reason)
    return True


def _stay(ledger: Ledger, name: str, nbytes: int, reason: str) -> None:
    ledger.residents[name] = Resident(name, nbytes, reason)


def _move(ledger: Ledger, arena: Arena, group: _Group, way: Way) -> Entry | None:
    storage, nbytes = group.storage, group.storage.nbytes()
    offset = arena.allocate(nbytes)
    arena.device.move(arena.address + offset, storage.data_ptr(), nbytes)
    new = arena.storage(offset, nbytes)
    if swap_available():
        swap(storage, new)
    elif not rebind(storage, new, [item.tensor for item in group.found]):
        _stay(ledger, group.leader.name, nbytes, "an alias of it is known to C++ only")
        return None
    leader = group.leader
    entry = entry_for(
        leader.name, leader.cls, leader.tag, arena, offset, leader.tensor, way(leader.tensor)
    )
    for item in group.found:
        entry.aliases[item.name] = way(item.tensor)
    ledger.add(entry)
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
    sizes = [aligned(nbytes_of(group[0].tensor), SLOT_ALIGNMENT) for group in by_object.values()]
    arena = Arena(device, sum(sizes), "weights")
    arena.map(populate=True)
    return [_fill_in(ledger, arena, roots, group) for group in by_object.values()]


def _fill_in(
    ledger: Ledger, arena: Arena, roots: Mapping[str, nn.Module], group: list[Found]
) -> Entry:
    old = group[0].tensor
    offset = arena.allocate(nbytes_of(old))
    data = tensor_in(arena, offset, tuple(old.shape), old.dtype)
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for item in group:
        module, attribute = _place(roots, item.name)
        module._parameters[attribute] = new
    name = group[0].name
    entry = entry_for(name, OwnershipClass.PARAMETER, "weights", arena, offset, new, weak_way(new))
    entry.aliases.update({item.name: weak_way(new) for item in group})
    entry.valid = False
    entry.in_checkpoint = True
    ledger.add(entry)
    return entry


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
