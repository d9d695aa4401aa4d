"""Where keys and values lie in a block."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.model.attention_reference import attention_spec

from torpor.errors import ArgumentError
from torpor.model.attention.kv_layout import KVLayout, Rows

SPECS = (
    attention_spec(0, heads=9, kv_heads=3, k_dim=8, v_dim=8),
    attention_spec(1, heads=4, kv_heads=2, k_dim=12, v_dim=8, window=4),
    attention_spec(5, heads=2, kv_heads=2, k_dim=4, v_dim=16),
)


@pytest.fixture
def layout() -> KVLayout:
    return KVLayout(SPECS, 4, torch.float32)


@pytest.fixture
def kv(layout: KVLayout) -> torch.Tensor:
    count = 6 * layout.elements_per_block
    return torch.arange(count, dtype=torch.float32).view(6, -1)


def test_a_block_holds_keys_and_values_of_all_layers(layout: KVLayout) -> None:
    assert layout.elements_per_block == 4 * (3 * 16 + 2 * 20 + 2 * 20)
    assert layout.block_bytes == 4 * layout.elements_per_block
    assert KVLayout(SPECS, 4, torch.bfloat16).block_bytes == 2 * layout.elements_per_block


def test_views_have_the_declared_shapes(layout: KVLayout, kv: torch.Tensor) -> None:
    for spec in SPECS:
        assert layout.keys(kv, spec.layer).shape == (6, 4, spec.num_kv_heads, spec.k_dim)
        assert layout.values(kv, spec.layer).shape == (6, 4, spec.num_kv_heads, spec.v_dim)


def test_views_cover_the_arena_once(layout: KVLayout, kv: torch.Tensor) -> None:
    views = [view(kv, s.layer) for s in SPECS for view in (layout.keys, layout.values)]
    seen = torch.cat([view.reshape(-1) for view in views])
    assert torch.equal(seen.sort().values, kv.view(-1))


def test_views_of_a_block_stay_in_the_block_keys_before_values(
    layout: KVLayout, kv: torch.Tensor
) -> None:
    before = -1.0
    for spec in SPECS:
        for view in (layout.keys(kv, spec.layer), layout.values(kv, spec.layer)):
            block = view[2]
            assert float(block.min()) > before
            before = float(block.max())
            assert torch.isin(block, kv[2]).all()


def test_views_write_through(layout: KVLayout, kv: torch.Tensor) -> None:
    layout.keys(kv, 5)[3, 1] = -1.0
    assert int((kv == -1.0).sum()) == 2 * 4
    assert bool((kv[3] == -1.0).any())


def test_an_arena_that_starts_inside_its_storage(layout: KVLayout) -> None:
    storage = torch.zeros(7 + 2 * layout.elements_per_block)
    kv = storage[7:].view(2, -1)
    layout.values(kv, 0)[0] = 1.0
    rows = layout.value_strips(kv, 0)
    assert bool((rows.matrix[0] == 1.0).all())
    assert not bool(storage[:7].any())


def row(rows: Rows, block: int, head: int, piece: int) -> torch.Tensor:
    """One row by the rule of its docstring."""
    number = block * rows.per_block + head * rows.per_head + piece * rows.per_piece
    return rows.matrix[number]


@pytest.mark.parametrize("layer", [0, 1, 5])
def test_rows_reach_what_views_reach(layout: KVLayout, kv: torch.Tensor, layer: int) -> None:
    spec = layout.specs[layer]
    cases = (
        (layout.keys(kv, layer), layout.key_tokens(kv, layer)),
        (layout.values(kv, layer), layout.value_tokens(kv, layer)),
    )
    strips = (
        layout.key_strips(kv, layer, heads=spec.num_kv_heads),
        layout.value_strips(kv, layer),
    )
    for (view, tokens), strip in zip(cases, strips, strict=True):
        for block in range(6):
            for head in range(spec.num_kv_heads):
                assert torch.equal(row(strip, block, head, 0), view[block, :, head].reshape(-1))
                for offset in range(4):
                    assert torch.equal(row(tokens, block, head, offset), view[block, offset, head])


def test_key_strips_go_on_into_the_values(layout: KVLayout, kv: torch.Tensor) -> None:
    strips = layout.key_strips(kv, 0, heads=6)
    values = layout.values(kv, 0)
    assert torch.equal(row(strips, 4, 3 + 1, 0), values[4, :, 1].reshape(-1))


def test_equal_layers_have_rows_that_do_not_overlap() -> None:
    specs = [attention_spec(layer, kv_heads=2, k_dim=8, v_dim=8) for layer in range(3)]
    layout = KVLayout(specs, 4, torch.float32)
    kv = torch.zeros(5, layout.elements_per_block)
    assert not layout.key_tokens(kv, 1).overlap
    assert layout.key_strips(kv, 1, heads=4).matrix.is_contiguous()


@pytest.mark.parametrize(
    ("specs", "block_size", "words"),
    [
        ([], 4, "no attention layers"),
        (SPECS[:1], 0, "block_size is 0"),
        ([SPECS[0], SPECS[0]], 4, "layer 0 is given twice"),
        ([dataclasses.replace(SPECS[0], num_heads=7)], 4, "7 heads over 3"),
        ([dataclasses.replace(SPECS[0], v_dim=0)], 4, "8 and 0"),
        ([dataclasses.replace(SPECS[0], window=0)], 4, "window 0"),
    ],
)
def test_impossible_layouts_are_refused(specs: list, block_size: int, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ArgumentError, match=words):
        KVLayout(specs, block_size, torch.float32)


@pytest.mark.parametrize("shape", [(3, 10), (512,)])
def test_an_arena_of_another_shape_is_refused(layout: KVLayout, shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"num_blocks, 512"):
        layout.check_arena(torch.zeros(shape))


def test_an_arena_of_another_dtype_is_refused(layout: KVLayout) -> None:
    with pytest.raises(ArgumentError, match="bfloat16"):
        layout.check_arena(torch.zeros(2, 512, dtype=torch.bfloat16))
