"""Tiny random models of every architecture give transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.helpers import (
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TINY,
    OneSequence,
    fill,
    logits_of,
    reference,
    write_folder,
)
from tests.openpangu.models import MODELS
from torch import nn

from torpor.model.checkpoints.load import build_model, checkpoint_shapes, new_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.config.config import ARCHITECTURES, parse_config
from torpor.model.layers.decoder import DecoderForCausalLM

MOE = {**QWEN3_MOE, "num_experts": 6, "norm_topk_prob": True, "num_hidden_layers": 4}
UNTIED = {"tie_word_embeddings": False}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral, all": {**MISTRAL, "sliding_window": None},
    "mistral, window": {**MISTRAL, **UNTIED, "sliding_window": 5},
    "mistral, wide heads": {**MISTRAL, "sliding_window": 1, "head_dim": 24},
    "mistral, window by default": {**MISTRAL, "rope_theta": 1e6},
    "qwen2": {**QWEN2, "sliding_window": 5},
    "qwen2, untied": {**QWEN2, **UNTIED, "use_sliding_window": False, "sliding_window": 5},
    "qwen2, last layers slide": {**QWEN2, **SLIDING, "max_window_layers": 1},
    "qwen2, no layer slides": {**QWEN2, **SLIDING},
    "qwen2, layer types": {
        **QWEN2,
        **SLIDING,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2, a switched-off window": {**QWEN2, "use_sliding_window": True, "sliding_window": None},
    "qwen3": {**QWEN3, "head_dim": 24},
    "qwen3, head size by default": {**QWEN3},
    "qwen3, biases, untied": {**QWEN3, **UNTIED, "head_dim": 10, "attention_bias": True},
    "qwen3, all layers slide": {**QWEN3, **SLIDING, "head_dim": 8, "max_window_layers": 0},
    "qwen3 moe": {**MOE, "head_dim": 24},
    "qwen3 moe, even heads": MOE,
    "qwen3 moe, weights as they are": {**MOE, **UNTIED, "head_dim": 8, "norm_topk_prob": False},
    "qwen3 moe, every other layer": {**MOE, "head_dim": 8, "decoder_sparse_step": 2},
    "qwen3 moe, some layers dense": {**MOE, "head_dim": 8, "mlp_only_layers": [0, 3]},
    "qwen3 moe, all slide, biases": {**MOE, **SLIDING, "head_dim": 8, "attention_bias": True},
    "qwen3 moe, all experts": {**MOE, "head_dim": 8, "num_experts_per_tok": 6},
}
IDS = [
    int(value) for value in torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(1))
]


def ours_of(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    files = resolve_model(folder)
    return fill(build_model(files, dtype), files.source)


def their_logits(theirs: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = theirs(torch.tensor([IDS])).logits[0]
    return logits


def test_every_architecture_is_tested() -> None:
    tested = {str(kind.get("architectures", TINY["architectures"])) for kind in KINDS.values()}
    others = {str(model["architectures"]) for model in MODELS.values()}
    assert tested | others == {str([name]) for name in ARCHITECTURES}


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_equal_transformers_in_prefill_and_decode(tmp_path: Path, kind: str) -> None:
    write_folder(tmp_path, **KINDS[kind])
    ours, want = ours_of(tmp_path), their_logits(reference(tmp_path))
    bound = 1e-5 * want.abs().max()
    assert bound > 1e-6
    assert (logits_of(ours, IDS) - want).abs().max() <= bound
    attn = OneSequence()
    got = [logits_of(ours, IDS[:7], attn), logits_of(ours, IDS[7:16], attn, start=7)]
    got += [logits_of(ours, [IDS[at]], attn, start=at) for at in range(16, 24)]
    assert (torch.cat(got) - want).abs().max() <= bound


@pytest.mark.parametrize("kind", ["mistral, window", "qwen2", "qwen3", "qwen3 moe"])
@torch.inference_mode()
def test_bfloat16_follows_transformers(tmp_path: Path, kind: str) -> None:
    write_folder(tmp_path, **KINDS[kind])
    got = logits_of(ours_of(tmp_path, torch.bfloat16), IDS)
    want = their_logits(reference(tmp_path, torch.bfloat16)).float()
    assert (got - want).abs().max() <= 2e-2 * want.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_folder_written_by_transformers_is_understood(tmp_path: Path, kind: str) -> None:
    theirs = reference(write_folder(tmp_path / "before", **KINDS[kind]))
    theirs.save_pretrained(tmp_path / "after")  # type: ignore[operator]
    before, after = ours_of(tmp_path / "before"), ours_of(tmp_path / "after")
    assert after.config == before.config
    assert torch.equal(logits_of(after, IDS), logits_of(before, IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_tensor_is_used_once_and_every_row_is_filled(
    tmp_path: Path, kind: str
) -> None:
    folder = write_folder(tmp_path, **KINDS[kind])
    config = parse_config(json.loads((folder / "config.json").read_text()), {}, where="test")
    model = new_model(config, torch.float32)
    table, parameters = model.slice_table(), dict(model.named_parameters())
    assert {entry.name for entry in table} == set(resolve_model(folder).source.names())
    assert table.by_parameter().keys() == parameters.keys()
    for name, entries in table.by_parameter().items():
        rows = 0
        for entry in entries:
            assert entry.start == rows
            rows += parameters[name].shape[0] if entry.length is None else entry.length
        assert rows == parameters[name].shape[0]
    assert all(parameter.is_meta for parameter in parameters.values())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("mistral, window", {"self_attn.q_proj.weight": (32, 32), "self_attn.q_proj.bias": None}),
        ("qwen2", {"self_attn.k_proj.bias": (16,), "self_attn.o_proj.bias": None}),
        ("qwen3", {"self_attn.q_norm.weight": (24,), "self_attn.q_proj.bias": None}),
        (
            "qwen3 moe, every other layer",
            {"mlp.gate_proj.weight": (64, 32), "mlp.gate.weight": None},
        ),
        (
            "qwen3 moe",
            {
                "mlp.gate.weight": (6, 32),
                "mlp.experts.5.up_proj.weight": (24, 32),
                "mlp.experts.5.down_proj.weight": (32, 24),
                "mlp.gate_proj.weight": None,
            },
        ),
    ],
)
def test_checkpoint_names_and_shapes(kind: str, names: dict[str, tuple[int, ...] | None]) -> None:
    config = parse_config({**TINY, **KINDS[kind]}, {}, where="test")
    shapes = checkpoint_shapes(new_model(config, torch.float32))
    for name, shape in names.items():
        assert shapes.get(f"model.layers.0.{name}") == shape


def test_attention_specs_say_what_the_config_says() -> None:
    config = parse_config({**TINY, **KINDS["qwen2, layer types"]}, {}, where="test")
    first, second = new_model(config, torch.float32).attention_specs()
    assert (first.layer, first.window, second.layer, second.window) == (0, 5, 1, None)
    assert (first.num_heads, first.num_kv_heads, first.k_dim, first.v_dim) == (4, 2, 8, 8)
    assert first.scale == 8**-0.5
