"""What an engine computes with: compiled kernels where they can be had, torch everywhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torpor.errors import ArgumentError
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.layers.linear_kernels import linear_kernel
from torpor.model.layers.ops import LayerOps, TorchOps, gated, gated_by_rows
from torpor.model.native.attention import NativeAttention
from torpor.model.native.calls import Calls
from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.library import SUFFIXES, Library, load_library
from torpor.model.native.ops import NativeOps
from torpor.model.native.replay import Replay

if TYPE_CHECKING:
    from torpor.engine.args import EngineArgs
    from torpor.engine.steps.kv_cache import KVCacheMemory
    from torpor.model.attention.interface import AttentionBackend
    from torpor.model.machine.scratch import Allocate

_logger = logging.getLogger(__name__)


MakeAttention = Callable[[str], "AttentionBackend"]
"""Makes attention over the paged cache, given a name for its scratch memory."""


def choose_backends(
    args: EngineArgs,
    memory: KVCacheMemory,
    allocate: Allocate,
    *,
    weights_epoch: Callable[[], int] = lambda: 0,
) -> tuple[LayerOps, MakeAttention]:
    """The operations of the layers, and what makes attention over the paged cache.

    Args:
        args: which kernels, and whether bits must not depend on the batch.
        memory: the paged cache.
        allocate: gives scratch memory.
        weights_epoch: of the weights as they are now.

    Raises:
        ArgumentError: compiled kernels are asked for and cannot be had.
    """
    library = _library(args.cpu_kernels, memory.kv)
    if library is None:
        return _torch(args, memory, allocate)
    calls, invariant = Calls(library), args.batch_invariant
    ops = NativeOps(
        library,
        memory.kv.dtype,
        batch_invariant=invariant,
        calls=calls,
        replay=Replay(calls, allocate, epoch=weights_epoch),
    )

    def make(name: str) -> AttentionBackend:
        return NativeAttention(
            memory.kv,
            memory.layout,
            library=library,
            calls=calls,
            allocate=_named(allocate, name),
            batch_invariant=invariant,
        )

    return ops, make


def _torch(
    args: EngineArgs, memory: KVCacheMemory, allocate: Allocate
) -> tuple[LayerOps, MakeAttention]:
    invariant = args.batch_invariant
    linear = linear_kernel(memory.kv.dtype, batch_invariant=invariant, allocate=allocate)

    def make(name: str) -> AttentionBackend:
        return TorchAttention(
            memory.kv,
            memory.layout,
            allocate=_named(allocate, name),
            batch_invariant=invariant,
        )

    return TorchOps(linear, gated_by_rows if invariant else gated), make


def _named(allocate: Allocate, name: str) -> Allocate:
    """Give memory under names that end in `name`, since several backends may want the same."""
    if not name:
        return allocate
    return lambda shape, dtype, own: allocate(shape, dtype, f"{own}_{name}")


def _library(wanted: str, kv: torch.Tensor) -> Library | None:
    if wanted == "torch" or (wanted == "auto" and not has_kernels(kv)):
        return None
    try:
        if not has_kernels(kv):
            raise KernelsUnavailableError(f"they have no {kv.dtype} on {kv.device}")
        return load_library()
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
