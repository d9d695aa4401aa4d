"""What only the PyTorch backend has: a sized workspace, and products as torch is fast at them."""

from __future__ import annotations

import pytest
import torch
from tests.model.attention_reference import World, attention_spec, check

from torpor.errors import ArgumentError
from torpor.model.attention import plan as attention_plan
from torpor.model.attention import torch_attention


def test_a_window_longer_than_a_tile_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "WINDOW_TILE", 16)
    world = World([attention_spec(window=20)], [100], workspace_bytes=1 << 14)
    check(world, [(0, 60)])
    check(world, [(0, 40)])


@pytest.mark.parametrize("hardware", [True, False])
def test_bfloat16_with_and_without_hardware_products(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "cpu_has_bfloat16_products", lambda: hardware)
    world = World([attention_spec(), attention_spec(1, v_dim=8)], [40, 21], dtype=torch.bfloat16)
    check(world, [(0, 39), (1, 20)])
    check(world, [(0, 1), (1, 1)])


def test_scratch_is_bounded_and_allocated_once() -> None:
    world = World([attention_spec()], [300], workspace_bytes=1 << 16)
    check(world, [(0, 299)])
    check(world, [(0, 1)])
    assert sum(tensor.nbytes for tensor in world.scratch) == 1 << 16
    assert len(world.scratch) == 1


def test_a_workspace_of_no_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match="workspace_bytes is 0"):
        World([attention_spec()], [1], workspace_bytes=0)
