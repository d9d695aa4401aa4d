"""Finding the tensors of modules and optimizers, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torpor.errors import ArgumentError, OwnershipError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.storage import plain_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MAX_NESTING = 50

Modules = nn.Module | Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor, its full name, and what the place it was found in says of its class."""

    name: str
    tensor: torch.Tensor
    cls: OwnershipClass
    tag: str
    persistent: bool = True
    """Whether ``state_dict`` holds it."""
    fleeting: bool = False
    """Whether it is made anew all the time, as gradients are: such tensors share an arena that goes
    with them."""


def named_modules(modules: Modules) -> dict[str, nn.Module]:
    """The roots by name prefix; a single module has the empty prefix.

    Raises:
        ArgumentError: not a module, or a mapping with something else in it.
    """
    if isinstance(modules, nn.Module):
        return {"": modules}
    given: object = modules  # Callers without a type checker pass anything.
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(
            f"modules must be one nn.Module or a non-empty mapping of names to modules, not "
            f"{type(given).__name__}"
        )
    for name, module in given.items():
        if not isinstance(name, str) or not isinstance(module, nn.Module):
            raise ArgumentError(f"modules[{name!r}] is a {type(module).__name__}, not an nn.Module")
    return dict(given)


def named_optimizers(
    optimizer: Optimizer | Mapping[str, Optimizer] | None,
) -> dict[str, Optimizer]:
    """The optimizers by name.

    Raises:
        ArgumentError: not an optimizer.
    """
    if optimizer is None:
        return {}
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}
    for name, item in named.items():
        if not isinstance(item, torch.optim.Optimizer):
            raise ArgumentError(f"optimizer {name!r} is a {type(item).__name__}, not an Optimizer")
    return named


def module_tensors(roots: Mapping[str, nn.Module]) -> Iterator[Found]:
    """Every parameter and buffer, persistent or not, under every one of its names."""
    for here, module in _modules(roots):
        transient = module._non_persistent_buffers_set
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield from _found(here + name, parameter, OwnershipClass.PARAMETER, True)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield from _found(here + name, buffer, OwnershipClass.BUFFER, name not in transient)


def _modules(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every one of its names, with the prefix of what it holds.

    As ``named_modules(remove_duplicate=False)`` gives them, in a fraction of the time: every sleep
    looks at all of them.
    """
    due = [(f"{name}." if name else "", root) for name, root in roots.items()][::-1]
    while due:
        here, module = due.pop()
        yield here, module
        children = [
            (f"{here}{name}.", child)
            for name, child in module._modules.items()
            if child is not None
        ]
        due += reversed(children)


def optimizer_tensors(
    optimizers: Mapping[str, Optimizer], roots: Mapping[str, nn.Module]
) -> Iterator[Found]:
    """Optimizer state and gradients; named after their parameter where it has a name."""
    names = {
        id(found.tensor): found.name for found in module_tensors(roots) if found.tensor.is_leaf
    }
    for prefix, optimizer in optimizers.items():
        for index, parameter in enumerate(_optimized(optimizer)):
            name = names.get(id(parameter), f"parameter {index}")
            state = optimizer.state.get(parameter, {})
            for path, tensor in nested_tensors(f"{prefix}.state[{name}]", state, strict=False):
                yield Found(path, tensor, OwnershipClass.BUFFER, "optimizer", persistent=False)
            if parameter.grad is not None:
                for path, tensor in plain_tensors(f"{prefix}.grad[{name}]", parameter.grad):
                    yield Found(path, tensor, OwnershipClass.BUFFER, "optimizer", False, True)


def nested_tensors(
    name: str, value: Any, *, strict: bool, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in any nesting of mappings, lists, tuples and None.

    Raises:
        OwnershipError: ``strict`` and a leaf is something else, or the nesting has no end.
    """
    if depth > _MAX_NESTING:
        raise OwnershipError(f"{name[:80]}... is nested more than {_MAX_NESTING} levels deep")
    if isinstance(value, torch.Tensor):
        yield from plain_tensors(name, value)
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from nested_tensors(f"{name}.{key}", item, strict=strict, depth=depth + 1)
    elif strict and value is not None:
        raise OwnershipError(
            f"{name} is a {type(value).__name__}, neither a tensor nor a container of tensors; "
            "declare the tensors in it one by one"
        )


def _found(
    name: str, tensor: torch.Tensor, cls: OwnershipClass, persistent: bool
) -> Iterator[Found]:
    for inner_name, inner in plain_tensors(name, tensor):
        yield Found(inner_name, inner, cls, "weights", persistent)


def _optimized(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
