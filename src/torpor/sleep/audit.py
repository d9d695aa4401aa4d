"""The audit: tensors alive that no owner declared.

It looks where Python can look: the attributes of the modules and of the helper objects they hold,
and the garbage collector. What it cannot see it says; it is never called complete.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torpor.errors import OwnershipError
from torpor.sleep.residents import DECLARED, UNDECLARED
from torpor.sleep.storage import living_tensors, nbytes_of, plain_tensors, storage_key, storage_of

if TYPE_CHECKING:
    from torpor.sleep.ledger import Ledger

BLIND_SPOTS = (
    "memory held by C++ alone, such as library workspaces and autograd's saved tensors",
    "arrays that share a tensor's memory (numpy, DLPack) made after adoption",
    "tensors in closures and generator frames have no module name",
)
REMEDY = (
    "register it as a buffer, or declare it: sleeper.own(tensor, name=..., cls=...); undeclared it "
    "stays resident, which is safe and costs its bytes"
)
GRADIENT = "a gradient; pass optimizer= to let it sleep"
UNKNOWN_HOLDER = "a local variable, or something that only C++ knows"
_MAX_DEPTH = 6
_GRAD = ".grad"
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
)

CreatorOf = Callable[[torch.Tensor], "str | None"]


@dataclass(frozen=True, slots=True)
class Unowned:
    """A live tensor without an owner."""

    name: str
    """Path from a module, or what holds it."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    creator: str | None
    """``file:line`` that made it, for tensors made inside ``torpor.building()``."""
    reachable: bool
    """Whether a module or one of its helpers holds it."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plain = asdict(self)
        plain["resident_bytes"] = plain.pop("nbytes")
        return plain


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audit found."""

    unowned: tuple[Unowned, ...]
    """Held by the modules or their helpers."""
    elsewhere: tuple[Unowned, ...]
    """Alive in this process and held by somebody else, the caller's own tensors included."""
    remedy: str = REMEDY
    blind_spots: tuple[str, ...] = BLIND_SPOTS

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "unowned": [item.to_dict() for item in self.unowned],
            "elsewhere": [item.to_dict() for item in self.elsewhere],
            "remedy": self.remedy,
            "blind_spots": list(self.blind_spots),
        }


def audit(
    ledger: Ledger, roots: Mapping[str, nn.Module], device: torch.device, creator_of: CreatorOf
) -> AuditReport:
    """List live tensors of a device that the ledger does not own, largest first."""
    seen: set[int] = set()
    unowned = [
        item
        for name, tensor in reachable_tensors(roots)
        if (item := _unowned(ledger, seen, name, tensor, device, creator_of, reachable=True))
    ]
    others = {
        id(tensor): item
        for tensor in list(living_tensors())
        if (item := _unowned(ledger, seen, "", tensor, device, creator_of, reachable=False))
    }
    holders = _holders(others)
    elsewhere = [
        replace(item, name=holders.get(key, UNKNOWN_HOLDER)) for key, item in others.items()
    ]
    return AuditReport(tuple(_largest_first(unowned)), tuple(_largest_first(elsewhere)))


def undeclared(
    ledger: Ledger,
    roots: Mapping[str, nn.Module],
    device: torch.device,
    creator_of: CreatorOf,
    *,
    strict: bool,
) -> None:
    """Record reachable tensors without an owner as resident.

    Raises:
        OwnershipError: ``strict`` and there is one.
    """
    residents = ledger.residents
    residents.forget_reason(UNDECLARED)
    seen: set[int] = set()
    strangers: list[Unowned] = []
    for name, tensor in reachable_tensors(roots):
        item = _unowned(ledger, seen, name, tensor, device, creator_of, reachable=True)
        if item is None or residents.reason(tensor) is not None:
            continue
        if name.endswith(_GRAD):
            residents.note(name, tensor, GRADIENT)
            continue
        strangers.append(item)
        residents.note(name, tensor, UNDECLARED)
    if strict and strangers:
        shown = "; ".join(_described(item) for item in strangers[:8])
        raise OwnershipError(f"{len(strangers)} tensors have no owner: {shown}. To mend: {REMEDY}")


