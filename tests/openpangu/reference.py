"""openPangu in float64, straight from the equations, one token after another.

Nothing of the engine is used: tensors come by their names on disk and sizes from the raw config.
Slow and plain on purpose. Matrices act on column vectors, as in the papers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Vectors = list[torch.Tensor]

TIE = 2e-5
"""What float32 may be off by in keys and values of about 1."""


class Reference:
    """One model: a config as a mapping and its checkpoint.

    ``kv_scales``, by name (``model.layers.0.self_attn.k_scale``), round context keys and values to
    eight bits; with ``reserved`` sinks too. Numbers of which two roundings are as good, since they
    lie between them within `TIE`, go as in ``stored``, where that is given: what somebody else has
    stored, by the same names (and those with " sinks" behind), [tokens, KV heads, size].
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        kv_scales: Mapping[str, float] | None = None,
        reserved: bool = False,
        stored: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.c = config
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        self.kv_scales = kv_scales or {}
        self.reserved = reserved
        self.stored = stored or {}

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] of every position."""
        stream = [self.w["model.embed_tokens.weight"][token] for token in ids]
        for layer in range(self.c["num_hidden_layers"]):
            stream = self._block(stream, f"model.layers.{layer}.", layer)
        tied = self.c.get("tie_word_embeddings", False)
        head = self.w["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return torch.stack([head @ self._norm(x, "model.norm.weight") for x in stream])

    # -- a block -------------------------------------------------------------------------------

    def _block(self, stream: Vectors, p: str, layer: int) -> Vectors:
        normed = [self._norm(x, f"{p}input_layernorm.weight") for x in stream]
        attended = self._attention(normed, f"{p}self_attn.", layer)
        if not self.c.get("sandwich_norm", False):
            stream = [x + a for x, a in zip(stream, attended, strict=True)]
            normed = [self._norm(x, f"{p}post_attention_layernorm.weight") for x in stream]
            return [
                x + self._ffn(n, f"{p}mlp.", layer) for x, n in zip(stream, normed, strict=True)
            ]
        after = f"{p}post_attention_layernorm.weight"
        stream = [x + self._norm(a, after) for x, a in zip(stream, attended, strict=True)]
        out = []
        for x in stream:
            m = self._ffn(self._norm(x, f"{p}pre_mlp_layernorm.weight"), f"{p}mlp.", layer)
            out.append(x + self._norm(m, f"{p}post_mlp_layernorm.weight"))
        return out

    def _norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return (
            self.w[weight] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        )

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = self.w[f"{name}.weight"] @ x
        bias = self.w.get(f"{name}.bias")
        return y if bias is None else y + bias

    # -- attention -----------------------------------------------------------------------------

    def _attention(self, xs: Vectors, p: str, layer: int) -> Vectors:
        if self.c.get("kv_lora_rank"):
            return self._latent(xs, p, layer)
        return self._grouped(xs, p, layer)

    def _grouped(self, xs: Vectors, p: str, layer: int) -> Vectors:
        c = self.c
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        sinks = c.get("param_sink_number", 0)
        qs, ks, vs = [], [], []
        for t, x in enumerate(xs):
            if sinks:
                rope, k_dim = c["qk_rope_dim"], c["qk_nope_dim"] + c["qk_rope_dim"]
                qkv = self._linear(x, f"{p}qkv_proj")
                q, k, v = qkv.split([heads * k_dim, groups * k_dim, groups * c["v_channels"]])
                q, k, v = q.view(heads, -1), k.view(groups, -1), v.view(groups, -1)
                k = self._norm(k, f"{p}k_layernorm.weight")
                q, k = (self._neighbours(y, t, slice(0, rope)) for y in (q, k))
            else:
                q, k, v = (
                    self._linear(x, f"{p}{name}_proj").view(count, -1)
                    for name, count in (("q", heads), ("k", groups), ("v", groups))
                )
                q, k = (self._halves(y, t) for y in (q, k))
            qs.append(q), ks.append(k), vs.append(v)
        k_all = self._stored(torch.stack(ks), f"{p}k_scale")
        v_all = self._stored(torch.stack(vs), f"{p}v_scale")
        if sinks:
            sink_k = self._norm(self.w[f"{p}param_sink_key"], f"{p}k_layernorm.weight")
            none = torch.zeros(sinks, groups, c["v_channels"], dtype=torch.float64)
            sink_v = self.w.get(f"{p}param_sink_value", none)
            if self.reserved:
                sink_k = self._stored(sink_k, f"{p}k_scale", " sinks")
                sink_v = self._stored(sink_v, f"{p}v_scale", " sinks")
        else:
            sink_k, sink_v = k_all[:0], v_all[:0]
        outs = []
        for t, q in enumerate(qs):
            seen = slice(self._first_seen(t, layer), t + 1)
            rows = []
            for h in range(heads):
                g = h // (heads // groups)
                keys = torch.cat((sink_k[:, g], k_all[seen, g]))
                values = torch.cat((sink_v[:, g], v_all[seen, g]))
                rows.append(self._softmax(q[h], keys, values, q.shape[-1] ** -0.5))
            outs.append(self._linear(torch.cat(rows), f"{p}o_proj"))
        return outs

    def _latent(self, xs: Vectors, p: str, layer: int) -> Vectors:
        c = self.c
        heads, rank, sinks = (
            c["num_attention_heads"],
            c["kv_lora_rank"],
            c.get("param_sink_number", 0),
        )
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        queries, latents, shared = [], [], []
        for t, x in enumerate(xs):
            if c.get("q_lora_rank"):
                low = self._norm(self._linear(x, f"{p}q_a_proj"), f"{p}q_a_layernorm.weight")
                q = self._linear(low, f"{p}q_b_proj").view(heads, -1)
            else:
                q = self._linear(x, f"{p}q_proj").view(heads, -1)
            queries.append(self._neighbours(q, t, slice(nope, nope + rope)))
            z, k_pe = self._linear(x, f"{p}kv_a_proj_with_mqa").split([rank, rope])
            latents.append(self._norm(z, f"{p}kv_a_layernorm.weight"))
            shared.append(self._neighbours(k_pe, t, slice(0, rope)))
        sink_latents, sink_shared = [], []
        for i in range(sinks):
            raw = self.w.get(f"{p}param_sink_compressed_kv")
            z = torch.zeros(rank, dtype=torch.float64) if raw is None else raw[i]
            sink_latents.append(self._norm(z, f"{p}kv_a_layernorm.weight"))
            sink_shared.append(self.w[f"{p}param_sink_k_pe"][i])
        # Every sink and token expanded to keys and values of each head, as the equations say it.
        keys, values = [], []
        of_sinks = self._cached(sink_latents, sink_shared, p, " sinks") if sinks else []
        for of_key, k_pe, of_value in [*of_sinks, *self._cached(latents, shared, p)]:
            key = self._linear(of_key, f"{p}kv_b_proj").view(heads, -1)[:, :nope]
            value = self._linear(of_value, f"{p}kv_b_proj").view(heads, -1)[:, nope:]
            keys.append(torch.cat((key, k_pe.expand(heads, -1)), dim=-1))
            values.append(value)
        k_all, v_all = torch.stack(keys), torch.stack(values)
        outs = []
        for t, q in enumerate(queries):
            seen = [*range(sinks), *range(sinks + self._first_seen(t, layer), sinks + t + 1)]
            rows = [
                self._softmax(q[h], k_all[seen, h], v_all[seen, h], (nope + rope) ** -0.5)
                for h in range(heads)
            ]
            outs.append(self._linear(torch.cat(rows), f"{p}o_proj"))
        return outs

    def _cached(
        self, latents: Vectors, shared: Vectors, p: str, which: str = ""
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each latent as it is for keys, the shared part of the key, and the latent for values."""
        rank = len(latents[0])
        keys = torch.cat((torch.stack(latents), torch.stack(shared)), dim=-1)[:, None]
        values = torch.stack(latents)[:, None]
        if not which or self.reserved:
            keys = self._stored(keys, f"{p}k_scale", which)
            values = self._stored(values, f"{p}v_scale", which)
        rows = zip(keys[:, 0], values[:, 0], strict=True)
        return [(key[:rank], key[rank:], value) for key, value in rows]

    def _stored(self, x: torch.Tensor, name: str, which: str = "") -> torch.Tensor:
        """Through eight bits: sign, four of exponent (-6 to 8), three of mantissa; ties to even."""
        scale = self.kv_scales.get(name)
        if scale is None:
            return x
        y = (x / scale).clamp(-448, 448)
        step = 2.0 ** (torch.frexp(y).exponent.clamp(min=-5) - 4).double()
        place = y / step
        rounded = torch.round(place) * step * scale
        theirs = self.stored.get(name + which, rounded).double()
        other = (theirs - rounded).abs() > step * scale / 4
        tie = (place - place.floor() - 0.5).abs() * step * scale <= TIE
        assert not (other & ~tie).any(), f"{name}: stored is not the nearest"
        assert ((theirs - rounded).abs()[other] <= 1.01 * (step * scale)[other]).all(), name
        return torch.where(other, theirs, rounded)

    def _softmax(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        scores = scale * (keys @ q)
        weights = torch.exp(scores - scores.max())
        return weights / weights.sum() @ values

    def _first_seen(self, t: int, layer: int) -> int:
        windows = self.c.get("interleaved_sliding_window")
        window = windows[layer % len(windows)] if isinstance(windows, list) else windows
        return 0 if window is None else max(0, t - window + 1)

    # -- rotation ------------------------------------------------------------------------------

    def _angles(self, t: int, width: int) -> torch.Tensor:
        steps = [self.c["rope_theta"] ** (-2 * j / width) for j in range(width // 2)]
        return torch.tensor([t * step for step in steps], dtype=torch.float64)

    def _halves(self, x: torch.Tensor, t: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = self._angles(t, x.shape[-1])
        a, b = x[..., :half], x[..., half:]
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )

    def _neighbours(self, x: torch.Tensor, t: int, part: slice) -> torch.Tensor:
        out, rotated = x.clone(), x[..., part]
        angles = self._angles(t, rotated.shape[-1])
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = rotated.clone()
        turned[..., 0::2] = a * angles.cos() - b * angles.sin()
        turned[..., 1::2] = b * angles.cos() + a * angles.sin()
        out[..., part] = turned
        return out

    # -- feed-forward --------------------------------------------------------------------------

    def _ffn(self, x: torch.Tensor, p: str, layer: int) -> torch.Tensor:
        if f"{p}gate.weight" not in self.w:
            return self._swiglu(x, p)
        scores = self.w[f"{p}gate.weight"] @ x
        if f"{p}router_scale" in self.w:
            return self._grouped_experts(x, scores, p)
        s = 1 / (1 + torch.exp(-scores))
        choice = s + self.w.get(f"{p}e_score_correction_bias", torch.zeros_like(s))
        chosen = sorted(range(len(s)), key=lambda e: -float(choice[e]))[
            : self.c["num_experts_per_tok"]
        ]
        total = float(sum(s[e] for e in chosen)) + 1e-20 if self.c["norm_topk_prob"] else 1.0
        y = sum(
            (s[e] / total * self._swiglu(x, f"{p}experts.{e}.") for e in chosen),
            torch.zeros_like(x),
        )
        y = self.c["routed_scaling_factor"] * y
        if f"{p}shared_experts.up_proj.weight" in self.w:
            y = y + self._swiglu(x, f"{p}shared_experts.")
        return y

    def _grouped_experts(self, x: torch.Tensor, scores: torch.Tensor, p: str) -> torch.Tensor:
        probs = torch.exp(scores - scores.max())
        probs = probs / probs.sum()
        groups = self.c["num_experts_per_tok"]
        size = len(probs) // groups
        y = torch.zeros_like(x)
        for g in range(groups):
            e = g * size + int(probs[g * size : (g + 1) * size].argmax())
            weight = probs[e] * self.w[f"{p}router_scale"][0, e]
            y = y + weight * self._swiglu(x, f"{p}experts.{e}.")
        return y + self._swiglu(x, f"{p}shared_expert.")

    def _swiglu(self, x: torch.Tensor, p: str) -> torch.Tensor:
        gate = self._linear(x, f"{p}gate_proj")
        return self._linear(
            gate / (1 + math.e**-gate) * self._linear(x, f"{p}up_proj"), f"{p}down_proj"
        )
