"""Merged and reserved sinks are the same attention, and the equation's, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.model.attention_reference import KINDS, World, attention_spec
from tests.openpangu.test_sinks import attended, normal

from torpor.model.attention.interface import AttentionBatch
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.reserved_sinks import ReservedSinkAttention
from torpor.model.layers.sinks import StaticSinkAttention

LENGTHS = (70, 1, 33, 16)
"""Tables of one length for rows of such different ones end in padding."""
STEPS = [[(0, 40), (2, 33), (3, 7)], [(0, 29), (1, 1), (3, 8)], [(3, 1), (0, 1)]]


def worlds(
    kind: str,
    sinks: int,
    block_size: int,
    window: int | None,
    *,
    zero_values: bool,
    batch_invariant: bool = False,
) -> tuple[World, World, StaticSinkAttention]:
    """The same rows twice, the second over an arena with sinks in blocks of its own."""
    spec = attention_spec(heads=6, kv_heads=2, k_dim=24, v_dim=16, window=window)
    shape = {"kind": kind, "block_size": block_size, "batch_invariant": batch_invariant}
    one, other = (World([spec], LENGTHS, **shape) for _ in range(2))  # type: ignore[arg-type]
    layer = StaticSinkAttention(spec, sinks, dtype=torch.float32)
    values = normal(sinks, 2, 16, seed=5)
    layer.update_sink_kv(normal(sinks, 2, 24, seed=4), values.zero_() if zero_values else values)
    first, count = len(other.kv), sinks // block_size
    other.layout = KVLayout([spec], block_size, torch.float32)
    other.kv = torch.cat((other.kv, torch.full((count, other.kv.shape[1]), torch.nan)))
    around = ReservedSinkAttention(
        other.kv,
        other.layout,
        range(first, first + count),
        make_backend=lambda _: other.new_backend(),
        allocate=lambda shape, dtype, _: torch.full(shape, -1, dtype=dtype),
        max_num_seqs=len(LENGTHS),
        max_blocks=16,
    )
    around.write([layer])
    other.backend = around  # type: ignore[assignment]
    other.spoil = lambda: None  # type: ignore[method-assign]
    return one, other, layer


@pytest.mark.parametrize("zero_values", [False, True])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("sinks", "block_size"), [(128, 16), (128, 32), (16, 16), (24, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_both_placements_are_the_equation(
    kind: str, sinks: int, block_size: int, window: int | None, zero_values: bool
) -> None:
    merged, reserved, layer = worlds(kind, sinks, block_size, window, zero_values=zero_values)
    spec = layer.spec
    want = [
        attended(spec, row.q[0], (layer.sink_key, row.k[0]), (layer.sink_value, row.v[0]), window)
        for row in merged.rows
    ]
    before = reserved.kv[-(sinks // block_size) :].clone()
    for chosen in STEPS:
        results = []
        for world in (merged, reserved):
            world.begin(chosen)
            q, k, v = world.tokens(0, chosen)
            results.append(layer(q, k, v, world.backend))
        rows = [(index, merged.rows[index].done, new) for index, new in chosen]
        expected = torch.cat([want[index][start : start + new] for index, start, new in rows])
        for result in results:
            assert (result - expected).abs().max() <= 1e-5
        assert (results[0] - results[1]).abs().max() <= 1e-5
        for world in (merged, reserved):
            for index, new in chosen:
                world.rows[index].done += new
    assert torch.equal(reserved.kv[-(sinks // block_size) :], before)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_rows_change_nothing_and_keep_length_0(
    kind: str, batch_invariant: bool, window: int | None
) -> None:
    same = {"zero_values": False, "batch_invariant": batch_invariant}
    results = []
    for padding in (False, True):
        *both, layer = worlds(kind, 16, 16, window, **same)
        for world in both:
            begun: list[AttentionBatch] = []
            if isinstance(world.backend, ReservedSinkAttention):
                inner = world.backend._behind_sinks
                begin = inner.begin
                inner.begin = lambda batch, begin=begin, begun=begun: (
                    begun.append(batch) or begin(batch)
                )  # type: ignore[method-assign, misc]
            for chosen in ([(0, 40), (2, 33)], [(0, 29), (2, 0)], [(0, 1)]):
                rows = [(1, 0), *chosen, (3, 0)] if padding else chosen
                world.begin([row for row in rows if row[1] or padding])
                q, k, v = world.tokens(0, chosen)
                results.append(layer(q, k, v, world.backend))
                for index, new in chosen:
                    world.rows[index].done += new
            for batch in begun:
                lengths = zip(batch.query_lens, batch.context_lens, strict=True)
                assert all((new > 0) == (length > 0) for new, length in lengths)
    for plain, padded in zip(results[:6], results[6:], strict=True):
        assert torch.equal(plain, padded)


def test_the_steps_own_lengths_and_tables_know_of_no_sinks() -> None:
    _, reserved, _ = worlds("torch", 16, 16, None, zero_values=False)
    given = []
    begin = reserved.backend.begin
    reserved.backend.begin = lambda batch: given.append((batch, replace(batch))) or begin(batch)  # type: ignore[method-assign, func-returns-value]
    reserved.begin(STEPS[0])
    ((batch, copy),) = given
    assert batch.context_lens == copy.context_lens == (0, 0, 0)
    assert batch.block_tables_RB is copy.block_tables_RB
    assert int(batch.block_tables_RB.max()) < len(reserved.kv) - 1
    assert not batch.block_tables_RB[1, 3:].any()
