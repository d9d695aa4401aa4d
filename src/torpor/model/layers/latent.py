"""Multi-head latent attention (DeepSeek-V2, section 2.1), in its absorbed form.

What is cached of a token is one latent and one rotated key, shared by all heads. The weights that
would expand a latent into a head's key and value are applied to the query and to the result
instead: once for each new token, not for each token of context. Prompts take the same way, so that
a token's value does not depend on how its prompt is cut.

Shape suffixes: T new tokens of all rows, D model width, H heads, N unrotated and P rotated size of
a query head, C latent, V value size, S sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torpor.model.attention.interface import AttentionContext, AttentionSpec
from torpor.model.config.config import ModelConfig
from torpor.model.config.features import MLAConfig, SinkConfig
from torpor.model.layers.derived import Derived
from torpor.model.layers.layers import Linear, RMSNorm, RopeTables, empty_parameter
from torpor.model.layers.ops import OpsModule
from torpor.model.layers.sinks import StaticSinkAttention


class LatentAttention(OpsModule):
    """Latents of queries and of keys with values; attention over latents; the output projection.

    ``w_uk`` [H, C, N] and ``w_uv`` [H, V, C] are derived: the two halves of each head in
    ``kv_b_proj``, as products read them.
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __init__(self, config: ModelConfig, mla: MLAConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mla = mla
        heads, width, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        latent, rope = mla.kv_lora_rank, mla.qk_rope_head_dim
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads,
            num_kv_heads=1,
            k_dim=latent + rope,
            v_dim=latent,
            scale=config.head_dim**-0.5,
            window=config.features.windows[layer],
        )
        self.rope_interleaved = config.features.rope_interleaved
        # One product for both latents; without one of the queries, those come straight from x.
        direct = mla.q_lora_rank is None
        first = heads * config.head_dim if mla.q_lora_rank is None else mla.q_lora_rank
        self._widths = first, latent, rope
        self.fused_qkv_a_proj = Linear(width, first + latent + rope, bias=False, dtype=dtype)
        self.q_a_layernorm = None if direct else RMSNorm(first, eps, dtype=dtype)
        self.q_b_proj = (
            None if direct else Linear(first, heads * config.head_dim, bias=False, dtype=dtype)
        )
        self.kv_a_layernorm = RMSNorm(latent, eps, dtype=dtype)
        expanded = mla.qk_nope_head_dim + mla.v_head_dim
        self.kv_b_proj = Linear(latent, heads * expanded, bias=False, dtype=dtype)
        for name, shape in (
            ("w_uk", (heads, latent, mla.qk_nope_head_dim)),
            ("w_uv", (heads, mla.v_head_dim, latent)),
        ):
            zeros = torch.zeros(shape, dtype=dtype, device="cpu")
            self.register_buffer(name, zeros, persistent=False)
        self.sink_attn: StaticSinkAttention | None = None
        if config.features.sinks is not None:
            self._add_sinks(config.features.sinks, dtype)
        self.o_proj = Linear(heads * mla.v_head_dim, width, bias=False, dtype=dtype)

    def _add_sinks(self, sinks: SinkConfig, dtype: torch.dtype) -> None:
        latent, rope = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        if sinks.with_value:
            self.param_sink_compressed_kv = empty_parameter(sinks.count, latent, dtype=dtype)
        else:
            # A buffer, so that it has an owner and comes back; no checkpoint holds it.
            zeros = torch.zeros(sinks.count, latent, dtype=dtype, device="cpu")
            self.register_buffer("param_sink_compressed_kv", zeros, persistent=False)
        self.param_sink_k_pe = empty_parameter(sinks.count, rope, dtype=dtype)
        self.sink_attn = StaticSinkAttention(self.spec, sinks.count, dtype=dtype)

    def forward(
        self,
        x_TD: torch.Tensor,
        rope: RopeTables,
        attn: AttentionContext,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, D] to [T, D], or [R, D] of those rows; hands all T latents to `attn`."""
        q_latent, z_TC, pe_TP = self.fused_qkv_a_proj(x_TD).split(self._widths, dim=-1)
        q_THN, q_pe_THP = self._queries(q_latent)
        c_T1C = self.kv_a_layernorm(z_TC)[:, None]
        q_pe_THP = self._rotate(q_pe_THP, rope)
        k_pe_T1P = self._rotate(pe_TP[:, None], rope)
        q_THK = torch.cat((self.ops.heads_linear(q_THN, self.w_uk), q_pe_THP), dim=-1)
        k_T1K = torch.cat((c_T1C, k_pe_T1P), dim=-1)
        if self.sink_attn is None:
            out_THC = attn.attend(self.spec, q_THK, k_T1K, c_T1C)
        else:
            out_THC = self.sink_attn(q_THK, k_T1K, c_T1C, attn)
        if rows_R is not None:
            out_THC = self.ops.take_rows(out_THC, rows_R)
        out_THV = self.ops.heads_linear(out_THC, self.w_uv)
        out: torch.Tensor = self.o_proj(out_THV.flatten(1))
        return out

    def _queries(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            latent = self.q_b_proj(self.q_a_layernorm(latent))
        q_THK = latent.unflatten(-1, (self.spec.num_heads, -1))
        sizes = [self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim]
        q_THN, q_pe_THP = q_THK.split(sizes, dim=-1)
        return q_THN, q_pe_THP

    def _rotate(self, x_THP: torch.Tensor, rope: RopeTables) -> torch.Tensor:
        return self.ops.rotate(x_THP, *rope, interleaved=self.rope_interleaved)

    def derived(self, prefix: str) -> Iterator[Derived]:
        """The absorbed weights, and the sinks as they would lie in the cache."""
        for name, rebuild in (("w_uk", self.compute_w_uk), ("w_uv", self.compute_w_uv)):
            yield Derived(
                name=f"{prefix}{name}",
                tensor=getattr(self, name),
                sources=(f"{prefix}kv_b_proj.weight",),
                rebuild=rebuild,
            )
        if self.sink_attn is None:
            return
        latent = f"{prefix}param_sink_compressed_kv", f"{prefix}kv_a_layernorm.weight"
        yield Derived(
            name=f"{prefix}sink_attn.sink_key",
            tensor=self.sink_attn.sink_key,
            sources=(*latent, f"{prefix}param_sink_k_pe"),
            rebuild=self.compute_sink_key,
        )
        yield Derived(
            name=f"{prefix}sink_attn.sink_value",
            tensor=self.sink_attn.sink_value,
            sources=latent,
            rebuild=self.compute_sink_value,
        )

    def compute_w_uk(self) -> torch.Tensor:
        """Each head's part of ``kv_b_proj`` that makes keys, turned: [H, C, N]."""
        return self._heads_of_kv_b()[:, : self.mla.qk_nope_head_dim].transpose(1, 2)

    def compute_w_uv(self) -> torch.Tensor:
        """Each head's part of ``kv_b_proj`` that makes values: [H, V, C]."""
        return self._heads_of_kv_b()[:, self.mla.qk_nope_head_dim :]

    def compute_sink_key(self) -> torch.Tensor:
        """Normed latents beside their rotated parts as they are, at position 0: [S, 1, C + P]."""
        return torch.cat((self.compute_sink_value(), self.param_sink_k_pe[:, None]), dim=-1)

    def compute_sink_value(self) -> torch.Tensor:
        """Normed latents: [S, 1, C]. Zeros stay zeros."""
        value: torch.Tensor = self.kv_a_layernorm(self.param_sink_compressed_kv)[:, None]
        return value

    def _heads_of_kv_b(self) -> torch.Tensor:
        weight: torch.Tensor = self.kv_b_proj.weight
        return weight.view(self.spec.num_heads, -1, self.mla.kv_lora_rank)

    def post_weight_load(self) -> None:
        """Compute what is derived from the weights, for a module whose memory nobody owns."""
        with torch.no_grad():
            self.w_uk.copy_(self.compute_w_uk())
            self.w_uv.copy_(self.compute_w_uv())
        if self.sink_attn is not None:
            self.sink_attn.update_sink_kv(self.compute_sink_key(), self.compute_sink_value())
