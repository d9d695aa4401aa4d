"""Tiny random Llamas of every supported kind give transformers' logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.helpers import (
    QWEN3_MOE,
    TINY,
    OneSequence,
    fill,
    logits_of,
    reference,
    write_folder,
)

from torpor.errors import WeightsMismatchError
from torpor.model.attention.interface import AttentionSpec
from torpor.model.checkpoints.load import build_model, checkpoint_shapes, new_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.config.config import parse_config
from torpor.model.layers.decoder import DecoderForCausalLM
from torpor.sleep.source import SliceTable

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "untied": {"tie_word_embeddings": False},
    "one head each": {"num_key_value_heads": 4},
    "one shared head": {"num_key_value_heads": 1},
    "attention bias": {"attention_bias": True},
    "all biases, untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "wide heads": {"head_dim": 24},
    "llama3, old style": {"rope_scaling": LLAMA3},
    "llama3, new style": {"rope_parameters": {**LLAMA3, "rope_theta": 5e4}, "rope_theta": None},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "large theta": {"rope_theta": 1e6},
}
IDS = [
    int(value) for value in torch.randint(0, 96, (24,), generator=torch.Generator().manual_seed(1))
]


def tiny(folder: Path, **overrides: Any) -> DecoderForCausalLM:
    files = resolve_model(write_folder(folder, **overrides))
    return fill(build_model(files, torch.float32), files.source)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    ours, theirs = tiny(tmp_path, **KINDS[kind]), reference(tmp_path)
    want = theirs(torch.tensor([IDS])).logits[0]
    assert want.abs().max() > 0.1
    kv = OneSequence()
    got = [logits_of(ours, IDS[:7], kv), logits_of(ours, IDS[7:16], kv, start=7)]
    got += [logits_of(ours, [IDS[at]], kv, start=at) for at in range(16, 24)]
    assert (torch.cat(got) - want).abs().max() <= 1e-5 * want.abs().max()


class SideBySide:
    """Rows of a step, each a sequence of its own."""

    def __init__(self, rows: Sequence[tuple[OneSequence, int]]) -> None:
        self.rows = rows

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> torch.Tensor:
        lengths = [length for _, length in self.rows]
        parts = zip(*(x.split(lengths) for x in (q_THD, k_THD, v_THD)), strict=True)
        out = [row.attend(spec, *part) for (row, _), part in zip(self.rows, parts, strict=True)]
        return torch.cat(out)


@pytest.mark.parametrize("family", [{}, {**QWEN3_MOE, "head_dim": 24}])
@torch.inference_mode()
def test_rows_of_one_step_do_not_disturb_each_other(tmp_path: Path, family: dict[str, Any]) -> None:
    model = tiny(tmp_path, **family)
    first, second = IDS[:10], IDS[10:17]
    attn = OneSequence(), OneSequence()
    logits_of(model, first[:9], attn[0])
    ids_T = torch.tensor([*second, first[9]])
    positions_T = torch.tensor([*range(7), 9])
    hidden_TD = model(ids_T, positions_T, SideBySide([(attn[1], 7), (attn[0], 1)]))
    got = model.compute_logits(hidden_TD)
    want = torch.cat((logits_of(model, second), logits_of(model, first)[-1:]))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[23], [3, 11, 23], []])
@torch.inference_mode()
def test_rows_that_are_asked_for_are_those_of_all(
    tmp_path: Path, kind: str, rows: list[int]
) -> None:
    model = tiny(tmp_path, **KINDS[kind])
    given = torch.tensor(IDS), torch.arange(len(IDS))
    all_of_them, kv = OneSequence(), OneSequence()
    want_TD = model(*given, all_of_them)
    got_RD = model(*given, kv, torch.tensor(rows, dtype=torch.int64))
    torch.testing.assert_close(got_RD, want_TD[rows], atol=1e-5, rtol=1e-5)
    # Later tokens see all keys and values all the same.
    for layer, (keys, values) in all_of_them.layers.items():
        assert torch.equal(kv.layers[layer][0], keys)
        assert torch.equal(kv.layers[layer][1], values)


@torch.inference_mode()
def test_a_config_written_by_transformers_is_understood(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as Reference

    torch.manual_seed(0)
    fields = {key: value for key, value in TINY.items() if key != "architectures"}
    theirs = Reference(LlamaConfig(**fields)).eval()
    theirs.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    files = resolve_model(tmp_path)
    ours = fill(build_model(files, torch.float32), files.source)
    want = theirs(torch.tensor([IDS])).logits[0]
    assert (logits_of(ours, IDS) - want).abs().max() <= 1e-5 * want.abs().max()


@torch.inference_mode()
def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    files = resolve_model(write_folder(tmp_path))
    ours = fill(build_model(files, torch.bfloat16), files.source)
    theirs = reference(tmp_path, torch.bfloat16)
    want = theirs(torch.tensor([IDS])).logits[0].float()
    got = logits_of(ours, IDS)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 2e-2 * want.abs().max()


@torch.inference_mode()
def test_a_prefill_in_parts_equals_one_prefill(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    whole, kv = logits_of(model, IDS), OneSequence()
    parts = [logits_of(model, IDS[at : at + 5], kv, start=at) for at in range(0, 24, 5)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)


def test_a_new_model_has_no_weights_in_memory_and_real_buffers() -> None:
    model = new_model(parse_config(TINY, {}, where="test"), torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert list(buffers) == ["model.rotary_emb.inv_freq"]
    assert not any(buffer.is_meta for buffer in buffers.values())


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied = new_model(parse_config(TINY, {}, where="test"), torch.float32)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.slice_table().ignores("lm_head.weight")
    untied = new_model(
        parse_config({**TINY, "tie_word_embeddings": False}, {}, where="test"), torch.float32
    )
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert "lm_head.weight" in untied.slice_table()


@pytest.mark.parametrize("kind", KINDS)
def test_the_slice_table_covers_every_row_exactly_once(kind: str) -> None:
    config = parse_config({**TINY, **KINDS[kind]}, {}, where="test")
    model = new_model(config, torch.float32)
    parameters = dict(model.named_parameters())
    by_parameter = model.slice_table().by_parameter()
    assert by_parameter.keys() == parameters.keys()
    for name, entries in by_parameter.items():
        rows = 0
        for entry in entries:
            assert entry.start == rows
            rows += parameters[name].shape[0] if entry.length is None else entry.length
        assert rows == parameters[name].shape[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_slice_table_has_transformers_names_and_shapes(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as Reference

    config = {**TINY, **KINDS[kind]}
    shapes = checkpoint_shapes(new_model(parse_config(config, {}, where="t"), torch.float32))
    with torch.device("meta"):
        theirs = Reference(LlamaConfig(**{k: v for k, v in config.items() if v is not None}))
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    assert shapes == expected


def test_old_rope_entries_of_a_checkpoint_are_ignored() -> None:
    table = new_model(parse_config(TINY, {}, where="test"), torch.float32).slice_table()
    assert table.ignores("model.layers.1.self_attn.rotary_emb.inv_freq")
    assert not table.ignores("model.layers.2.self_attn.rotary_emb.inv_freq")


def test_a_name_twice_in_a_slice_table_is_refused() -> None:
    table = new_model(parse_config(TINY, {}, where="test"), torch.float32).slice_table()
    with pytest.raises(WeightsMismatchError, match=r"'model\.norm\.weight' twice"):
        SliceTable([*table, table["model.norm.weight"]])
