"""Tensors that a model computes from its weights, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.sleep.classes import OwnershipClass

if TYPE_CHECKING:
    from torpor.sleep.sleeper import Sleeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """One such tensor. Whoever owns the model's memory computes it anew when a source changes."""

    name: str
    """In the module, as its buffers are named."""
    tensor: torch.Tensor
    sources: tuple[str, ...]
    """Names of the parameters and buffers it is computed from."""
    rebuild: Callable[[], torch.Tensor]
    """The content, from the sources as they are; of the same shape and dtype."""


def own_derived(sleeper: Sleeper, entries: Iterable[Derived]) -> None:
    """Declare how each of them comes back."""
    for entry in entries:
        sleeper.own(
            entry.tensor,
            name=entry.name,
            cls=OwnershipClass.DERIVED,
            sources=entry.sources,
            rebuild=entry.rebuild,
        )
