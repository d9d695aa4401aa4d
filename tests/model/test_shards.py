"""The ranks of a model hold all of it between them, and compute what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.helpers import QWEN2, QWEN3, QWEN3_MOE, TINY, write_folder
from tests.model.ranks import Loaded, loaded, loaded_both

from torpor.errors import CheckpointError, ConfigError
from torpor.model.checkpoints.dummy import DummySource
from torpor.model.checkpoints.load import checkpoint_shapes, new_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.checkpoints.safetensors_source import SafetensorsSource, tensor_digest
from torpor.model.config.config import parse_config
from torpor.sleep.shards import TensorParallel

UNTIED = {"tie_word_embeddings": False}
UNEVEN: Mapping[str, Any] = {"vocab_size": 93}
"""Of which the last of 4 ranks has three rows of padding."""
KINDS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "llama, uneven": {**UNEVEN, **UNTIED},
    "llama, all biases": {"attention_bias": True, "mlp_bias": True, **UNTIED},
    "llama, one KV head": {"num_key_value_heads": 1},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "sliding_window": 5,
    },
    "qwen2": {**QWEN2, **UNEVEN},
    "qwen3": {**QWEN3, **UNTIED, "head_dim": 24, "num_key_value_heads": 4},
    "qwen3, biases": {**QWEN3, "head_dim": 8, "attention_bias": True},
    "qwen3 moe": {**QWEN3_MOE, "head_dim": 16},
    "qwen3 moe, every other layer": {**QWEN3_MOE, "decoder_sparse_step": 2, **UNEVEN},
}
IDS = torch.randint(0, 93, (14,), generator=torch.Generator().manual_seed(3)).tolist()

PLACED = [(kind, size) for kind in KINDS for size in (2, 4)]


@pytest.fixture(scope="module", params=PLACED, ids="{0[0]}, {0[1]} ranks".format)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    kind, size = request.param
    folder = write_folder(tmp_path_factory.mktemp("ranks"), **KINDS[kind])
    with loaded_both(resolve_model(folder), folder, size) as made:
        yield made


def test_the_parts_of_all_ranks_are_the_whole(model: Loaded) -> None:
    model.check_parts()


def test_ranks_compute_together_what_the_whole_computes(model: Loaded) -> None:
    model.check_results(IDS)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "num_attention_heads is 4, which tensor_parallel_size 3 does not divide"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8},
            6,
            "num_key_value_heads is 4, which tensor_parallel_size 6 neither divides nor",
        ),
        ({"intermediate_size": 63}, 2, "intermediate_size is 63, which tensor_parallel_size 2"),
        (
            {**QWEN3_MOE, "moe_intermediate_size": 25},
            2,
            "moe_intermediate_size is 25, which tensor_parallel_size 2 does not divide",
        ),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_refused_by_name(
    changes: dict[str, Any], size: int, message: str
) -> None:
    config = parse_config({**TINY, **changes}, {}, where="test")
    with pytest.raises(ConfigError, match=message):
        new_model(config, torch.float32, TensorParallel(0, size))


def test_a_width_that_no_layer_has_is_not_looked_at() -> None:
    config = parse_config({**TINY, **QWEN3_MOE, "intermediate_size": 63}, {}, where="test")
    new_model(config, torch.float32, TensorParallel(0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_knows_the_shapes_of_whole_tensors(kind: str) -> None:
    config = parse_config({**TINY, **KINDS[kind]}, {}, where="test")
    whole = checkpoint_shapes(new_model(config, torch.float32))
    for rank in range(4):
        model = new_model(config, torch.float32, TensorParallel(rank, 4))
        own = checkpoint_shapes(model)
        lacking = whole.keys() - own.keys()
        assert own == {name: shape for name, shape in whole.items() if name not in lacking}
        assert all(name.endswith((".o_proj.bias", ".down_proj.bias")) for name in lacking)
        assert not lacking or rank
        assert dict(DummySource(model).pairs()).keys() == own.keys()
        assert model.config == config


def test_recorded_digests_are_of_whole_tensors_and_a_rank_checks_them(tmp_path: Path) -> None:
    files = resolve_model(write_folder(tmp_path))
    digests = {name: tensor_digest(tensor) for name, tensor in files.source.pairs()}
    name = "model.layers.1.mlp.up_proj.weight"
    extent = files.source.extent(name)
    assert extent is not None
    with extent.path.open("r+b") as file:
        file.seek(extent.offset)
        (byte,) = file.read(1)
        file.seek(extent.offset)
        file.write(bytes([byte ^ 1]))
    # Damaged in the rows of rank 0, and no rank takes any of it.
    object.__setattr__(files, "source", SafetensorsSource(tmp_path, digests=digests))
    for rank in range(2):
        with (
            pytest.raises(CheckpointError, match=f"'{name}' have digest|{name!r} has digest"),
            loaded(files, tmp_path, TensorParallel(rank, 2)),
        ):
            pass
