"""Static sinks of a model in an engine: how many blocks they take, and who writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torpor.model.attention.reserved_sinks import ReservedSinkAttention, num_reserved_blocks

if TYPE_CHECKING:
    from torpor.cache.manager import KVCacheManager
    from torpor.engine.args import EngineArgs
    from torpor.engine.steps.kv_cache import KVCacheMemory
    from torpor.model.attention.interface import AttentionBackend
    from torpor.model.layers.sinks import StaticSinkAttention
    from torpor.model.machine.scratch import Allocate

OWNER = "static sinks"
"""Of the reserved blocks."""


class Sinks:
    """The sinks of every layer, in one placement.

    Args:
        layers: each layer's sinks; empty for a model without.
        args: says the placement.

    Raises:
        ConfigError: reserved sinks do not fill whole blocks.
    """

    def __init__(self, layers: Sequence[StaticSinkAttention], args: EngineArgs) -> None:
        self._layers = layers if args.sink_placement == "reserved" else ()
        self.num_reserved_blocks = 0
        if self._layers:
            sink_len = self._layers[0].sink_len
            self.num_reserved_blocks = num_reserved_blocks(sink_len, args.block_size)
        self._cache: KVCacheManager | None = None

    @property
    def reserved(self) -> Sequence[StaticSinkAttention]:
        """Those in blocks of the cache, layer after layer."""
        return self._layers

    @property
    def sources(self) -> tuple[torch.Tensor, ...]:
        """What the reserved blocks are written from."""
        return tuple(
            tensor for layer in self._layers for tensor in (layer.sink_key, layer.sink_value)
        )

    def reserve(
        self,
        cache: KVCacheManager,
        memory: KVCacheMemory,
        attention: AttentionBackend,
        make_attention: Callable[[str], AttentionBackend],
        allocate: Allocate,
        *,
        max_num_seqs: int,
        max_blocks: int,
    ) -> AttentionBackend:
        """Take the blocks, if any; attention that sees them."""
        if not self._layers:
            return attention
        block_ids = cache.reserve(
            self.num_reserved_blocks, OWNER, lambda _: around.write(self._layers)
        )
        around = ReservedSinkAttention(
            memory.kv,
            memory.layout,
            block_ids,
            make_backend=lambda name: make_attention(name) if name else attention,
            allocate=allocate,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
        )
        self._cache = cache
        return around

    def refill(self) -> None:
        """Write the reserved blocks; the sleeper calls it when memory and weights are valid."""
        if self._cache is not None:
            self._cache.pool.refill_reserved()
