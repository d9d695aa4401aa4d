"""What sets one architecture apart from another, as torpor's layers know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Routing = Literal["softmax", "grouped", "sigmoid"]
"""How a router scores experts and picks some; see ``layers/routers.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of some layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Inner width of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    layers: frozenset[int]
    """Indices of the layers that have experts; the others have an MLP."""
    routing: Routing = "softmax"
    router_scale: bool = False
    """Whether each expert's weight is multiplied by a learned factor."""
    correction_bias: bool = False
    """Whether a bias is added to the scores for the choice, and for it alone."""
    routed_scaling_factor: float = 1.0
    """Factor on the sum of the routed experts."""
    shared_intermediate_size: int = 0
    """Inner width of the MLP that every token goes through beside its experts; 0 for none."""
    shared_name: str = "shared_experts"
    """Name of that MLP in checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    """Static attention sinks: learned keys, and maybe values, that every query sees."""

    count: int
    """Sinks of each layer and KV head."""
    with_value: bool
    """Whether values are learned too; else they are zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1). All in elements."""

    q_lora_rank: int | None
    """Width of the queries' latent; None for queries straight from the hidden state."""
    kv_lora_rank: int
    """Width of the latent that keys and values are expanded from."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """The part of a query head that is rotated; its key is shared by all heads."""
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a family switches on."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    row_parallel_bias: bool = True
    """Whether ``o_proj`` and ``down_proj`` have the biases that the model has. Of several ranks,
    whose products are summed, the first has them."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normed before they are rotated."""
    k_norm: bool = False
    """Whether each head's keys are, and its queries not."""
    fused_qkv: bool = False
    """Whether checkpoints hold one tensor for queries, keys and values."""
    sandwich_norm: bool = False
    """Whether attention and MLP are normed after too, before they are added to the stream."""
    head_dim: int | None = None
    """Head size of queries and keys when the config does not state one; None for an even split of
    the width."""
    v_head_dim: int | None = None
    """Head size of values; None for the one of the keys."""
    rope_dim: int | None = None
    """The first so many elements of a head are rotated; None for all."""
    rope_interleaved: bool = False
    """Whether neighbours are rotated together, not elements half a head apart."""
    windows: tuple[int | None, ...]
    """Attention window of each layer in tokens, the token itself included; None for all."""
    moe: MoEConfig | None = None
    sinks: SinkConfig | None = None
    mla: MLAConfig | None = None
    num_nextn_predict_layers: int = 0
    """Layers of a checkpoint, after the others, that predict further tokens; torpor skips them."""
