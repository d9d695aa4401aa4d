"""The compiled operations against float64, and against what a row's bits may depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.helpers import QWEN3_MOE, TINY, OneSequence, random_values
from tests.model.native_kernels import native_library
from torch.nn import functional

from torpor.model.checkpoints.load import new_model
from torpor.model.config.config import RopeConfig, parse_config
from torpor.model.layers.decoder import DecoderForCausalLM
from torpor.model.layers.layers import RotaryEmbedding
from torpor.model.layers.ops import TorchOps, use_ops
from torpor.model.native.ops import NativeOps

DTYPES = (torch.float32, torch.bfloat16)
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""The largest relative error of rounding to nearest."""
FLOAT32 = ROUNDOFF[torch.float32]

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def native(dtype: torch.dtype) -> NativeOps:
    """The operations in a dtype."""
    return NativeOps(native_library(), dtype)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_linear(
    ops: NativeOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compare with float64, within the bound for a sum in any order (Higham 2002, section 3.1)."""
    out = ops.linear(x, weight, bias)
    true = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        true, sizes = true + bias.double(), sizes + bias.double().abs()
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], weight.shape[0])
    assert out.is_contiguous()
    limit = (weight.shape[1] + 1) * FLOAT32 * sizes
    if x.dtype != torch.float32:
        limit += ROUNDOFF[x.dtype] * (true.abs() + limit)
    assert ((out.double() - true).abs() <= limit).all()
    return out


@each_dtype
def test_products_at_every_number_of_rows(dtype: torch.dtype) -> None:
    ops = native(dtype)
    weight, bias = drawn(97, 576, dtype=dtype, seed=1), drawn(97, dtype=dtype, seed=2)
    for rows in (*range(41), 200):
        check_linear(ops, drawn(rows, 576, dtype=dtype), weight, bias if rows % 2 else None)


@pytest.mark.parametrize("width", [1, 2, 5, 15, 16, 17, 31, 32, 33, 47, 100, 576, 579])
@each_dtype
def test_products_of_every_shape(dtype: torch.dtype, width: int) -> None:
    ops = native(dtype)
    for features in (*range(1, 14), 95):
        weight = drawn(features, width, dtype=dtype, seed=1)
        bias = drawn(features, dtype=dtype, seed=2)
        for rows in (1, 2, 3, 4, 5, 7):
            x = drawn(rows, width, dtype=dtype)
            for each in (None, bias):
                check_linear(ops, x, weight, each)


@pytest.mark.parametrize("rows", [127, 128, 130, 252, 253, 300, 505, 1009])
@each_dtype
def test_products_of_many_rows(dtype: torch.dtype, rows: int) -> None:
    ops = native(dtype)
    for features, width in ((64, 288), (63, 40), (65, 289), (130, 5), (200, 579), (128, 1)):
        weight = drawn(features, width, dtype=dtype, seed=1)
        bias = drawn(features, dtype=dtype, seed=2)
        wide = drawn(rows, width + 7, dtype=dtype)
        for each in (None, bias):
            check_linear(ops, wide[:, 3:-4], weight, each)
    x = drawn(rows, 40, dtype=dtype)
    x[100] = torch.nan
    finite = ops.linear(x, drawn(70, 40, dtype=dtype), None).isfinite()
    assert not finite[100].any()
    assert finite[:100].all()
    assert finite[101:].all()


@each_dtype
def test_products_of_more_rows_than_stay_in_the_processors_cache(dtype: torch.dtype) -> None:
    # 384 KiB of rows, and rows so wide that not 64 fit.
    for rows, width in ((70, 3000), (200, 3000), (6, 120_000), (130, 9001)):
        x, weight = drawn(rows, width, dtype=dtype), drawn(9, width, dtype=dtype, seed=1)
        check_linear(native(dtype), x, weight, None)


@each_dtype
def test_rows_may_be_strided_and_have_leading_dimensions(dtype: torch.dtype) -> None:
    ops = native(dtype)
    weight, bias = drawn(50, 40, dtype=dtype), drawn(50, dtype=dtype, seed=2)
    for shape in ((40,), (2, 3, 40), (1, 1, 40), (0, 40), (2, 0, 40)):
        check_linear(ops, drawn(*shape, dtype=dtype), weight, bias)
    wide = drawn(9, 100, dtype=dtype)
    strided = [
        wide[:, 7:47],
        wide[::2, 7:47],
        wide[:, 10:90:2],
        wide[:1, 10:90:2],
        drawn(40, 9, dtype=dtype).t(),
        drawn(1, 40, dtype=dtype).expand(5, 40),
        drawn(3, 4, 80, dtype=dtype)[:, :2, 10:50],
    ]
    for x in strided:
        check_linear(ops, x, weight, bias)


@each_dtype
def test_nothing_outside_the_rows_is_read_or_written(dtype: torch.dtype) -> None:
    ops = native(dtype)
    for rows, features, width in ((1, 1, 1), (3, 7, 33), (4, 13, 5), (9, 6, 31)):
        room = torch.full((rows + 2, width + 2), torch.nan, dtype=dtype)
        room[1:-1, 1:-1] = drawn(rows, width, dtype=dtype)
        held = torch.full((features * width + 128,), torch.nan, dtype=dtype)
        weight = held[64:-64].view(features, width)
        weight.copy_(drawn(features, width, dtype=dtype, seed=1))
        check_linear(ops, room[1:-1, 1:-1], weight, None)


@each_dtype
def test_weights_that_the_kernels_do_not_take_go_to_torch(dtype: torch.dtype) -> None:
    ops = native(dtype)
    other = torch.float64 if dtype == torch.float32 else torch.float32
    x, weight = drawn(3, 40, dtype=other), drawn(7, 40, dtype=other, seed=1)
    torch.testing.assert_close(ops.linear(x, weight, None), functional.linear(x, weight))
    for strided in (drawn(40, 7, dtype=dtype).t(), drawn(7, 80, dtype=dtype)[:, ::2]):
        x = drawn(3, 40, dtype=dtype)
        assert torch.equal(ops.linear(x, strided, None), functional.linear(x, strided))
    bias = drawn(14, dtype=dtype)[::2]
    check_linear(ops, drawn(3, 40, dtype=dtype), drawn(7, 40, dtype=dtype), bias)
    nothing = ops.linear(drawn(3, 0, dtype=dtype), drawn(7, 0, dtype=dtype), None)
    assert torch.equal(nothing, torch.zeros(3, 7, dtype=dtype))


@each_dtype
def test_what_does_not_fit_together_is_refused_by_torch(dtype: torch.dtype) -> None:
    ops, weight = native(dtype), drawn(7, 40, dtype=dtype)
    other = torch.float64 if dtype == torch.float32 else torch.float32
    for x in (drawn(3, 40, dtype=other), drawn(3, 39, dtype=dtype), drawn(3, 80, dtype=dtype)):
        with pytest.raises(RuntimeError):
            ops.linear(x, weight, None)
    with pytest.raises(RuntimeError):
        ops.linear(drawn(3, 40, dtype=dtype), weight, drawn(7, dtype=other))


@each_dtype
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.sampled_from([1, 5, 16, 31, 33, 47, 100, 576])),
    rows=st.integers(1, 40),
    place=st.integers(0, 39),
    threads=st.integers(1, 2),
    with_bias=st.booleans(),
)
def test_a_row_has_the_same_bits_in_any_company_and_place(
    dtype: torch.dtype,
    shape: tuple[int, int],
    rows: int,
    place: int,
    threads: int,
    with_bias: bool,
) -> None:
    ops, place = native(dtype), place % rows
    weight, bias = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype, seed=3)
    company = 3 * drawn(rows, shape[1], dtype=dtype, seed=1)
    row = drawn(1, shape[1], dtype=dtype, seed=2)
    company[place] = row
    torch.set_num_threads(threads)
    together = ops.linear(company, weight, bias if with_bias else None)
    torch.set_num_threads(1)
    alone = ops.linear(row, weight, bias if with_bias else None)
    assert torch.equal(together[place], alone[0])


@each_dtype
def test_a_product_has_the_same_bits_whatever_the_number_of_rows(dtype: torch.dtype) -> None:
    ops = native(dtype)
    for features, width in ((130, 579), (64, 40), (12, 3001), (7, 33), (1, 5)):
        x, weight = drawn(300, width, dtype=dtype), drawn(features, width, dtype=dtype, seed=1)
        bias = drawn(features, dtype=dtype, seed=2)
        together = ops.linear(x, weight, bias)
        for rows in (*range(1, 51), 63, 64, 65, 127, 128, 129, 256, 299):
            first = rows % 7 % (301 - rows)
            part = ops.linear(x[first : first + rows], weight, bias)
            assert torch.equal(part, together[first : first + rows])


@each_dtype
def test_the_number_of_threads_changes_no_bits(dtype: torch.dtype) -> None:
    ops = native(dtype)
    x, weight = drawn(70, 577, dtype=dtype), drawn(301, 577, dtype=dtype, seed=1)
    gain, residual = drawn(577, dtype=dtype, seed=2), drawn(70, 577, dtype=dtype, seed=3)
    tables = [table.to(dtype) for table in angles(70, 64)]
    calls: tuple[Callable[[], Iterable[torch.Tensor]], ...] = (
        lambda: [ops.linear(x, weight, None)],
        lambda: [ops.linear(x.repeat(4, 1), weight, None)],
        lambda: [ops.linear_gated(x, weight[:300], None)],
        lambda: [ops.rms_norm(x, gain, 1e-5)],
        lambda: ops.add_rms_norm(x, residual.clone(), gain, 1e-5),
        lambda: [ops.gated(x[:, :576])],
        lambda: [ops.rotate(x[:, :576].reshape(70, 9, 64).clone(), *tables)],
    )
    for call in calls:
        torch.set_num_threads(1)
        one = list(call())
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(*pair) for pair in zip(call(), one, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@each_dtype
def test_a_row_that_is_not_finite_does_not_spread(dtype: torch.dtype, bad: float) -> None:
    ops, gain = native(dtype), drawn(50, dtype=dtype)
    for rows in (2, 3, 5, 20):
        x = drawn(rows, 50, dtype=dtype)
        x[1] = bad
        x[1, 3] = -x[1, 3]
        for out in (
            ops.linear(x, drawn(24, 50, dtype=dtype), None),
            ops.rms_norm(x, gain, 1e-5),
            ops.add_rms_norm(x, torch.zeros_like(x), gain, 1e-5)[0],
        ):
            assert not out[1].isfinite().all()
            assert out[0].isfinite().all()
            assert out[2:].isfinite().all()


def norm_limit(x: torch.Tensor, gain: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """The norm in float64, and how far a float32 one with its roundings may be from it."""
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    # Half the error of the sum of squares, for the root; a few operations around it.
    relative = (x.shape[-1] / 2 + 8) * FLOAT32
    if x.dtype != torch.float32:
        relative += 2 * ROUNDOFF[x.dtype] + ROUNDOFF[x.dtype] ** 2
    true = normed * gain.double()
    return true, relative * true.abs()


@pytest.mark.parametrize("width", [1, 5, 16, 31, 48, 64, 100, 576])
@each_dtype
def test_norms_equal_their_formula(dtype: torch.dtype, width: int) -> None:
    ops, gain = native(dtype), drawn(width, dtype=dtype, seed=1)
    for shape in ((1, width), (33, width), (0, width), (2, 3, width), (width,)):
        for eps, scale in ((1e-5, 1.0), (1e-6, 1e-3), (1e-5, 1e6)):
            x = scale * drawn(*shape, dtype=dtype)
            before = x.clone()
            out = ops.rms_norm(x, gain, eps)
            true, limit = norm_limit(x, gain, eps)
            assert out.dtype == dtype
            assert out.shape == x.shape
            assert ((out.double() - true).abs() <= limit).all()
            assert torch.equal(x, before)
    strided = drawn(9, 3 * width, dtype=dtype)[:, width : 2 * width]
    assert torch.equal(ops.rms_norm(strided, gain, 1e-5), ops.rms_norm(strided.clone(), gain, 1e-5))


@pytest.mark.parametrize("width", [1, 5, 16, 31, 100, 576])
@each_dtype
def test_a_sum_is_rounded_and_normed_as_rounded(dtype: torch.dtype, width: int) -> None:
    ops, gain = native(dtype), drawn(width, dtype=dtype, seed=1)
    for rows in (1, 2, 33):
        x, residual = (drawn(rows, width, dtype=dtype, seed=seed) for seed in (2, 3))
        before = x.clone()
        out, total = ops.add_rms_norm(x, residual.clone(), gain, 1e-5)
        assert torch.equal(total, residual + x)
        assert torch.equal(out, ops.rms_norm(total, gain, 1e-5))
        assert torch.equal(x, before)


@pytest.mark.parametrize("width", [5, 100, 576])
def test_norms_in_bfloat16_are_within_a_unit_of_torchs(width: int) -> None:
    ops, gain = native(torch.bfloat16), drawn(width, dtype=torch.bfloat16, seed=1)
    x, residual = (drawn(65, width, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    ours = ops.add_rms_norm(x, residual.clone(), gain, 1e-5)
    theirs = TorchOps().add_rms_norm(x, residual.clone(), gain, 1e-5)
    assert torch.equal(ours[1], theirs[1])
    # A norm that falls on the other side of a half is a unit off before the gain, which may make
    # it two units of a smaller binade: that is 2**-7 twice, relatively, at most.
    apart = (ours[0].double() - theirs[0].double()).abs()
    assert (apart <= 2**-6 * theirs[0].double().abs()).all()
    assert (apart > 0).double().mean() < 0.01


def test_strided_residuals_are_summed_too() -> None:
    ops, gain = native(torch.float32), drawn(20, dtype=torch.float32)
    x, wide = (drawn(6, 60, dtype=torch.float32, seed=seed) for seed in (1, 2))
    out, total = ops.add_rms_norm(x[:, 20:40], wide[:, 30:50], gain, 1e-5)
    assert torch.equal(total, x[:, 20:40] + wide[:, 30:50])
    assert torch.equal(out, ops.rms_norm(total, gain, 1e-5))


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate in float64."""
    return gate.double() / (1 + torch.exp(-gate.double())) * up.double()


GATES = (
    *(sign * 2.0**power for sign in (1, -1) for power in range(-149, 128)),
    *(sign * step / 8 for sign in (1, -1) for step in range(900)),
    *(0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45),
)


@pytest.mark.parametrize("up", [1.0, -3.0, 1e-30, 0.0])
@each_dtype
def test_gates_over_the_whole_range_of_floats(dtype: torch.dtype, up: float) -> None:
    gate = torch.tensor(GATES).to(dtype)
    gate = gate[gate.isfinite()]
    ups = torch.full_like(gate, up)
    out = native(dtype).gated(torch.cat((gate, ups))[None])[0]
    true = silu_times(gate, ups)
    relative = ROUNDOFF[dtype] * (1 if dtype == torch.bfloat16 else 8) + 8 * FLOAT32
    # Below -88.7, where e**-x passes the largest float, it is zero; denormals have fewer digits.
    tiny = max(89 * math.exp(-88.7), 2.0**-133) * max(1.0, abs(up))
    large = true.abs() > torch.finfo(dtype).max
    assert torch.equal(out[large].double(), true[large].sign() * torch.inf)
    apart = (out.double() - true).abs()[~large]
    assert (apart <= relative * true.abs()[~large] + tiny).all()


@each_dtype
def test_gates_that_are_not_finite_are_as_torchs(dtype: torch.dtype) -> None:
    values = [torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1.0, 100.0, -100.0, 3.4e38, -3.4e38]
    gate, up = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype).unbind(1)
    out = native(dtype).gated(torch.cat((gate, up)))
    want = functional.silu(gate) * up
    torch.testing.assert_close(out, want, equal_nan=True, rtol=4 * ROUNDOFF[dtype], atol=1e-30)


