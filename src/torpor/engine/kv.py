"""The KV cache: keys and values of one sequence in one contiguous, releasable tensor.

Layout, row-major, in the model's dtype (shape letters: L layers, S positions, H key/value heads,
D head size)::

    kv[layer]     [0: keys | 1: values]  [position]  [head]  [dim]
    L             2                      S           H       D

The tensor is obtained once, as ``CACHE``, and its address never changes. Sleep throws the content
away, so nothing in it outlives a transition: ``reset()`` forgets every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torpor.sleep.classes import OwnershipClass

if TYPE_CHECKING:
    import torch

    from torpor.model.config import ModelConfig
    from torpor.sleep.sleeper import Sleeper


class KVCache:
    """Keys and values of one sequence, all layers; the model's ``kv`` argument."""

    def __init__(self, kv: torch.Tensor) -> None:
        """Take over a zeroed tensor [L, 2, S, H, D]."""
        self._kv = kv
        self._length = 0

    @classmethod
    def allocate(
        cls, sleeper: Sleeper, config: ModelConfig, max_model_len: int, dtype: torch.dtype
    ) -> KVCache:
        """Get the memory from the sleeper, owned as ``CACHE`` under the name ``kv_cache``.

        Raises:
            OutOfMemoryError: there is not enough memory; lower ``max_model_len``.
        """
        shape = (
            config.num_hidden_layers,
            2,
            max_model_len,
            config.num_key_value_heads,
            config.head_dim,
        )
        kv = sleeper.allocate(shape, dtype, name="kv_cache", cls=OwnershipClass.CACHE)
        return cls(kv)

    @property
    def device(self) -> torch.device:
        """Where the tensor lies."""
        return self._kv.device

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self._kv.shape[2]

    @property
    def length(self) -> int:
        """Positions that every layer has filled."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self._kv.nbytes

    def append(
        self, layer: int, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's keys and values of the T new positions; views of all so far.

        The cache's length does not move: each layer appends at the same place, and the runner
        calls ``advance`` once after the last one.

        Args:
            layer: from 0.
            k_THD: keys of positions ``length`` to ``length + T``, rotated.
            v_THD: values of the same positions.

        Returns:
            Keys and values [S, H, D] of positions 0 to ``length + T``, views of the cache.
        """
        end = self._length + len(k_THD)
        assert end <= self.capacity, f"{end} positions in a KV cache of {self.capacity}"
        keys, values = self._kv[layer, 0, :end], self._kv[layer, 1, :end]
        keys[self._length :] = k_THD
        values[self._length :] = v_THD
        return keys, values

    def advance(self, num_tokens: int) -> None:
        """Count T new positions as filled, after every layer has appended them."""
        self._length += num_tokens

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        assert 0 <= length <= self._length, f"rewind to {length} of {self._length} positions"
        self._length = length

    def reset(self) -> None:
        """Forget every position."""
        self._length = 0