def _described(item: Unowned) -> str:
    made = f", made at {item.creator}" if item.creator else ""
    return f"{item.name} ({item.nbytes} bytes{made})"


def reachable_tensors(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the modules' attributes lead to, registered or not, with its path."""
    visited: set[int] = set()
    for name, root in roots.items():
        yield from _tensors_in(name, root, visited, 0)


def _tensors_in(
    path: str, value: Any, visited: set[int], depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, _OPAQUE):
        return
    if issubclass(type(value), torch.Tensor):
        yield from plain_tensors(path, value)
        if value.is_leaf and value.grad is not None:
            yield path + _GRAD, value.grad
        if id(value) not in visited and depth <= _MAX_DEPTH:
            visited.add(id(value))
            for name, item in list(vars(value).items()):
                yield from _tensors_in(f"{path}.{name}", item, visited, depth + 1)
        return
    # A registered tree of modules may be deep; only helpers are cut off.
    if depth > _MAX_DEPTH or id(value) in visited:
        return
    visited.add(id(value))
    for name, item in _children(value):
        child = name if not path else f"{path}.{name}" if name else path
        deeper = 0 if isinstance(item, nn.Module) else depth + 1
        yield from _tensors_in(child, item, visited, deeper)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for name, item in vars(value).items():
            # The three registries hold children under their own names.
            yield ("" if name in ("_parameters", "_buffers", "_modules") else name), item
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(index), item) for index, item in enumerate(list(value)))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    else:
        yield from list(getattr(value, "__dict__", {}).items())
        for name in getattr(type(value), "__slots__", ()):
            if isinstance(name, str) and not name.startswith("__"):
                yield name, getattr(value, name, None)


def _unowned(
    ledger: Ledger,
    seen: set[int],
    name: str,
    tensor: torch.Tensor,
    device: torch.device,
    creator_of: CreatorOf,
    *,
    reachable: bool,
) -> Unowned | None:
    if tensor.device.type != device.type or ledger.residents.reason(tensor) in DECLARED:
        return None
    storage = storage_of(tensor)
    if storage is not None:
        key, nbytes = storage_key(storage), storage.nbytes()
        if ledger.of_storage(storage) is not None:
            return None
    elif reachable:
        key, nbytes = id(tensor), nbytes_of(tensor)
    else:
        return None  # A wrapper, perhaps: its inner tensors are found by themselves.
    if nbytes == 0 or key in seen:
        return None
    seen.add(key)
    return Unowned(
        name=name,
        nbytes=nbytes,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        creator=creator_of(tensor),
        reachable=reachable,
    )


def _holders(wanted: Collection[int]) -> dict[int, str]:
    """What holds tensors that no module leads to, by their ``id``, in one look at the heap."""
    tensors = [tensor for tensor in living_tensors() if id(tensor) in wanted]
    names: dict[int, str] = {}
    for holder in gc.get_referrers(*tensors) if tensors else ():
        # The arguments of this very call are a tuple of all of them.
        if holder is tensors or (isinstance(holder, tuple) and len(holder) == len(tensors)):
            continue
        for key, value in _contents(holder):
            if id(value) in wanted:
                names.setdefault(id(value), key)
    return names


def _contents(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, dict):
        module = holder.get("__name__") if "__spec__" in holder else None
        for key, value in list(holder.items()):
            yield (f"{module}.{key}" if module else f"item {key!r} of a dict"), value
    elif isinstance(holder, (list, tuple)):
        yield from ((f"an item of a {type(holder).__name__}", value) for value in list(holder))
    elif isinstance(holder, types.CellType):
        yield "a closure", holder.cell_contents
    else:
        cls = type(holder).__qualname__
        attributes = list(getattr(holder, "__dict__", {}).items())
        yield from ((f"{cls}.{key}", value) for key, value in attributes)


def _largest_first(items: list[Unowned]) -> list[Unowned]:
    return sorted(items, key=lambda item: (-item.nbytes, item.name))