@pytest.mark.parametrize("width", [0, 1, 7, 15, 16, 17, 31, 33, 100, 1536])
@each_dtype
def test_gates_at_every_width(dtype: torch.dtype, width: int) -> None:
    ops = native(dtype)
    for shape in ((1,), (37,), (2, 3), (0,), ()):
        x = 4 * drawn(*shape, 2 * width, dtype=dtype)
        before = x.clone()
        out = ops.gated(x)
        true = silu_times(*x.chunk(2, dim=-1))
        assert out.shape == (*shape, width)
        assert out.dtype == dtype
        limit = (8 * FLOAT32 + (ROUNDOFF[dtype] if dtype == torch.bfloat16 else 0)) * true.abs()
        assert ((out.double() - true).abs() <= limit + 1e-30).all()
        assert torch.equal(x, before)
    rows = drawn(5, 2 * width, dtype=dtype)
    wide = torch.cat((rows, rows), dim=1)[:, width : 3 * width]
    assert torch.equal(ops.gated(wide), ops.gated(wide.clone()))


@pytest.mark.parametrize("rows", [1, 5, 11, 32, 50, 131, 1011])
@each_dtype
def test_a_gated_product_has_the_bits_of_product_and_gate(dtype: torch.dtype, rows: int) -> None:
    ops = native(dtype)
    for width, inner, bias in ((33, 64, True), (300, 128, False), (64, 13, True), (24, 5, False)):
        x = drawn(rows, width + 5, dtype=dtype)[:, :width]
        weight = drawn(2 * inner, width, dtype=dtype, seed=1)
        added = drawn(2 * inner, dtype=dtype, seed=2) if bias else None
        out = ops.linear_gated(x, weight, added)
        assert torch.equal(out, ops.gated(ops.linear(x, weight, added)))
        lead = ops.linear_gated(x[None], weight, added)
        assert torch.equal(lead, out[None])


