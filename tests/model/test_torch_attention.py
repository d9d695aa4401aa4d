"""The PyTorch backend against the equation, over every way to cut rows into steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.attention_reference import World, attention_spec

from torpor.errors import ArgumentError
from torpor.model.attention import torch_attention
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.torch_attention import TorchAttention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LSE_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-3, torch.float16: 5e-6}


def check(world: World, chosen: list[tuple[int, int]]) -> None:
    """Run one step and compare it with the equation."""
    expected = world.expected(chosen)
    for (out, lse), (true_out, true_lse) in zip(world.step(chosen), expected, strict=True):
        assert out.dtype == world.dtype
        assert lse.dtype == torch.float32
        tolerance = TOLERANCE[world.dtype] * max(1.0, float(true_out.abs().max()))
        torch.testing.assert_close(out.double(), true_out, rtol=0, atol=tolerance)
        tolerance = LSE_TOLERANCE[world.dtype] * max(1.0, float(true_lse.abs().max()))
        torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=tolerance)


GEOMETRIES = (
    attention_spec(heads=9, kv_heads=3),
    attention_spec(heads=4, kv_heads=4, window=5),
    attention_spec(heads=4, kv_heads=1, k_dim=24, v_dim=16),
    attention_spec(heads=6, kv_heads=2, k_dim=16, v_dim=40, window=19),
    attention_spec(heads=2, kv_heads=2, window=1),
)


def numbered(indices: list[int]) -> list[torch_attention.AttentionSpec]:
    """Those geometries, as layers 0, 1, ..."""
    import dataclasses

    return [
        dataclasses.replace(GEOMETRIES[index], layer=layer) for layer, index in enumerate(indices)
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[list[tuple[int, int]]]]:
    """Rows, and steps that compute them all: chunks, decodes and mixtures."""
    geometries = draw(st.lists(st.integers(0, len(GEOMETRIES) - 1), min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    world = World(
        numbered(geometries),
        lengths,
        block_size=draw(st.sampled_from([1, 8, 16, 32])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 1000)),
        # Small ones force groups, pieces and single blocks.
        workspace_bytes=draw(st.sampled_from([1, 30_000, 1 << 20])),
        group_bytes=draw(st.sampled_from([1, 20_000, 1 << 20])),
        batch_invariant=draw(st.booleans()),
    )
    left = list(lengths)
    steps = []
    while any(left):
        step = []
        for row in range(len(left)):
            new = min(left[row], draw(st.sampled_from([0, 1, 1, 1, 2, 7, 30, 70])))
            if new:
                step.append((row, new))
                left[row] -= new
        if step:
            steps.append(draw(st.permutations(step)))
        elif not draw(st.booleans()):
            break
    return world, steps


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_every_step_equals_the_equation(case: tuple[World, list[list[tuple[int, int]]]]) -> None:
    world, steps = case
    for step in steps:
        check(world, step)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_decode_after_prefill(block_size: int, window: int | None) -> None:
    world = World([attention_spec(window=window)], [90, 33, 8], block_size=block_size)
    check(world, [(0, 87), (1, 30), (2, 5)])
    for _ in range(3):
        check(world, [(0, 1), (1, 1), (2, 1)])


def test_many_decode_rows_of_different_lengths() -> None:
    lengths = [2 + 11 * index % 150 for index in range(24)]
    world = World([attention_spec()], lengths, group_bytes=64 << 10)
    check(world, [(index, length - 1) for index, length in enumerate(lengths)])
    check(world, [(index, 1) for index in range(24)])


def test_a_window_longer_than_a_tile_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from torpor.model.attention import plan as attention_plan

    monkeypatch.setattr(attention_plan, "WINDOW_TILE", 16)
    world = World([attention_spec(window=20)], [100], workspace_bytes=1 << 14)
    check(world, [(0, 60)])
    check(world, [(0, 40)])


def test_a_row_reads_blocks_that_another_row_fills_in_the_same_step() -> None:
    world = World([attention_spec()], [40, 24])
    first, second = world.rows
    # The second row's first 16 tokens are the first row's, and so are their blocks.
    for mine, theirs in zip(
        (second.q, second.k, second.v), (first.q, first.k, first.v), strict=True
    ):
        mine[0][:16] = theirs[0][:16]
    second.blocks[:2] = first.blocks[:2]
    second.done = 16
    check(world, [(1, 8), (0, 40)])


def test_values_of_another_row_that_are_nan_do_not_spread() -> None:
    world = World([attention_spec()], [50, 20])
    world.rows[0].v[0][:] = torch.nan
    world.rows[0].k[0][:] = torch.nan
    world.step([(0, 49), (1, 19)])
    expected = world.expected([(1, 1)])[0][0]
    out = world.step([(0, 1), (1, 1)])[0][0]
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:].double(), expected, rtol=0, atol=1e-5)


def test_blocks_before_the_window_are_not_read() -> None:
    world = World([attention_spec(window=10)], [64])
    check(world, [(0, 40)])
    # As after the scheduler gave the head of the row back.
    world.rows[0].blocks[:3] = [0, 0, 0]
    check(world, [(0, 1)])
    check(world, [(0, 9)])


def test_strided_inputs_and_reshapeable_results() -> None:
    world = World([attention_spec(heads=4, kv_heads=2)], [12])
    row = world.rows[0]
    expected = world.expected([(0, 12)])[0][0]
    packed = torch.cat((row.q[0], row.k[0], row.v[0]), dim=1)
    world.begin([(0, 12)])
    out = world.backend.attend(world.specs[0], packed[:, :4], packed[:, 4:6], packed[:, 6:])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert out.reshape(12, -1).shape == (12, 64)


@pytest.mark.parametrize("hardware", [True, False])
def test_bfloat16_with_and_without_hardware_products(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "cpu_has_bfloat16_products", lambda: hardware)
    world = World([attention_spec(), attention_spec(1, v_dim=8)], [40, 21], dtype=torch.bfloat16)
    check(world, [(0, 39), (1, 20)])
    check(world, [(0, 1), (1, 1)])


def test_a_float32_model_over_a_bfloat16_cache() -> None:
    world = World([attention_spec()], [20], dtype=torch.bfloat16)
    row = world.rows[0]
    expected = world.expected([(0, 20)])[0][0]
    world.begin([(0, 20)])
    out = world.backend.attend(world.specs[0], row.q[0].float(), row.k[0].float(), row.v[0].float())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)


def test_scratch_is_bounded_and_allocated_once() -> None:
    world = World([attention_spec()], [300], workspace_bytes=1 << 16)
    check(world, [(0, 299)])
    check(world, [(0, 1)])
    assert sum(tensor.nbytes for tensor in world.scratch) == 1 << 16
    assert len(world.scratch) == 1


def test_capabilities_are_declared() -> None:
    world = World([attention_spec()], [1])
    capabilities = world.backend.capabilities
    assert not capabilities.reads_past_length
    assert not capabilities.batch_invariant
    assert capabilities.returns_lse
    assert capabilities.block_sizes is None


def test_an_arena_of_another_layout_is_refused() -> None:
    layout = KVLayout([attention_spec()], 8, torch.float32)
    kv = torch.zeros(4, layout.elements_per_block + 1)
    with pytest.raises(ArgumentError, match=str(layout.elements_per_block)):
        TorchAttention(kv, layout, allocate=lambda shape, dtype, name: torch.empty(shape))


def test_a_workspace_of_no_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match="workspace_bytes is 0"):
        World([attention_spec()], [1], workspace_bytes=0)
