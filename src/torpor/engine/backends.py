"""What an engine computes with: compiled kernels where they can be had, torch everywhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from torpor.errors import ArgumentError
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.layers.linear_kernels import linear_kernel
from torpor.model.layers.ops import LayerOps, TorchOps, gated, gated_by_rows
from torpor.model.native.attention import NativeAttention
from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.library import SUFFIXES, Kernels, load_library
from torpor.model.native.ops import NativeOps

if TYPE_CHECKING:
    from torpor.engine.args import EngineArgs
    from torpor.engine.steps.kv_cache import KVCacheMemory
    from torpor.model.attention.interface import AttentionBackend
    from torpor.model.machine.scratch import Allocate

_logger = logging.getLogger(__name__)


def choose_backends(
    args: EngineArgs, memory: KVCacheMemory, allocate: Allocate
) -> tuple[LayerOps, AttentionBackend]:
    """The operations of the layers, and attention over the paged cache.

    Raises:
        ArgumentError: compiled kernels are asked for and cannot be had.
    """
    kernels = _kernels(args.cpu_kernels, memory.kv)
    invariant = args.batch_invariant
    if kernels is not None:
        return NativeOps(kernels, batch_invariant=invariant), NativeAttention(
            memory.kv,
            memory.layout,
            library=kernels.library,
            allocate=allocate,
            batch_invariant=invariant,
        )
    linear = linear_kernel(memory.kv.dtype, batch_invariant=invariant, allocate=allocate)
    return TorchOps(linear, gated_by_rows if invariant else gated), TorchAttention(
        memory.kv, memory.layout, allocate=allocate, batch_invariant=invariant
    )


def _kernels(wanted: str, kv: torch.Tensor) -> Kernels | None:
    if wanted == "torch" or (wanted == "auto" and not has_kernels(kv)):
        return None
    try:
        if not has_kernels(kv):
            raise KernelsUnavailableError(f"they have no {kv.dtype} on {kv.device}")
        return Kernels(load_library(), kv.dtype)
    except KernelsUnavailableError as error:
        if wanted == "native":
            raise ArgumentError(
                f"cpu_kernels is 'native', and there are none: {error}; or use cpu_kernels='auto'"
            ) from error
        _logger.warning("computing with torch's kernels, which are slower: %s", error)
        return None


def has_kernels(kv: torch.Tensor) -> bool:
    """Whether kernels can be compiled for this dtype and device at all."""
    return kv.device.type == "cpu" and kv.dtype in SUFFIXES
