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
    dtype: torch.dtype | None = None,
    weights_epoch: Callable[[], int] = lambda: 0,
) -> tuple[LayerOps, MakeAttention]:
    """The operations of the layers, and what makes attention over the paged cache.

    Args:
        args: which kernels, and whether bits must not depend on the batch.
        memory: the paged cache.
        allocate: gives scratch memory.
        dtype: of the layers; None for that of the cache.
        weights_epoch: of the weights as they are now.

    Raises:
        ArgumentError: compiled kernels are asked for and cannot be had.
    """
    dtype = memory.kv.dtype if dtype is None else dtype
    library = _library(args.cpu_kernels, dtype, memory.kv.device)
    if library is None:
        return _torch(args, memory, allocate, dtype)
    calls = Calls(library)
    ops = NativeOps(
        library,
        dtype,
        calls=calls,
        replay=Replay(calls, allocate, epoch=weights_epoch),
    )

    if memory.kv.dtype not in SUFFIXES:
        # The compiled kernels read a cache where it lies, and know no eight bits.
        return ops, _torch_attention(args, memory, allocate)

    def make(name: str) -> AttentionBackend:
        return NativeAttention(
            memory.kv,
            memory.layout,
            library=library,
            calls=calls,
            allocate=_named(allocate, name),
        )

    return ops, make


def _torch(
    args: EngineArgs, memory: KVCacheMemory, allocate: Allocate, dtype: torch.dtype
) -> tuple[LayerOps, MakeAttention]:
    invariant = args.batch_invariant
    linear = linear_kernel(dtype, batch_invariant=invariant, allocate=allocate)
    ops = TorchOps(linear, gated_by_rows if invariant else gated)
    return ops, _torch_attention(args, memory, allocate)


def _torch_attention(args: EngineArgs, memory: KVCacheMemory, allocate: Allocate) -> MakeAttention:
    def make(name: str) -> AttentionBackend:
        return TorchAttention(
            memory.kv,
            memory.layout,
            allocate=_named(allocate, name),
            batch_invariant=args.batch_invariant,
        )

    return make


def _named(allocate: Allocate, name: str) -> Allocate:
    """Give memory under names that end in `name`, since several backends may want the same."""
    if not name:
        return allocate
    return lambda shape, dtype, own: allocate(shape, dtype, f"{own}_{name}")


def _library(wanted: str, dtype: torch.dtype, device: torch.device) -> Library | None:
    if wanted == "torch" or (wanted == "auto" and not has_kernels(dtype, device)):
        return None
    try:
        if not has_kernels(dtype, device):
            raise KernelsUnavailableError(f"they have no {dtype} on {device}")
        return load_library()
    except KernelsUnavailableError as error:
        if wanted == "native":
            raise ArgumentError(
                f"cpu_kernels is 'native', and there are none: {error}; or use cpu_kernels='auto'"
            ) from error
        _logger.warning("computing with torch's kernels, which are slower: %s", error)
        return None


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels can be compiled for this dtype and device at all."""
    return device.type == "cpu" and dtype in SUFFIXES
