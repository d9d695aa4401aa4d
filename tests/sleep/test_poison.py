"""Patterns that make unrestored memory loud, in every dtype."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.sleep.samples import DTYPES, bits

from torpor.errors import ArgumentError
from torpor.sleep.poison import PATTERNS, Poison, poison_from

NO_NAN = {torch.float4_e2m1fn_x2}
"""Floats without any NaN; their largest values have to do."""
NAN_IN_BOTH = {
    *(torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32),
}


def filled(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    byte = Poison(pattern).byte_for(dtype)
    return torch.full((2 * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [t for t in DTYPES if (t.is_floating_point or t.is_complex) and t not in NO_NAN]
)
def test_floats_become_nan_or_huge(dtype: torch.dtype, pattern: int) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = filled(pattern, dtype).to(wide)
    if pattern == 0xFF or dtype in NAN_IN_BOTH:
        assert values.isnan().all()
    else:
        parts = torch.view_as_real(values) if dtype.is_complex else values
        assert (parts > torch.finfo(dtype).max ** 0.5).all(), "the square of it overflows"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_signed_integers_are_no_legal_index(dtype: torch.dtype, pattern: int) -> None:
    value = int(filled(pattern, dtype)[0])
    assert abs(value) >= torch.iinfo(dtype).max * 0.98


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_are_large(dtype: torch.dtype, pattern: int) -> None:
    value = int.from_bytes(bits(filled(pattern, dtype)[:1]), sys.byteorder)
    assert value > torch.iinfo(dtype).max * 0.45


def test_booleans_stay_legal(pattern: int) -> None:
    assert Poison(pattern).byte_for(torch.bool) in (0, 1)


def test_the_patterns_differ_where_one_could_hide() -> None:
    first, second = (Poison(pattern).byte_for(torch.float32) for pattern in PATTERNS)
    assert first != second


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 0xFF), (False, None), (0xFF, 0xFF), (0x7F, 0x7F), (Poison(0x7F), 0x7F)],
)
def test_a_caller_chooses(value: int | bool | Poison, expected: int | None) -> None:
    chosen = poison_from(value, {"TORPOR_POISON": "nonsense"})
    assert (chosen.pattern if chosen is not None else None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", None), ("0", None), ("off", None), ("1", 0xFF), ("ON", 0xFF), ("FF", 0xFF), ("7f", 0x7F)],
)
def test_else_the_environment_does(text: str, expected: int | None) -> None:
    chosen = poison_from(None, {"TORPOR_POISON": text})
    assert (chosen.pattern if chosen is not None else None) == expected


def test_without_any_choice_there_is_none() -> None:
    assert poison_from(None, {}) is None


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ArgumentError, match="poison pattern 3 is none of"):
        poison_from(3)
    with pytest.raises(ArgumentError, match="TORPOR_POISON='maybe' is none of"):
        poison_from(None, {"TORPOR_POISON": "maybe"})
