"""The KV cache's memory: how many blocks, and the one tensor that sleep can release.

The books of the blocks are in ``cache/``, which knows no torch; their layout and the kernels that
read them in ``model/``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.cache.spec import KVSpec
from torpor.errors import ArenaError, ArgumentError, OutOfMemoryError
from torpor.model.attention.kv_fp8 import FP8, FP8_NAN_BYTE, as_bytes
from torpor.model.attention.kv_layout import KVLayout
from torpor.sleep.classes import OwnershipClass

if TYPE_CHECKING:
    from torpor.engine.args import EngineArgs
    from torpor.engine.steps.sinks import Sinks
    from torpor.model.attention.interface import AttentionSpec
    from torpor.model.attention.kv_fp8 import KVScales
    from torpor.sleep.sleeper import Sleeper

DEFAULT_KV_CACHE_BYTES = 1 << 30
"""The most that the KV cache takes unless asked otherwise."""

_NULL_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class KVCacheMemory:
    """The blocks' memory."""

    kv: torch.Tensor
    """[num_blocks, elements of a block], owned as ``CACHE`` under the name ``kv_cache``."""
    layout: KVLayout
    specs: tuple[KVSpec, ...]
    """One per layer, as ``cache/`` wants them."""

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return len(self.kv)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks."""
        self._fill(block_ids, 0)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a stale read is loud."""
        self._fill(block_ids, FP8_NAN_BYTE if self.kv.dtype == FP8 else torch.nan)

    def _fill(self, block_ids: Sequence[int], value: float) -> None:
        ids = torch.tensor(block_ids, device=self.kv.device)
        as_bytes(self.kv).index_fill_(0, ids, value)


def allocate_kv_cache(
    sleeper: Sleeper,
    args: EngineArgs,
    attention: Sequence[AttentionSpec],
    *,
    max_model_len: int,
    dtype: torch.dtype,
    sinks: Sinks,
    scales: Mapping[int, KVScales] | None = None,
) -> KVCacheMemory:
    """Get the memory from the sleeper.

    Reserved sinks are a part of it that is computed from weights: the sleeper writes them when the
    memory has come back and the weights are valid, and when those change.

    Raises:
        ArgumentError: the size asked for does not hold one sequence of ``max_model_len``.
        OutOfMemoryError: there is not enough memory.
    """
    layout = KVLayout(attention, args.block_size, dtype, scales)
    sources = sinks.sources
    if sources:
        # They are rounded as any key and value is.
        pairs = layout.scales.values()
        sources += tuple(each for pair in pairs for each in (pair.k_scale, pair.v_scale))
    block_bytes = layout.block_bytes
    num_blocks = resolve_num_blocks(
        args, block_bytes, max_model_len, reserved=sinks.num_reserved_blocks
    )
    shape = (num_blocks, layout.elements_per_block)
    try:
        kv = sleeper.allocate(
            shape,
            dtype,
            name="kv_cache",
            cls=OwnershipClass.CACHE,
            sources=sources,
            rebuild=sinks.refill if sources else None,
        )
    except ArenaError as error:
        raise OutOfMemoryError(
            f"a KV cache of {num_blocks} blocks takes {num_blocks * block_bytes} bytes, which this "
            f"process cannot have ({error}); lower {_sized_by(args)}"
        ) from error
    return KVCacheMemory(kv, layout, _specs(attention, args.block_size, dtype))


def _sized_by(args: EngineArgs) -> str:
    """The arguments that the cache's size comes from."""
    if args.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override or block_size"
    if args.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    return "max_model_len or block_size"


def resolve_num_blocks(
    args: EngineArgs, block_bytes: int, max_model_len: int, *, reserved: int = 0
) -> int:
    """How many blocks the cache has, the null block and `reserved` ones included.

    Raises:
        ArgumentError: fewer than one sequence of ``max_model_len`` needs; the message says how
            many bytes or blocks it takes.
    """
    per_sequence = math.ceil(max_model_len / args.block_size)
    extra = _NULL_BLOCKS + reserved
    least = per_sequence + extra
    if args.num_gpu_blocks_override is not None:
        found, asked = args.num_gpu_blocks_override, "num_gpu_blocks_override"
        value, needed = found, least
    elif args.kv_cache_memory_bytes is not None:
        found, asked = args.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
        value, needed = args.kv_cache_memory_bytes, least * block_bytes
    else:
        wanted = args.max_num_seqs * per_sequence + extra
        return max(least, min(wanted, DEFAULT_KV_CACHE_BYTES // block_bytes))
    if found < least:
        raise ArgumentError(
            f"{asked} is {value}, which does not hold one sequence of max_model_len "
            f"{max_model_len}; give at least {needed}, or lower max_model_len"
        )
    return found


def _specs(
    attention: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype
) -> tuple[KVSpec, ...]:
    return tuple(
        KVSpec(
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            window=spec.window,
        )
        for spec in attention
    )
