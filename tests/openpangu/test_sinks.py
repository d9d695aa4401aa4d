"""Attention over sinks against the equations in float64, by its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.helpers import OneSequence, fill
from tests.openpangu.models import MODELS, write_model

from torpor.model.attention.interface import AttentionSpec
from torpor.model.checkpoints.load import build_model, new_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.config.config import parse_config
from torpor.model.layers.sinks import StaticSinkAttention


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attended(
    spec: AttentionSpec, q: torch.Tensor, keys: Any, values: Any, window: int | None
) -> torch.Tensor:
    """Softmax over sinks and what each token sees, head by head, in float64."""
    (sink_k, k), (sink_v, v) = keys, values
    out = torch.zeros(len(q), spec.num_heads, spec.v_dim, dtype=torch.float64)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(spec.num_heads):
            g = h // (spec.num_heads // spec.num_kv_heads)
            rows = torch.cat((sink_k[:, g], k[first : t + 1, g])).double()
            seen = torch.cat((sink_v[:, g], v[first : t + 1, g])).double()
            weights = (spec.scale * (rows @ q[t, h].double())).softmax(0)
            out[t, h] = weights @ seen
    return out


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 12),
    sinks=st.integers(1, 9),
    groups=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    window=st.none() | st.integers(1, 14),
    zero_values=st.booleans(),
    loud=st.booleans(),
)
def test_sinks_are_seen_by_every_token_and_counted_once(
    tokens: int,
    sinks: int,
    groups: int,
    group: int,
    dims: tuple[int, int],
    window: int | None,
    zero_values: bool,
    loud: bool,
) -> None:
    k_dim, v_dim = dims
    spec = AttentionSpec(
        layer=0,
        num_heads=groups * group,
        num_kv_heads=groups,
        k_dim=k_dim,
        v_dim=v_dim,
        scale=k_dim**-0.5,
        window=window,
    )
    q = normal(tokens, spec.num_heads, k_dim, seed=1) * (30 if loud else 1)
    k, v = normal(tokens, groups, k_dim, seed=2), normal(tokens, groups, v_dim, seed=3)
    sink_k, sink_v = normal(sinks, groups, k_dim, seed=4), normal(sinks, groups, v_dim, seed=5)
    if zero_values:
        sink_v.zero_()
    attention = StaticSinkAttention(spec, sinks, dtype=torch.float32, attn_backend=OneSequence())
    places = attention.sink_key.data_ptr(), attention.sink_value.data_ptr()
    attention.update_sink_kv(sink_k, sink_v)
    assert (attention.sink_key.data_ptr(), attention.sink_value.data_ptr()) == places
    want = attended(spec, q, (sink_k, k), (sink_v, v), window)
    assert (attention(q, k, v) - want).abs().max() <= 1e-5
    given = attention.forward_native(q, k, v, OneSequence())
    assert (given - want).abs().max() <= 1e-5


def test_zero_values_are_a_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    config = MODELS["pro moe v2, zero values"]
    model = new_model(parse_config(config, {}, where="test"), torch.float32)
    name = "model.layers.0.self_attn.param_sink_value"
    assert name in dict(model.named_buffers())
    assert name not in model.state_dict()
    assert name not in {entry.name for entry in model.slice_table()}
    assert dict(model.named_buffers())[name].shape == (16, 2, 16)
    with_values = new_model(parse_config(MODELS["pro moe v2"], {}, where="test"), torch.float32)
    assert dict(with_values.named_parameters())[name].shape == (16, 2, 16)


@pytest.mark.parametrize("kind", ["pro moe v2", "ultra, sinks"])
def test_loading_weights_again_needs_their_derivation_again(tmp_path: Path, kind: str) -> None:
    files = resolve_model(write_model(tmp_path, MODELS[kind]))
    model = fill(build_model(files, torch.float32), files.source)
    assert json.loads((tmp_path / "config.json").read_text())["param_sink_number"] == 16
    sinks = model.static_sinks()
    assert len(sinks) == 3
    assert not any(each.sink_key.any() for each in sinks)
    model.post_weight_load()
    first = sinks[0].sink_key.clone()
    assert first.any()
    with torch.no_grad():
        dict(model.named_parameters())[
            "model.layers.0.self_attn."
            + ("k_layernorm" if "pro" in kind else "kv_a_layernorm")
            + ".weight"
        ].mul_(2)
    assert torch.equal(sinks[0].sink_key, first)
    model.post_weight_load()
    assert not torch.equal(sinks[0].sink_key, first)