def test_a_gated_product_of_what_the_kernels_do_not_take_is_torchs() -> None:
    ops = native(torch.float32)
    x, weight = drawn(200, 16, dtype=torch.float64), drawn(128, 16, dtype=torch.float64)
    assert torch.equal(ops.linear_gated(x, weight, None), TorchOps().linear_gated(x, weight, None))
    assert ops.linear_gated(drawn(0, 16, dtype=torch.float32), weight.float(), None).shape == (
        0,
        64,
    )


@each_dtype
def test_a_row_between_others_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    ops, gain = native(dtype), drawn(77, dtype=dtype, seed=1)
    x, residual = drawn(37, 154, dtype=dtype), drawn(37, 77, dtype=dtype, seed=2)
    gated, normed = ops.gated(x), ops.rms_norm(residual, gain, 1e-5)
    summed = ops.add_rms_norm(x[:, :77], residual.clone(), gain, 1e-5)[0]
    for row in range(37):
        one = slice(row, row + 1)
        assert torch.equal(ops.gated(x[one])[0], gated[row])
        assert torch.equal(ops.rms_norm(residual[one], gain, 1e-5)[0], normed[row])
        alone = ops.add_rms_norm(x[one, :77], residual[one].clone(), gain, 1e-5)[0]
        assert torch.equal(alone[0], summed[row])


