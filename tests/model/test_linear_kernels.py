"""Products with weights: right for every dtype, number of rows and kind of processor."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from torpor.model.layers import linear_kernels
from torpor.model.layers.linear_kernels import INVARIANT_ROWS, linear_kernel
from torpor.model.layers.ops import LinearKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sums of 1536 products, relative to the largest; half precision rounds the result once.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Scratch memory as after a wake."""
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.fixture(params=[True, False], ids=["hardware bf16", "no hardware bf16"])
def hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both kinds of processor."""
    found = bool(request.param)
    monkeypatch.setattr(linear_kernels, "cpu_has_bfloat16_products", lambda: found)
    return found


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(kernel: LinearKernel, x: torch.Tensor, weight: torch.Tensor, *, bias: bool) -> None:
    """Compare with the product in float64."""
    b = drawn(weight.shape[0], dtype=x.dtype, seed=2) if bias else None
    out = kernel(x, weight, b)
    true = x.double() @ weight.double().t()
    if b is not None:
        true += b.double()
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], weight.shape[0])
    assert out.is_contiguous()
    limit = TOLERANCE[x.dtype] * max(1.0, float(true.abs().max()))
    torch.testing.assert_close(out.double(), true, rtol=0, atol=limit)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("hardware")
def test_products_are_right_at_every_number_of_rows(
    dtype: torch.dtype, bias: bool, invariant: bool
) -> None:
    kernel = linear_kernel(dtype, batch_invariant=invariant, allocate=allocate)
    for out_features, in_features in ((96, 64), (33, 1536), (1, 7)):
        weight = drawn(out_features, in_features, dtype=dtype, seed=1)
        for rows in (1, 2, 3, 4, 5, 16, 17, 31, 32, 70):
            check(kernel, drawn(rows, in_features, dtype=dtype), weight, bias=bias)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("hardware")
def test_leading_dimensions_strides_and_no_rows(dtype: torch.dtype, invariant: bool) -> None:
    kernel = linear_kernel(dtype, batch_invariant=invariant, allocate=allocate)
    weight = drawn(48, 40, dtype=dtype)
    for shape in ((40,), (2, 3, 40), (1, 1, 40), (0, 40)):
        out = kernel(drawn(*shape, dtype=dtype), weight, None)
        assert out.shape == (*shape[:-1], 48)
    for rows in (1, 3, 9):
        wide = drawn(rows, 100, dtype=dtype)
        check(kernel, wide[:, 7:47], weight, bias=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 20])
def test_weights_larger_than_the_scratch_are_widened_in_parts(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_kernels, "cpu_has_bfloat16_products", lambda: False)
    monkeypatch.setattr(linear_kernels, "WIDENED_BYTES", 4 * 64 * 7)
    kernel = linear_kernel(dtype, batch_invariant=False, allocate=allocate)
    check(kernel, drawn(rows, 64, dtype=dtype), drawn(40, 64, dtype=dtype), bias=True)
    # Not even one output feature fits.
    check(kernel, drawn(rows, 500, dtype=dtype), drawn(5, 500, dtype=dtype), bias=True)


def test_float32_works_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    kernel = linear_kernel(torch.float32, batch_invariant=False, allocate=allocate)
    weight = drawn(24, 32, dtype=torch.float32)
    for rows in (1, 3, 8):
        check(kernel, drawn(rows, 32, dtype=torch.float32), weight, bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("hardware")
def test_a_fresh_kernel_gives_the_same_bits(dtype: torch.dtype) -> None:
    weight = drawn(96, 64, dtype=dtype)
    for rows in (1, 2, 3, 8, 32):
        x = drawn(rows, 64, dtype=dtype)
        first, second = (
            linear_kernel(dtype, batch_invariant=False, allocate=allocate)(x, weight, None)
            for _ in range(2)
        )
        assert torch.equal(first, second)


SHAPES = [(96, 64), (960, 576), (576, 1536), (33, 100), (513, 40)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from(SHAPES),
    st.integers(1, 80),
    st.integers(0, 79),
    st.integers(0, 99),
)
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, found: bool, shape: tuple[int, int], rows: int, place: int, seed: int
) -> None:
    place %= rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernels, "cpu_has_bfloat16_products", lambda: found)
        kernel = linear_kernel(dtype, batch_invariant=True, allocate=allocate)
    weight, bias = drawn(*shape, dtype=dtype, seed=seed), drawn(shape[0], dtype=dtype, seed=seed)
    row = drawn(1, shape[1], dtype=dtype, seed=seed + 1)
    company = 3 * drawn(rows, shape[1], dtype=dtype, seed=seed + 2)
    company[place] = row
    assert torch.equal(kernel(company, weight, bias)[place], kernel(row, weight, bias)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("hardware")
def test_a_row_has_the_same_bits_at_every_place(dtype: torch.dtype) -> None:
    kernel = linear_kernel(dtype, batch_invariant=True, allocate=allocate)
    weight = drawn(960, 576, dtype=dtype)
    rows = drawn(1, 576, dtype=dtype).expand(2 * INVARIANT_ROWS + 3, -1)
    out = kernel(rows, weight, None)
    assert torch.equal(out, out[:1].expand_as(out))


def test_a_nan_row_does_not_spread() -> None:
    for dtype in DTYPES:
        for invariant in (False, True):
            kernel = linear_kernel(dtype, batch_invariant=invariant, allocate=allocate)
            weight = drawn(24, 32, dtype=dtype)
            for rows in (2, 3, 5, 20):
                x = drawn(rows, 32, dtype=dtype)
                x[1] = torch.nan
                out = kernel(x, weight, None)
                assert out[1].isnan().all()
                assert out[0].isfinite().all()
                assert out[2:].isfinite().all()


def test_scratch_is_taken_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def count(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        taken.append(torch.Size(shape).numel() * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(linear_kernels, "cpu_has_bfloat16_products", lambda: True)
    linear_kernel(torch.float32, batch_invariant=False, allocate=count)
    linear_kernel(torch.bfloat16, batch_invariant=False, allocate=count)
    assert taken == []
    linear_kernel(torch.float16, batch_invariant=False, allocate=count)
    assert taken == [linear_kernels.WIDENED_BYTES]


def test_weights_of_another_dtype_or_device_go_to_torch() -> None:
    kernel = linear_kernel(torch.bfloat16, batch_invariant=False, allocate=allocate)
    check(kernel, drawn(3, 8, dtype=torch.float32), drawn(4, 8, dtype=torch.float32), bias=True)
    weight = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    assert kernel(torch.empty_like(weight), weight, None).device.type == "meta"


@pytest.mark.parametrize("enabled", [True, False])
def test_onednn_is_left_as_it_was(enabled: bool) -> None:
    kernel = linear_kernel(torch.bfloat16, batch_invariant=False, allocate=allocate)
    x, weight = drawn(1, 64, dtype=torch.bfloat16), drawn(96, 64, dtype=torch.bfloat16)
    torch._C._set_mkldnn_enabled(enabled)
    try:
        kernel(x, weight, None)
        assert torch._C._get_mkldnn_enabled() is enabled
        with pytest.raises(RuntimeError):
            kernel(x[:, :5], weight, None)
        assert torch._C._get_mkldnn_enabled() is enabled
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_one_thread_at_a_time_switches_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = linear_kernel(torch.bfloat16, batch_invariant=False, allocate=allocate)
    x, weight = drawn(1, 64, dtype=torch.bfloat16), drawn(96, 64, dtype=torch.bfloat16)
    linear = functional.linear
    entered: list[threading.Event] = []
    overlapped: list[bool] = []

    def watched(*tensors: torch.Tensor) -> torch.Tensor:
        for event in entered:
            event.set()
        entered.append(threading.Event())
        # The first to enter gives the other every chance to follow it in.
        overlapped.append(entered[-1].wait(0.2) if len(entered) == 1 else False)
        return linear(*tensors)

    monkeypatch.setattr(functional, "linear", watched)
    threads = [threading.Thread(target=kernel, args=(x, weight, None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlapped == [False, False]
    assert torch._C._get_mkldnn_enabled()


def test_products_meet_few_numbers_of_rows_and_waste_little() -> None:
    rounded = [linear_kernels.rounded_rows(rows) for rows in range(1, 4097)]
    assert all(0 <= more - rows < max(4, rows / 4) for rows, more in enumerate(rounded, start=1))
    assert rounded == sorted(rounded)
    assert len(set(rounded)) < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_added_to_round_up_change_nothing_that_is_returned(dtype: torch.dtype) -> None:
    kernel = linear_kernel(dtype, batch_invariant=False, allocate=allocate)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    for rows in (5, 7, 31, 33, 40, 129, 130, 513):
        x = torch.randn(rows, 64, generator=generator).to(dtype)
        expected = x.double() @ weight.double().t()
        out = kernel(x, weight, None)
        assert out.shape == expected.shape
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
