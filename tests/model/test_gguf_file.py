"""A GGUF file gives the config and the weights it was made from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.model.helpers import (
    GGUF_TINY,
    GGUF_TOKENS,
    fill,
    logits_of,
    write_gguf,
)

from torpor.errors import CheckpointError, ConfigError, ModelNotFoundError
from torpor.model.checkpoints.gguf_file import GgufFile
from torpor.model.checkpoints.gguf_header import read_gguf_header
from torpor.model.checkpoints.load import new_model
from torpor.model.config.config import RopeConfig, parse_config

Kind = gguf.GGMLQuantizationType


class Pairs:
    """A weight source over pairs in memory."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def names(self) -> list[str]:
        return list(self.weights)

    def pairs(self) -> Any:
        return iter(self.weights.items())

    def extent(self, name: str) -> None:
        return None


def test_weights_come_back_bit_equal_with_query_and_key_rows_in_order(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    got = dict(GgufFile(tmp_path / "tiny.gguf").pairs())
    assert got.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in got.items())


def test_biases_are_read_and_their_rows_put_in_order(tmp_path: Path) -> None:
    config = {**GGUF_TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    weights = write_gguf(tmp_path / "tiny.gguf", config=config)
    file = GgufFile(tmp_path / "tiny.gguf")
    assert file.config.features.qkv_bias
    assert file.config.features.mlp_bias
    assert not file.config.tie_word_embeddings
    assert all(torch.equal(tensor, weights[name]) for name, tensor in file.pairs())


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Kind.F16, 1e-3), (Kind.BF16, 1e-2), (Kind.Q8_0, 1e-2), (Kind.Q4_1, 0.1), (Kind.Q5_0, 0.1)],
)
def test_quantised_weights_are_close_to_what_they_were(
    tmp_path: Path, kind: Kind, error: float
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    for name, tensor in GgufFile(tmp_path / "tiny.gguf").pairs():
        assert tensor.dtype == torch.float32
        assert (tensor - weights[name]).abs().max() <= error


def test_dequantised_values_are_the_librarys(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind=Kind.Q4_1)
    file = GgufFile(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.0.ffn_down.weight":
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            got = file.tensor("model.layers.0.mlp.down_proj.weight")
            assert np.array_equal(got.numpy(), expected)


def test_bfloat16_is_rounded_from_float32(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    for name, tensor in GgufFile(tmp_path / "tiny.gguf").pairs(torch.bfloat16):
        assert torch.equal(tensor, weights[name].to(torch.bfloat16))


@torch.inference_mode()
def test_the_config_and_weights_make_the_same_model(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    file = GgufFile(tmp_path / "tiny.gguf")
    expected = parse_config(GGUF_TINY, {}, where="test")
    original = fill(new_model(expected, torch.float32), Pairs(weights))
    converted = fill(new_model(file.config, torch.float32), Pairs(dict(file.pairs())))
    ids = list(range(20))
    assert torch.equal(logits_of(original, ids), logits_of(converted, ids))


def test_the_header_says_what_the_librarys_reader_says(tiny_gguf: Path) -> None:
    ours, theirs = read_gguf_header(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    own = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {name: field.contents() for name, field in own.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.kind, entry.offset) == (tensor.tensor_type, tensor.data_offset)
        assert entry.nbytes == tensor.n_bytes


def test_an_alignment_of_its_own_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, metadata={"general.alignment": 256})
    # The library's writer takes the alignment from a setter, so offsets are still multiples of 32.
    with pytest.raises(CheckpointError, match="is not a multiple of 256"):
        GgufFile(path)


def test_every_scalar_type_of_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -5, "uint16": 60000, "int16": -300, "uint32": 4 * 10**9,
        "int32": -(2**30), "uint64": 2**60, "int64": -(2**60), "float32": 0.5, "float64": 0.1,
        "bool": True, "string": "grüße",
    }  # fmt: skip
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = dict(read_gguf_header(path).metadata)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {**values, "numbers": [1, 2, 3]}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"llama.rope.freq_base": 5e5}, RopeConfig(theta=5e5)),
        ({"llama.rope.freq_base": None}, RopeConfig(theta=10000.0)),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeConfig(kind="linear", factor=2.5),
        ),
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
    ],
)
def test_rope_metadata(tmp_path: Path, metadata: dict[str, object], expected: RopeConfig) -> None:
    write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    assert GgufFile(tmp_path / "tiny.gguf").config.rope == expected


