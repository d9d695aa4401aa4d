"""What one layer keeps in the cache, and what the layers that share a block table agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torpor.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Keys and values of one layer.

    Raises:
        ArgumentError: a size is not positive.
    """

    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    k_dim: int
    """Head size of keys."""
    v_dim: int
    """Head size of values; may differ from ``k_dim``."""
    dtype: str
    """Name of the stored dtype, such as ``float32``; part of a cached block's identity."""
    itemsize: int
    """Bytes of one element."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None for all."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_heads", "k_dim", "v_dim", "itemsize", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1")

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer, keys and values."""
        return self.block_size * self.num_kv_heads * (self.k_dim + self.v_dim) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """The layers behind one block table: a block id means the same block in each of them."""

    specs: tuple[KVSpec, ...]
    block_size: int
    window: int | None
    """How far back any layer looks, itself included; None as soon as one layer sees everything."""

    @classmethod
    def of(cls, specs: Sequence[KVSpec]) -> KVGroup:
        """Put layers behind one table.

        Raises:
            ArgumentError: no layer, or layers with different block sizes.
        """
        if not specs:
            raise ArgumentError("a KV cache needs the spec of at least one layer; none was given")
        block_sizes = sorted({spec.block_size for spec in specs})
        if len(block_sizes) > 1:
            raise ArgumentError(
                f"layers behind one block table have block sizes {block_sizes}; give them one"
            )
        windows = [spec.window for spec in specs if spec.window is not None]
        # A table entry may go only when no layer looks at it any more.
        window = max(windows) if len(windows) == len(specs) else None
        return cls(specs=tuple(specs), block_size=block_sizes[0], window=window)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(spec.page_bytes for spec in self.specs)

    @property
    def window_blocks(self) -> int | None:
        """Blocks in a row that a hit needs at its end; None for all from the first."""
        return None if self.window is None else max(1, self.blocks_for(self.window - 1))

    def blocks_for(self, num_tokens: int) -> int:
        """Table entries that ``num_tokens`` positions take."""
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request of ``num_tokens`` holds at any time.

        Args:
            num_tokens: prompt and output together.
            max_step_tokens: the most tokens that one step computes for a request.

        Without a window that is all of them. With one it is what the first query of a step still
        looks back at, the step's own tokens, and one block because neither end is aligned; blocks
        that left the window must have been given back before the step.
        """
        whole = self.blocks_for(num_tokens)
        if self.window is None:
            return whole
        return min(whole, self.blocks_for(self.window - 1 + max_step_tokens) + 1)

    def first_visible_block(self, num_computed: int) -> int:
        """Index of the first block that position ``num_computed`` or a later one looks at."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size
