"""A cache in eight bits: what is stored, what is read, and attention over it."""

from __future__ import annotations

import pytest
import torch
from tests.model.attention_reference import World, attention_spec, check, eight_bits
from tests.model.helpers import OneSequence

from torpor.errors import ArgumentError
from torpor.model.attention.calibration import SampleAttention
from torpor.model.attention.interface import AttentionSpec
from torpor.model.attention.kv_fp8 import (
    FP8,
    FP8_NAN_BYTE,
    KVScales,
    as_bytes,
    from_cache,
    to_cache,
)
from torpor.model.attention.kv_layout import KVLayout

SPECS = {
    "grouped": attention_spec(),
    "wide keys": attention_spec(v_dim=8),
    "wide values": attention_spec(v_dim=24),
    "windows": attention_spec(window=9),
    "latent": attention_spec(heads=4, kv_heads=1, k_dim=40, v_dim=32),
}


@pytest.mark.parametrize("scale", [1.0, 0.0137])
def test_whatever_is_stored_is_stored_again_as_it_was(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    factor = torch.tensor([scale])
    values = from_cache(codes.view(FP8), torch.float32, factor)
    again = as_bytes(to_cache(values, FP8, factor))
    numbers = ~values.isnan()
    assert int(numbers.sum()) == 254
    assert torch.equal(again[numbers], codes[numbers])
    assert to_cache(values, FP8, factor)[~numbers].float().isnan().all()
    assert int(values[FP8_NAN_BYTE].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_and_saturate(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    exponents = torch.randint(-14, 14, (4000,), generator=random)
    x = torch.ldexp(torch.randn(4000, generator=random), exponents).to(dtype)
    stored = to_cache(x, FP8, torch.tensor([0.5])).double()
    assert torch.equal(stored, eight_bits(x.double() / 0.5))
    assert stored.abs().max() == 448
    assert torch.equal(stored[x.double() > 224], torch.full_like(stored[x.double() > 224], 448))


def test_what_is_not_a_number_stays_none_and_no_number_becomes_one() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0, 1e-38])
    stored = to_cache(x, FP8, torch.tensor([1e-30])).float()
    assert stored.isnan().tolist() == [True, True, True, False, False, False, False]
    assert stored[3:6].tolist() == [448, -448, 0]


def test_without_a_scale_only_the_dtype_counts() -> None:
    x = torch.randn(5)
    assert to_cache(x, torch.float32, None) is x
    assert torch.equal(to_cache(x, torch.bfloat16, None), x.bfloat16())
    assert torch.equal(from_cache(x.bfloat16(), torch.float32, None), x.bfloat16().float())


@pytest.mark.parametrize("form", ["usual", "invariant", "little room"])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_is_that_over_rounded_keys_and_values(spec: str, form: str) -> None:
    world = World(
        [SPECS[spec], attention_spec(1)],
        [70, 33, 1],
        cache_dtype=FP8,
        batch_invariant=form == "invariant",
        workspace_bytes=1 << 12 if form == "little room" else 32 << 20,
    )
    check(world, [(0, 40), (1, 31)])
    check(world, [(0, 29), (1, 1), (2, 1)])
    check(world, [(0, 1), (1, 1)])


def test_bfloat16_layers_over_eight_bits() -> None:
    world = World([attention_spec(), attention_spec(1, v_dim=8)], [40, 21], cache_dtype=FP8)
    narrow = World(
        [attention_spec(), attention_spec(1, v_dim=8)],
        [40, 21],
        dtype=torch.bfloat16,
        cache_dtype=FP8,
    )
    for step in ([(0, 39), (1, 20)], [(0, 1), (1, 1)]):
        for (wide, _), (out, _) in zip(world.step(step), narrow.step(step), strict=True):
            assert out.dtype == torch.bfloat16
            assert (out.float() - wide).abs().max() < 0.25
    check(World([attention_spec()], [30], dtype=torch.bfloat16, cache_dtype=FP8), [(0, 30)])


def test_a_key_that_is_nan_spoils_its_own_row_alone() -> None:
    world = World([attention_spec()], [20, 20], cache_dtype=FP8)
    world.rows[0].k[0][3, 0, 5] = torch.nan
    world.rows[0].v[0][4, 1, 2] = torch.inf
    world.step([(0, 10), (1, 10)])
    ((out, _),) = world.step([(0, 1), (1, 1)])
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


def test_a_layout_has_scales_exactly_for_eight_bits() -> None:
    spec = attention_spec()
    scales = {0: KVScales(torch.ones(1), torch.ones(1))}
    layout = KVLayout([spec], 8, FP8, scales)
    assert layout.block_bytes * 4 == KVLayout([spec], 8, torch.float32).block_bytes
    with pytest.raises(
        ArgumentError, match=r"given for 0 layers, .*float8_e4m3fn needs them for 1"
    ):
        KVLayout([spec], 8, FP8)
    with pytest.raises(ArgumentError, match=r"given for 1 layers, .*float32 needs them for 0"):
        KVLayout([spec], 8, torch.float32, scales)


@pytest.mark.parametrize("spec", SPECS)
def test_a_sample_is_attended_as_ever_and_its_largest_noted(spec: str) -> None:
    layer = SPECS[spec]
    random = torch.Generator().manual_seed(4)

    def draw(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(25, heads, dim, generator=random)

    def fresh(layer: AttentionSpec) -> list[torch.Tensor]:
        return [
            draw(layer.num_heads, layer.k_dim),
            draw(layer.num_kv_heads, layer.k_dim),
            draw(layer.num_kv_heads, layer.v_dim),
        ]

    attention, parts = SampleAttention(), fresh(layer)
    out, lse = attention.attend_with_lse(layer, *parts)
    want, want_lse = OneSequence().attend_with_lse(layer, *parts)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-6)
    more = fresh(layer)
    attention.attend(layer, *more)
    key, value = attention.largest[0]
    assert float(key) == max(float(each[1].abs().max()) for each in (parts, more))
    assert float(value) == max(float(each[2].abs().max()) for each in (parts, more))


def test_a_sample_that_is_not_finite_is_noted_too() -> None:
    attention = SampleAttention()
    attention.note(0, torch.tensor([torch.nan, 1.0]), torch.ones(2))
    attention.note(0, torch.tensor([5.0]), torch.full((2,), 3.0))
    key, value = attention.largest[0]
    assert key.isnan()
    assert float(value) == 3
