"""Layers hold parameters on meta and buffers for real, and compute what they say."""

from __future__ import annotations

import math

import pytest
import torch
from tests.model.helpers import QWEN3_MOE, TINY, OneSequence, random_values
from torch.nn import functional

from torpor.model.checkpoints.load import new_model
from torpor.model.config.config import RopeConfig, parse_config
from torpor.model.layers.layers import (
    HeadNorm,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    empty_parameter,
    inverse_frequencies,
)
from torpor.model.layers.ops import TorchOps, gated, gated_by_rows, use_ops


def test_a_parameter_has_no_memory_and_no_gradient() -> None:
    parameter = empty_parameter(3, 5, dtype=torch.bfloat16)
    assert parameter.is_meta
    assert (parameter.shape, parameter.dtype) == ((3, 5), torch.bfloat16)
    assert not parameter.requires_grad
    assert Linear(5, 3, bias=False, dtype=torch.float32).bias is None


def test_rope_is_computed_for_real_whatever_the_default_device() -> None:
    with torch.device("meta"):
        rope = RotaryEmbedding(8, RopeConfig(theta=100.0))
    assert rope.inv_freq.device.type == "cpu"
    assert "inv_freq" not in rope.state_dict()
    expected = [100.0 ** (-index / 4) for index in range(4)]
    torch.testing.assert_close(rope.inv_freq, torch.tensor(expected))


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(16, RopeConfig())
    scaled = inverse_frequencies(16, RopeConfig(kind="linear", factor=4.0))
    assert torch.equal(scaled, plain / 4)


def test_llama3_scaling_keeps_short_wavelengths_and_divides_long_ones() -> None:
    config = RopeConfig(kind="llama3", factor=8.0, original_max_position_embeddings=64)
    plain = inverse_frequencies(64, RopeConfig())
    scaled = inverse_frequencies(64, config)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 64 / 4, wavelength > 64 / 1
    between = ~short & ~long
    assert short.any()
    assert long.any()
    assert between.any()
    assert torch.equal(scaled[short], plain[short])
    assert torch.equal(scaled[long], plain[long] / 8)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    rope = RotaryEmbedding(4, RopeConfig(theta=100.0))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = rope(torch.tensor([7]), torch.float32)
    turned = TorchOps().rotate(x, cos, sin)[0, 0]
    for pair, frequency in enumerate((1.0, 0.1)):
        z = complex(x[0, 0, pair], x[0, 0, pair + 2]) * complex(
            math.cos(7 * frequency), math.sin(7 * frequency)
        )
        assert turned[pair] == pytest.approx(z.real, abs=1e-5)
        assert turned[pair + 2] == pytest.approx(z.imag, abs=1e-5)


def test_rotation_keeps_its_input_and_takes_strided_views() -> None:
    rope = RotaryEmbedding(4, RopeConfig(theta=100.0))
    wide = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    before, tables = wide.clone(), rope(torch.tensor([0, 1, 9]), torch.float32)
    turned = TorchOps().rotate(wide[:, :2], *tables)
    assert torch.equal(wide, before)
    assert torch.equal(turned, TorchOps().rotate(wide[:, :2].clone(), *tables))


def test_gating_is_silu_of_the_first_half_times_the_second() -> None:
    x = torch.randn(5, 14, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    want = functional.silu(x[:, :7].double()) * x[:, 7:].double()
    torch.testing.assert_close(gated(x).double(), want, atol=1e-6, rtol=1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_normed_head_by_head_with_a_gain_each(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = HeadNorm(3, 8, 1e-6, dtype=dtype)
    fused.weight = random_values(fused.weight, generator)
    x = torch.randn(4, 5, 8, generator=generator).to(dtype)
    before = x.clone()
    for heads, gain in [(slice(0, 3), fused.weight[:8]), (slice(3, 5), fused.weight[8:])]:
        plain = RMSNorm(8, 1e-6, dtype=dtype)
        plain.weight = torch.nn.Parameter(gain, requires_grad=False)
        assert torch.equal(fused(x)[:, heads], plain(x[:, heads]))
    assert torch.equal(x, before)


@torch.inference_mode()
def test_a_linear_kernel_computes_every_product_of_a_model() -> None:
    config = parse_config(
        {**TINY, **QWEN3_MOE, "decoder_sparse_step": 2, "tie_word_embeddings": False},
        {},
        where="test",
    )
    model = new_model(config, torch.float32)
    generator, seen = torch.Generator().manual_seed(0), set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, random_values(parameter, generator))

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(weight.untyped_storage().data_ptr())
        return functional.linear(x, weight, bias)

    use_ops(model, TorchOps(kernel))
    hidden = model(torch.arange(30), torch.arange(30), OneSequence())
    model.compute_logits(hidden)
    products = {
        weight.untyped_storage().data_ptr()
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and "embed" not in name
    }
    assert seen == products


def test_the_norm_is_computed_in_float32_for_half_precision() -> None:
    norm = RMSNorm(512, 1e-6, dtype=torch.bfloat16)
    norm.weight = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16), requires_grad=False)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


def test_the_norm_equals_its_formula_bit_by_bit_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(576, 1e-5, dtype=torch.float32)
    norm.weight = random_values(norm.weight, generator)
    x = torch.randn(33, 576, generator=generator)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), norm.weight * (x * scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [100, 576])
def test_gating_by_rows_gives_each_row_its_bits_whatever_stands_beside_it(
    width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(37, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = gated_by_rows(x)
    for row in range(len(x)):
        assert torch.equal(gated_by_rows(x[row : row + 1])[0], together[row])
        assert torch.equal(gated_by_rows(x[row:])[0], together[row])
    torch.testing.assert_close(
        together, gated(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2
    )
