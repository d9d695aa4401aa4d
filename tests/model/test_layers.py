"""Layers hold parameters on meta and buffers for real, and compute what they say."""

from __future__ import annotations

import math

import pytest
import torch

from torpor.model.config import RopeConfig
from torpor.model.layers import (
    Linear,
    RMSNorm,
    RotaryEmbedding,
    empty_parameter,
    inverse_frequencies,
    rotate,
)


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
    turned = rotate(x, cos, sin)[0, 0]
    for pair, frequency in enumerate((1.0, 0.1)):
        z = complex(x[0, 0, pair], x[0, 0, pair + 2]) * complex(
            math.cos(7 * frequency), math.sin(7 * frequency)
        )
        assert turned[pair] == pytest.approx(z.real, abs=1e-5)
        assert turned[pair + 2] == pytest.approx(z.imag, abs=1e-5)


def test_the_norm_is_computed_in_float32_for_half_precision() -> None:
    norm = RMSNorm(512, 1e-6, dtype=torch.bfloat16)
    norm.weight = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16), requires_grad=False)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(x), exact.to(torch.bfloat16))