def angles(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for positions 0, 7, 14, ..."""
    rope = RotaryEmbedding(width, RopeConfig(theta=100.0))
    return rope(7 * torch.arange(rows), torch.float32)


@pytest.mark.parametrize("width", [2, 6, 16, 30, 32, 64, 128])
@each_dtype
def test_rotation_in_place_on_a_view_and_on_a_copy(dtype: torch.dtype, width: int) -> None:
    ops, (cos, sin) = native(dtype), (table.to(dtype) for table in angles(9, width))
    wide = drawn(9, 5, width, dtype=dtype)
    low, high = wide[:, :3].double().chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    true = wide[:, :3].double() * cos.double() + swapped * sin.double()
    sizes = wide[:, :3].double().abs() + swapped.abs()
    limit = (2 * FLOAT32 + (ROUNDOFF[dtype] if dtype == torch.bfloat16 else 0)) * sizes
    copied = ops.rotate(wide[:, :3].clone(), cos, sin)
    apart = wide[:, :3].transpose(1, 2).contiguous().transpose(1, 2)
    rest = wide[:, 3:].clone()
    turned = ops.rotate(wide[:, :3], cos, sin)
    for out in (copied, turned, ops.rotate(apart, cos, sin)):
        assert out.shape == (9, 3, width)
        assert ((out.double() - true).abs() <= limit).all()
    assert torch.equal(turned, copied)
    assert turned.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, 3:], rest)


def tiny(dtype: torch.dtype) -> DecoderForCausalLM:
    """A model with experts, dense layers, biases and random weights."""
    fields = {**TINY, **QWEN3_MOE, "head_dim": 20, "decoder_sparse_step": 2, "attention_bias": True}
    model = new_model(parse_config(fields, {}, where="test"), dtype)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, random_values(parameter, generator))
    return model


@each_dtype
@torch.inference_mode()
def test_a_whole_model_computes_what_torch_computes(dtype: torch.dtype) -> None:
    model, ids_T = tiny(dtype), torch.arange(30)
    want = model.compute_logits(model(ids_T, ids_T, OneSequence()))
    use_ops(model, native(dtype))
    got = model.compute_logits(model(ids_T, ids_T, OneSequence()))
    assert not torch.equal(got, want)
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert (got - want).abs().max() <= limit * want.abs().max()


@torch.inference_mode()
def test_a_copied_model_keeps_its_operations_and_has_its_own_weights() -> None:
    model, ids_T = tiny(torch.float32), torch.arange(30)
    ops = native(torch.float32)
    use_ops(model, ops)
    twin = copy.deepcopy(model)
    assert isinstance(twin.lm_head.ops, NativeOps)
    want = model(ids_T, ids_T, OneSequence())
    assert torch.equal(twin(ids_T, ids_T, OneSequence()), want)
    for parameter in twin.parameters():
        parameter.zero_()
    assert torch.equal(model(ids_T, ids_T, OneSequence()), want)
