"""Tensors that a model computes from its weights, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


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
