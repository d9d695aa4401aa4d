"""How many blocks the KV cache has, and its one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torpor.engine.args import EngineArgs
from torpor.engine.steps.kv_cache import KVCacheMemory, allocate_kv_cache, resolve_num_blocks
from torpor.engine.steps.sinks import Sinks
from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionSpec
from torpor.sleep.sleeper import Sleeper

GIB = 1 << 30

LAYERS = [
    AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, k_dim=8, v_dim=6, scale=1.0),
    AttentionSpec(layer=1, num_heads=4, num_kv_heads=4, k_dim=4, v_dim=4, scale=1.0, window=9),
]
ELEMENTS = 4 * (2 * 14 + 4 * 8)
"""Of a block of 4 positions, over both layers."""


def args(**options: Any) -> EngineArgs:
    return EngineArgs(model="m", **{"block_size": 4, "max_num_seqs": 3, **options})


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with Sleeper(nn.Linear(2, 2)) as made:
        yield made


def allocate(sleeper: Sleeper, dtype: torch.dtype = torch.float32) -> KVCacheMemory:
    chosen = args(num_gpu_blocks_override=9)
    return allocate_kv_cache(
        sleeper, chosen, LAYERS, max_model_len=30, dtype=dtype, sinks=Sinks((), chosen)
    )


# -- sizes --------------------------------------------------------------------------------------


def test_every_sequence_gets_room_for_its_full_length_and_one_block_is_null() -> None:
    assert resolve_num_blocks(args(), 1000, 30) == 3 * 8 + 1
    assert resolve_num_blocks(args(max_num_seqs=1), 1000, 32) == 8 + 1
    assert resolve_num_blocks(args(max_num_seqs=1), 1000, 33) == 9 + 1


def test_the_cache_takes_at_most_a_gibibyte_unless_asked_otherwise() -> None:
    assert resolve_num_blocks(args(max_num_seqs=10_000), GIB // 100, 30) == 100
    assert resolve_num_blocks(args(kv_cache_memory_bytes=2 * GIB), GIB // 100, 30) == 200


def test_one_sequence_of_full_length_always_fits() -> None:
    assert resolve_num_blocks(args(), GIB, 30) == 8 + 1


def test_a_size_in_bytes_is_rounded_down_to_blocks() -> None:
    assert resolve_num_blocks(args(kv_cache_memory_bytes=9_999), 1000, 32) == 9
    assert resolve_num_blocks(args(kv_cache_memory_bytes=9_000), 1000, 32) == 9


def test_a_number_of_blocks_wins_over_a_size_in_bytes() -> None:
    found = args(num_gpu_blocks_override=12, kv_cache_memory_bytes=1)
    assert resolve_num_blocks(found, 1000, 32) == 12


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"num_gpu_blocks_override": 8},
            "num_gpu_blocks_override is 8, which does not hold one sequence of max_model_len 32; "
            "give at least 9, or lower max_model_len",
        ),
        (
            {"kv_cache_memory_bytes": 8_999},
            "kv_cache_memory_bytes is 8999, which does not hold one sequence of max_model_len 32; "
            "give at least 9000, or lower max_model_len",
        ),
    ],
)
def test_a_cache_too_small_for_one_sequence_is_refused(options: dict[str, int], told: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        resolve_num_blocks(args(**options), 1000, 32)
    assert str(caught.value) == told


def test_what_the_message_asks_for_is_enough() -> None:
    assert resolve_num_blocks(args(num_gpu_blocks_override=9), 1000, 32) == 9
    assert resolve_num_blocks(args(kv_cache_memory_bytes=9000), 1000, 32) == 9


# -- the memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_one_tensor_of_whole_blocks(sleeper: Sleeper, dtype: torch.dtype) -> None:
    memory = allocate(sleeper, dtype)
    assert memory.kv.shape == (9, ELEMENTS)
    assert memory.kv.dtype == dtype
    assert memory.num_blocks == 9
    assert not memory.kv.any()


def test_each_layer_is_described_for_the_books_as_it_is_laid_out(sleeper: Sleeper) -> None:
    memory = allocate(sleeper, torch.bfloat16)
    first, second = memory.specs
    assert (first.num_kv_heads, first.k_dim, first.v_dim, first.window) == (2, 8, 6, None)
    assert (second.num_kv_heads, second.k_dim, second.v_dim, second.window) == (4, 4, 4, 9)
    assert {(spec.dtype, spec.itemsize, spec.block_size) for spec in memory.specs} == {
        ("bfloat16", 2, 4)
    }
    assert sum(spec.page_bytes for spec in memory.specs) == memory.layout.block_bytes
    assert memory.layout.block_bytes == 2 * ELEMENTS


def test_sleep_releases_the_cache_and_wake_brings_the_same_tensor_back(sleeper: Sleeper) -> None:
    memory = allocate(sleeper)
    (row,) = [row for row in sleeper.table() if row.name == "kv_cache"]
    assert (row.cls, row.tag, row.nbytes) == ("cache", "kv_cache", 9 * ELEMENTS * 4)
    address = memory.kv.data_ptr()
    report = sleeper.sleep(level=1, tags=["kv_cache"])
    assert report.released_bytes["cache"] >= row.nbytes
    sleeper.wake_up()
    assert memory.kv.data_ptr() == address
    memory.clear([3])
    assert not memory.kv[3].any()


def test_clearing_and_poisoning_touch_the_blocks_named_and_no_other(sleeper: Sleeper) -> None:
    memory = allocate(sleeper)
    memory.kv.fill_(1.0)
    memory.poison([2, 5])
    memory.clear([5, 7])
    expected = [1.0] * 9
    expected[5] = expected[7] = 0.0
    for block, value in enumerate(expected):
        if block == 2:
            assert memory.kv[block].isnan().all()
        else:
            assert (memory.kv[block] == value).all()


def test_a_refused_size_takes_no_memory(sleeper: Sleeper) -> None:
    before = [row.name for row in sleeper.table()]
    with pytest.raises(ArgumentError, match="num_gpu_blocks_override is 5"):
        allocate_kv_cache(
            sleeper,
            args(num_gpu_blocks_override=5),
            LAYERS,
            max_model_len=30,
            dtype=torch.float32,
            sinks=Sinks((), args()),
        )
    assert [row.name for row in sleeper.table()] == before
