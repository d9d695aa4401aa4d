"""Specs of layers, and what layers behind one table agree on."""

from __future__ import annotations

import pytest
from tests.cache.kit import spec

from torpor.cache.spec import KVGroup, KVSpec
from torpor.errors import ArgumentError


def test_a_page_holds_keys_and_values_of_different_sizes() -> None:
    layer = KVSpec(block_size=16, num_kv_heads=2, k_dim=192, v_dim=128, dtype="fp8", itemsize=1)
    assert layer.page_bytes == 16 * 2 * (192 + 128)
    assert KVGroup.of([layer, spec(block_size=16)]).page_bytes == 10240 + 16 * 2 * 14 * 4


@pytest.mark.parametrize(
    "name", ["block_size", "num_kv_heads", "k_dim", "v_dim", "itemsize", "window"]
)
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    sizes = {"block_size": 4, "num_kv_heads": 2, "k_dim": 8, "v_dim": 8, "itemsize": 4}
    with pytest.raises(ArgumentError, match=rf"^{name} is 0; it must be at least 1"):
        KVSpec(dtype="float32", **{**sizes, name: 0})


def test_a_group_needs_layers_with_one_block_size() -> None:
    with pytest.raises(ArgumentError, match="at least one layer"):
        KVGroup.of([])
    with pytest.raises(ArgumentError, match=r"block sizes \[4, 8\]"):
        KVGroup.of([spec(block_size=8), spec(block_size=4)])


@pytest.mark.parametrize(
    ("windows", "expected"), [([5, 9, 5], 9), ([5, None], None), ([None, None], None), ([1], 1)]
)
def test_the_widest_layer_decides_the_window(
    windows: list[int | None], expected: int | None
) -> None:
    assert KVGroup.of([spec(window=window) for window in windows]).window == expected


def test_blocks_are_rounded_up() -> None:
    group = KVGroup.of([spec()])
    assert [group.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 13])
def test_no_position_in_a_window_is_in_an_unseen_block(window: int) -> None:
    group = KVGroup.of([spec(window=window)])
    for computed in range(40):
        first = group.first_visible_block(computed)
        # The next query sees itself and window - 1 tokens before it.
        assert first == min(range(max(0, computed - window + 1), computed + 1)) // 4


def test_without_a_window_every_block_is_seen() -> None:
    group = KVGroup.of([spec()])
    assert group.first_visible_block(1000) == 0
    assert group.window_blocks is None
    assert group.peak_blocks(100, 8) == 25


@pytest.mark.parametrize(("window", "blocks"), [(1, 1), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_hit_ends_with_the_blocks_that_the_window_sees(window: int, blocks: int) -> None:
    assert KVGroup.of([spec(window=window)]).window_blocks == blocks


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("step", [1, 3, 4, 10])
def test_peak_blocks_are_what_a_request_comes_to_hold(window: int, step: int) -> None:
    group = KVGroup.of([spec(window=window)])
    held = [
        group.blocks_for(min(200, computed + step)) - group.first_visible_block(computed)
        for start in range(step)
        for computed in range(start, 200, step)
    ]
    assert max(held) <= group.peak_blocks(200, step) <= max(held) + 1
    assert group.peak_blocks(3, step) == 1
