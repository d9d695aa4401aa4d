"""Memory that kernels write before they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Allocate = Callable[[Sequence[int], torch.dtype, str], torch.Tensor]
"""Makes a tensor of a shape and dtype under a name. Its content survives from step to step but not
a sleep, and it never moves."""