def test_head_length_of_its_own(tmp_path: Path) -> None:
    config = {**GGUF_TINY, "head_dim": 12}
    metadata = {f"llama.attention.{part}_length": 12 for part in ("key", "value")}
    weights = write_gguf(tmp_path / "tiny.gguf", config=config, metadata=metadata)
    file = GgufFile(tmp_path / "tiny.gguf")
    assert file.config.head_dim == 12
    assert all(torch.equal(tensor, weights[name]) for name, tensor in file.pairs())


def test_the_config_is_exact(tiny_gguf: Path) -> None:
    assert GgufFile(tiny_gguf).config == parse_config(GGUF_TINY, {}, where="test")


def test_every_token_that_ends_a_turn_ends_generation(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    assert GgufFile(tmp_path / "tiny.gguf").config.eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"split.count": 3}, "is one of 3 parts; merge them"),
        ({"llama.block_count": None}, "llama: block_count is missing"),
        ({"llama.embedding_length": "x"}, "embedding_length is 'x'"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads is 3"),
        ({"llama.attention.head_count": 3}, "num_key_value_heads|head_dim|shape"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"llama.attention.value_length": 4}, "attention.value_length is 4"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.sliding_window": 128}, "attention.sliding_window = 128"),
        ({"llama.vocab_size": 5}, "shape .* its config asks for"),
        ({"llama.block_count": 1}, "holds, beyond its own sizes"),
        ({"llama.block_count": 3}, "lacks the tensor for 'model.layers.2"),
        ({"llama.block_count": 10**9}, "num_hidden_layers is 1000000000"),
        ({"llama.feed_forward_length": 32}, "has shape .* its config asks for"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(
    tmp_path: Path, metadata: dict[str, object], problem: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises((ConfigError, CheckpointError), match=problem):
        GgufFile(tmp_path / "tiny.gguf")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="qwen2")
    with pytest.raises(ConfigError, match="architecture 'qwen2'; torpor reads 'llama'"):
        GgufFile(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("rope_freqs.weight", np.ones(4, np.float32), "'rope_freqs.weight', which torpor's Llama"),
        ("blk.0.ffn_gate_inp.weight", np.ones((2, 32), np.float32), "ffn_gate_inp"),
        ("token_embd.weight", None, "no token_embd.weight"),
        ("blk.1.attn_q.weight", None, "lacks the tensor for 'model.layers.1.self_attn.q_proj"),
        ("blk.1.attn_q.weight", np.ones((16, 32), np.float32), r"has shape \(16, 32\)"),
        ("blk.0.attn_q.bias", np.ones(32, np.float32), "lacks the tensor for .*bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, array: np.ndarray[Any, Any] | None, problem: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors={name: array})
    with pytest.raises(CheckpointError, match=problem):
        GgufFile(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_counted_and_named(tmp_path: Path, bad: float) -> None:
    rows = np.ones((64, 32), np.float32)
    rows[3, 4:6] = bad
    write_gguf(tmp_path / "tiny.gguf", tensors={"blk.1.ffn_up.weight": rows})
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' holds 2 values"):
        list(GgufFile(tmp_path / "tiny.gguf").pairs())


def test_a_type_that_holds_no_weights_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tensors={"blk.0.attn_norm.weight": np.ones(32, np.int32)})
    file = GgufFile(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match="is of type I32, which cannot be dequantised"):
        file.tensor("model.layers.0.input_layernorm.weight")


def test_a_file_cut_after_opening_is_noticed(tiny_gguf: Path) -> None:
    file = GgufFile(tiny_gguf)
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:-4096])
    with pytest.raises(CheckpointError, match="ended within tensor"):
        list(file.pairs())
    tiny_gguf.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file"):
        list(file.pairs())


def test_a_missing_gguf_library_is_an_error_with_the_command(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'torpor\[gguf\]'"):
        GgufFile(tiny_gguf)


def test_tokens_and_embedding_rows_are_counted_by_name(tiny_gguf: Path) -> None:
    assert GgufFile(tiny_gguf).config.vocab_size == len(GGUF_TOKENS)
