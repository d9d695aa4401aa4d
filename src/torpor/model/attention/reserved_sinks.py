"""Static sinks kept in reserved blocks of the KV cache, which stand before every block table.

A kernel that knows nothing of sinks sees them as the first positions of every row. Windows count
positions of the cache, out of which such sinks would fall: layers with a window attend to their
context alone, and the sinks, read from the same blocks, are merged in.

Shape letters: R rows, B blocks of a table, N reserved blocks, S sinks, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from torpor.errors import ConfigError
from torpor.model.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capabilities,
    StaticSinks,
)
from torpor.model.attention.kv_fp8 import as_bytes, from_cache, to_cache
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.partial import attend_with_sinks
from torpor.model.machine.scratch import Allocate


def num_reserved_blocks(sink_len: int, block_size: int) -> int:
    """Blocks that hold so many sinks.

    Raises:
        ConfigError: they do not fill whole blocks.
    """
    if sink_len % block_size:
        raise ConfigError(
            f"param_sink_number is {sink_len}, which block_size {block_size} does not divide; "
            "reserved sinks fill whole blocks: choose a block_size that divides it, or "
            "sink_placement='merged'"
        )
    return sink_len // block_size


class ReservedSinkAttention:
    """An `AttentionBackend` around another one."""

    holds_sinks = True

    def __init__(
        self,
        kv: torch.Tensor,
        layout: KVLayout,
        block_ids: Sequence[int],
        *,
        make_backend: Callable[[str], AttentionBackend],
        allocate: Allocate,
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        """Attend over sinks in these blocks.

        Args:
            kv: the arena [num_blocks, layout.elements_per_block].
            layout: where layers lie in a block.
            block_ids: the reserved blocks.
            make_backend: makes a backend over the same arena, given a name for its scratch memory.
            allocate: gives scratch memory.
            max_num_seqs: most rows of a step.
            max_blocks: most blocks of a request.
        """
        self._kv, self._layout = kv, layout
        # Numbers, not a tensor: sleep would not know how that comes back.
        self._block_ids = list(block_ids)
        self._sink_len = len(block_ids) * layout.block_size
        # Private: whoever else sees the step's batch counts tokens, not sinks.
        shape = (max_num_seqs, len(block_ids) + max_blocks)
        self._tables_RB = allocate(shape, torch.int64, "sink_block_tables")
        self._behind_sinks = make_backend("")
        windows = any(spec.window is not None for spec in layout.specs.values())
        self._context_alone = make_backend("windows") if windows else None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend within."""
        return self._behind_sinks.capabilities

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        rows, blocks = batch.block_tables_RB.shape
        reserved = len(self._block_ids)
        tables_RB = self._tables_RB.view(-1)[: rows * (reserved + blocks)].view(rows, -1)
        tables_RB[:, :reserved] = torch.tensor(self._block_ids)
        tables_RB[:, reserved:] = batch.block_tables_RB
        lengths = zip(batch.query_lens, batch.context_lens, strict=True)
        # A padding row has no sinks either.
        context_lens = tuple(length + self._sink_len if new else 0 for new, length in lengths)
        self._behind_sinks.begin(
            replace(batch, context_lens=context_lens, block_tables_RB=tables_RB)
        )
        if self._context_alone is not None:
            self._context_alone.begin(batch)

    def attend(
        self, spec: AttentionSpec, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionContext`; sinks are seen too."""
        if spec.window is None:
            return self._behind_sinks.attend(spec, q_THD, k_THD, v_THD)
        return self.attend_with_lse(spec, q_THD, k_THD, v_THD)[0]

    def attend_with_lse(
        self, spec: AttentionSpec, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionContext`; sinks are seen, and counted in the log-sum-exp."""
        if spec.window is None:
            return self._behind_sinks.attend_with_lse(spec, q_THD, k_THD, v_THD)
        assert self._context_alone is not None, "a window that the layout does not know"
        out_THD, lse_TH = self._context_alone.attend_with_lse(spec, q_THD, k_THD, v_THD)
        return attend_with_sinks(q_THD, *self.read(spec.layer), spec.scale, out_THD, lse_TH)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values as the cache holds them: [S, KV heads, size] each."""
        layout = self._layout
        parts = zip((layout.keys, layout.values), self._scales(layer), strict=True)
        keys, values = (
            from_cache(
                part(as_bytes(self._kv), layer)[self._block_ids].flatten(0, 1).view(layout.dtype),
                layout.dtype if scale is None else torch.float32,
                scale,
            )
            for part, scale in parts
        )
        return keys, values

    def _scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        scales = self._layout.scales.get(layer)
        return (None, None) if scales is None else (scales.k_scale, scales.v_scale)

    def write(self, sinks: Sequence[StaticSinks]) -> None:
        """Write every layer's sinks into the reserved blocks."""
        size = self._layout.block_size
        for entry in sinks:
            k_scale, v_scale = self._scales(entry.spec.layer)
            for part, value, scale in (
                (self._layout.keys, entry.sink_key, k_scale),
                (self._layout.values, entry.sink_value, v_scale),
            ):
                stored = to_cache(value, self._layout.dtype, scale)
                blocks = as_bytes(stored).unflatten(0, (-1, size))
                part(as_bytes(self._kv), entry.spec.layer)[self._block_ids] = blocks
