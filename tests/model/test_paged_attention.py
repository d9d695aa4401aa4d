"""Both backends against the equation, over every way to cut rows into steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.attention_reference import DTYPES, KINDS, World, attention_spec, check
from tests.model.native_kernels import native_library

from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionBatch, AttentionSpec
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.native.attention import NativeAttention

GEOMETRIES = (
    attention_spec(heads=9, kv_heads=3),
    attention_spec(heads=4, kv_heads=4, window=5),
    attention_spec(heads=4, kv_heads=1, k_dim=24, v_dim=16),
    attention_spec(heads=6, kv_heads=2, k_dim=16, v_dim=40, window=19),
    attention_spec(heads=2, kv_heads=2, window=1),
    attention_spec(heads=14, kv_heads=2, k_dim=10, v_dim=6),
    attention_spec(heads=17, kv_heads=1, k_dim=64, v_dim=64),
    attention_spec(heads=200, kv_heads=1, k_dim=8, v_dim=8),
)
"""Among them heads of no whole vector, and more queries to a KV head than a tile has."""

each_kind = pytest.mark.parametrize("kind", KINDS)


def numbered(indices: Sequence[int]) -> list[AttentionSpec]:
    """Those geometries, as layers 0, 1, ..."""
    return [
        dataclasses.replace(GEOMETRIES[index], layer=layer) for layer, index in enumerate(indices)
    ]


@st.composite
def worlds(draw: st.DrawFn, kind: str) -> tuple[World, list[list[tuple[int, int]]]]:
    """Rows, and steps that compute them all: chunks, decodes and mixtures."""
    torch.set_num_threads(draw(st.integers(1, 2)))
    geometries = draw(st.lists(st.integers(0, len(GEOMETRIES) - 1), min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    dtype, cache_dtype = (draw(st.sampled_from(DTYPES[kind])) for _ in range(2))
    world = World(
        numbered(geometries),
        lengths,
        kind=kind,
        block_size=draw(st.sampled_from([1, 7, 8, 16, 32])),
        dtype=dtype,
        cache_dtype=cache_dtype,
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


@each_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_step_equals_the_equation(kind: str, data: st.DataObject) -> None:
    world, steps = data.draw(worlds(kind))
    for step in steps:
        check(world, step)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("window", [None, 3, 40])
@each_kind
def test_decode_after_prefill(kind: str, block_size: int, window: int | None) -> None:
    specs = [attention_spec(window=window)]
    world = World(specs, [90, 33, 8], kind=kind, block_size=block_size)
    check(world, [(0, 87), (1, 30), (2, 5)])
    for _ in range(3):
        check(world, [(0, 1), (1, 1), (2, 1)])


@pytest.mark.parametrize("index", range(len(GEOMETRIES)))
@each_kind
def test_every_geometry_in_prompts_and_in_single_tokens(kind: str, index: int) -> None:
    world = World(numbered([index]), [75, 20], kind=kind)
    check(world, [(0, 66), (1, 2)])
    check(world, [(1, 17), (0, 1)])
    check(world, [(0, 8), (1, 1)])


@pytest.mark.parametrize("window", [None, 1, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_kind
def test_long_rows(kind: str, dtype: torch.dtype, window: int | None) -> None:
    spec = attention_spec(heads=3, kv_heads=1, window=window)
    world = World([spec], [700, 260], kind=kind, dtype=dtype, block_size=16)
    check(world, [(1, 127), (0, 449)])
    check(world, [(0, 1), (1, 64)])
    check(world, [(0, 185), (1, 1)])
    check(world, [(1, 65), (0, 64)])
    check(world, [(0, 1), (1, 1)])


@each_kind
def test_many_decode_rows_of_different_lengths(kind: str) -> None:
    lengths = [2 + 11 * index % 150 for index in range(24)]
    world = World([attention_spec()], lengths, kind=kind, group_bytes=64 << 10)
    check(world, [(index, length - 1) for index, length in enumerate(lengths)])
    check(world, [(index, 1) for index in range(24)])


@each_kind
def test_scores_that_rise_and_fall_by_hundreds(kind: str) -> None:
    world = World([attention_spec(k_dim=64, v_dim=64)], [200, 150], kind=kind)
    for row in world.rows:
        row.q[0] *= 60
    for step in ([(0, 199), (1, 10)], [(0, 1), (1, 140)]):
        expected = world.expected(step)[0]
        out, lse = world.step(step)[0]
        # A sum of 64 products that reaches 200 is off by some 200 * 2**-24 * 4; a weight too.
        torch.testing.assert_close(out.double(), expected[0], rtol=0, atol=4e-4)
        torch.testing.assert_close(lse.double(), expected[1], rtol=0, atol=1e-4)


@each_kind
def test_a_row_reads_blocks_that_another_row_fills_in_the_same_step(kind: str) -> None:
    world = World([attention_spec()], [40, 24], kind=kind)
    first, second = world.rows
    # The second row's first 16 tokens are the first row's, and so are their blocks.
    for mine, theirs in zip(
        (second.q, second.k, second.v), (first.q, first.k, first.v), strict=True
    ):
        mine[0][:16] = theirs[0][:16]
    second.blocks[:2] = first.blocks[:2]
    second.done = 16
    check(world, [(1, 8), (0, 40)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@each_kind
def test_another_row_that_is_not_finite_does_not_spread(kind: str, bad: float) -> None:
    world = World([attention_spec()], [50, 20], kind=kind)
    world.rows[0].v[0][:] = bad
    world.rows[0].k[0][:] = bad
    world.step([(0, 47), (1, 17)])
    for new in (2, 1):
        expected = world.expected([(1, new)])[0][0]
        out = world.step([(0, new), (1, new)])[0][0]
        assert not out[:new].isfinite().any()
        torch.testing.assert_close(out[new:].double(), expected, rtol=0, atol=1e-5)


@each_kind
def test_blocks_before_the_window_are_not_read(kind: str) -> None:
    world = World([attention_spec(window=10)], [64], kind=kind)
    check(world, [(0, 40)])
    # As after the scheduler gave the head of the row back.
    world.rows[0].blocks[:3] = [0, 0, 0]
    check(world, [(0, 1)])
    check(world, [(0, 9)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_kind
def test_strided_inputs_and_reshapeable_results(kind: str, dtype: torch.dtype) -> None:
    world = World([attention_spec(heads=4, kv_heads=2)], [12], kind=kind, dtype=dtype)
    row = world.rows[0]
    expected = world.expected([(0, 12)])[0][0]
    fused = torch.cat((row.q[0], row.k[0], row.v[0]), dim=1)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (row.q[0], row.k[0], row.v[0])]
    across = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (row.q[0], row.k[0], row.v[0])
    ]
    for q, k, v in ((fused[:, :4], fused[:, 4:6], fused[:, 6:]), apart, across):
        assert not q.is_contiguous()
        world.begin([(0, 12)])
        out = world.backend.attend(world.specs[0], q, k, v)
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=limit)
        assert out.reshape(12, -1).shape == (12, 64)


@each_kind
def test_tables_and_slots_may_be_strided(kind: str) -> None:
    world = World([attention_spec()], [30, 20], kind=kind)
    begin, chosen = world.backend.begin, [(0, 30), (1, 20)]

    def begin_strided(batch: AttentionBatch) -> None:
        tables, slots = batch.block_tables_RB, batch.slots_T
        wide = torch.zeros(len(tables), tables.shape[1] + 3, dtype=torch.int64)
        wide[:, : tables.shape[1]] = tables
        twice = torch.stack((slots, torch.zeros_like(slots)), dim=1)
        begin(
            dataclasses.replace(
                batch, block_tables_RB=wide[:, : tables.shape[1]], slots_T=twice[:, 0]
            )
        )

    world.backend.begin = begin_strided  # type: ignore[method-assign]
    check(world, chosen)


@pytest.mark.parametrize("dtypes", [(0, 1), (1, 0)], ids=["bfloat16 cache", "float32 cache"])
@each_kind
def test_a_cache_of_another_dtype_than_the_model(kind: str, dtypes: tuple[int, int]) -> None:
    dtype, cache_dtype = (DTYPES[kind][index] for index in dtypes)
    specs = [attention_spec(), attention_spec(1, k_dim=24, v_dim=10)]
    world = World(specs, [90, 30], kind=kind, dtype=dtype, cache_dtype=cache_dtype)
    check(world, [(0, 80), (1, 3)])
    check(world, [(1, 26), (0, 1)])
    check(world, [(0, 9), (1, 1)])


@each_kind
def test_results_without_log_sum_exps_are_the_same(kind: str) -> None:
    for chosen in ([(0, 33), (1, 1)], [(0, 1), (1, 1)]):
        worlds = [World([attention_spec()], [40, 9], kind=kind) for _ in range(2)]
        results = []
        for world in worlds:
            world.step([(0, 5), (1, 3)])
            if world is worlds[0]:
                results.append(world.step(chosen)[0][0])
            else:
                world.begin(chosen)
                results.append(world.backend.attend(world.specs[0], *world.tokens(0, chosen)))
        assert torch.equal(*results)


@each_kind
def test_capabilities_are_declared(kind: str) -> None:
    capabilities = World([attention_spec()], [1], kind=kind).backend.capabilities
    assert capabilities.name == kind
    assert not capabilities.reads_past_length
    assert capabilities.batch_invariant is (kind == "native")
    assert capabilities.returns_lse
    assert capabilities.k_v_dims_differ
    assert capabilities.windows
    assert capabilities.block_sizes is None


@each_kind
def test_an_arena_of_another_layout_is_refused(kind: str) -> None:
    layout = KVLayout([attention_spec()], 8, torch.float32)
    kv = torch.zeros(4, layout.elements_per_block + 1)

    def allocate(shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    make = TorchAttention
    if kind == "native":
        make = functools.partial(NativeAttention, library=native_library())
    with pytest.raises(ArgumentError, match=str(layout.elements_per_block)):
        make(kv, layout, allocate=allocate)
