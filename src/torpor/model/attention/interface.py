"""What a decoder layer asks of attention, and what a backend must declare.

A layer hands over the queries, keys and values of the step's new tokens, of all its requests, and
gets the attended values back; where keys and values are kept is the backend's matter. Shape
letters: T new tokens of all rows, R rows (requests of the step), H heads, D head size, B blocks in
the longest table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention, as the config has it."""

    layer: int
    """Index of the layer, from 0."""
    num_heads: int
    num_kv_heads: int
    """Each serves ``num_heads // num_kv_heads`` query heads."""
    k_dim: int
    """Head size of queries and keys."""
    v_dim: int
    """Head size of values; may differ from ``k_dim``."""
    scale: float
    """Factor on the dot products."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None for all."""


class StaticSinks(Protocol):
    """One layer's static sinks."""

    spec: AttentionSpec
    sink_key: torch.Tensor
    """[S, num_kv_heads, k_dim], normed as context keys are, not rotated."""
    sink_value: torch.Tensor
    """[S, num_kv_heads, v_dim]."""


class AttentionContext(Protocol):
    """Attention of one step, over whatever cache the engine keeps."""

    @property
    def holds_sinks(self) -> bool:
        """Whether the cache holds the layers' sinks, so that what is attended includes them."""
        ...

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> torch.Tensor:
        """Store the new keys and values of one layer and attend causally within each row.

        Args:
            spec: the layer.
            q_THD: rotated queries [T, num_heads, k_dim].
            k_THD: rotated keys [T, num_kv_heads, k_dim]; any strides.
            v_THD: values [T, num_kv_heads, v_dim]; any strides.

        Returns:
            [T, num_heads, v_dim], contiguous or reshapeable to [T, num_heads * v_dim].
        """
        ...

    def attend_with_lse(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend`, and the log-sum-exp of each token's scores.

        Returns:
            [T, num_heads, v_dim] and float32 [T, num_heads] in natural logarithms.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The rows of one step, as a paged backend needs them. Row after row along T."""

    query_lens: tuple[int, ...]
    """New tokens per row; they sum to T. 0 for a padding row, of which nothing is computed."""
    context_lens: tuple[int, ...]
    """Tokens per row that the cache holds from before; 0 for a padding row."""
    block_tables_RB: torch.Tensor
    """int64 [R, B]: block ids per row, in order; valid everywhere, the tail is the null block."""
    slots_T: torch.Tensor
    """int64 [T]: where each new token's key and value go, ``block * block_size + offset``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; asked before it is chosen, never tried."""

    name: str
    block_sizes: tuple[int, ...] | None
    """Block sizes it takes; None for any."""
    reads_past_length: bool
    """Whether slots beyond a row's length are read, so that fresh blocks must be cleared."""
    returns_lse: bool
    """Whether the log-sum-exp of the scores can be had, which merging with sinks needs."""
    k_v_dims_differ: bool
    windows: bool
    batch_invariant: bool
    """Whether a row's bits are the same whatever the other rows and however it is chunked."""


class AttentionBackend(AttentionContext, Protocol):
    """Attention over a paged cache."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare for one step; every later ``attend`` is of these rows."""
        ...


class LseAttention(ABC):
    """A backend that can also say the log-sum-exp of each token's scores."""

    holds_sinks = False

    def attend(
        self, spec: AttentionSpec, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> torch.Tensor:
        """See `AttentionContext`."""
        return self._attend(spec, q_THD, k_THD, v_THD, with_lse=False)[0]

    def attend_with_lse(
        self, spec: AttentionSpec, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend`, and the log-sum-exp of each token's scores.

        Returns:
            [T, num_heads, v_dim] and float32 [T, num_heads] in natural logarithms.
        """
        out_THD, lse_TH = self._attend(spec, q_THD, k_THD, v_THD, with_lse=True)
        assert lse_TH is not None, "no log-sum-exp though it was asked for"
        return out_THD, lse_TH

    @abstractmethod
    def _attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        *,
        with_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
