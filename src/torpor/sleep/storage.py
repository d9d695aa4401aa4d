"""torch storages as memory: which one a tensor uses, whether it can move, and moving it.

Adoption moves where bytes live and never touches a Python object: the storage's data pointer is
swapped, so ties, views and hidden aliases all follow, and no version counter moves. Where torch
lacks the swap (it is a private method), every alias found is rebound instead.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

Aliases = Mapping[int, Sequence[torch.Tensor]]
"""Tensor objects by the key of the storage that they look at."""

_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of the underlying StorageImpl; two Python handles of one storage share it."""
    return int(storage._cdata)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The one storage of a tensor, or None: sparse, opaque, a wrapper, or not initialised yet."""
    if tensor.layout != torch.strided or is_lazy(tensor):
        return None
    try:
        storage = tensor.untyped_storage()
        # A wrapper class has a storage with a size and nothing behind it.
        return storage if storage.nbytes() == 0 or storage.data_ptr() != 0 else None
    except (NotImplementedError, RuntimeError):
        return None


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes that the tensor's elements take, on whatever device; a sparse one's indices too.

    A wrapper class takes none itself: the tensors inside it do.
    """
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    if is_lazy(tensor) or (is_plain and storage_of(tensor) is None):
        return 0
    if tensor.layout in _SPARSE_PARTS:
        parts = (getattr(tensor, part)() for part in _SPARSE_PARTS[tensor.layout])
        return sum(nbytes_of(part) for part in parts)
    return tensor.numel() * tensor.element_size()


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain strided tensors behind a tensor: itself, or the inner ones of a wrapper class."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    inner_names, _context = flatten()
    for inner_name in inner_names:
        yield from plain_tensors(f"{name}.{inner_name}", getattr(tensor, inner_name))


def refusal(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Why a tensor's bytes cannot be moved, as far as the tensor itself tells; else None."""
    if is_lazy(tensor):
        return "not initialised yet; run a forward, then adopt()"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout} has no single storage"
    if tensor.device.type != device.type:
        return f"lives on {tensor.device}, not on {device}"
    if storage_of(tensor) is None:
        return f"{type(tensor).__name__} has no storage that can be moved"
    return None


def swap_available() -> bool:
    """Whether this torch can swap a storage's data pointer."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def swap(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of equal size; every alias follows its storage."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def aliases_by_storage() -> Aliases:
    """Every tensor object that the garbage collector knows, by the key of its storage.

    Empty where torch has the swap: nobody has to know the aliases then.
    """
    aliases: dict[int, list[torch.Tensor]] = {}
    for tensor in () if swap_available() else living_tensors():
        storage = storage_of(tensor)
        if storage is not None:
            aliases.setdefault(storage_key(storage), []).append(tensor)
    return aliases


def relocate(storage: torch.UntypedStorage, new: torch.UntypedStorage, aliases: Aliases) -> bool:
    """Make every alias of a storage look at new memory that holds the same bytes.

    Args:
        aliases: what ``aliases_by_storage`` found; used only where torch has no swap.

    Returns:
        False when an alias cannot be reached; all of them look at the old memory then.
    """
    if swap_available():
        swap(storage, new)
        return True
    return rebind(storage, new, aliases.get(storage_key(storage), ()))


def rebind(
    old: torch.UntypedStorage, new: torch.UntypedStorage, aliases: Sequence[torch.Tensor]
) -> bool:
    """Point the aliases of ``old`` at ``new``; the way for a torch without the swap.

    When something else still holds ``old`` afterwards (a view that only C++ knows), all of them are
    pointed back.

    Returns:
        Whether ``old`` has no user left but the caller.
    """
    for tensor in aliases:
        _point(tensor, new)
    # The caller's handle and the argument of this call are one StorageImpl reference in C++.
    if torch._C._storage_Use_Count(old._cdata) <= 1:
        return True
    for tensor in aliases:
        _point(tensor, old)
    return False


def living_tensors() -> Iterator[torch.Tensor]:
    """Every tensor object the garbage collector tracks now. It never runs the collector."""
    for candidate in gc.get_objects():
        # type(), not isinstance: lazy proxies run code when asked for their class.
        if issubclass(type(candidate), torch.Tensor):
            yield candidate


def weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference to a storage that survives its Python handles."""
    return StorageWeakRef(storage)


def alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference, or None when no tensor uses it any more."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def _point(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    # Inference tensors have no version counter, and torch checks that both sides agree on that.
    with torch.inference_mode(tensor.is_inference()):
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    # Assigning .data exchanges the storage and leaves object, grad and version counter alone.
    tensor.data = view
