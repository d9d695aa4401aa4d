from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.engine.sampling import noise as noise_module
from torpor.engine.sampling.noise import GAMMA, gumbel_argmax, gumbel_noise, mix, uniform_noise


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def uniform(seed: int, position: int, size: int) -> torch.Tensor:
    return torch.from_numpy(uniform_noise(seed, position, np.arange(size)))


def reference_uniform(seed: int, position: int, index: int) -> float:
    """The definition in exact integers: splitmix64 from a key of seed and position."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z &= mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    key = mix(mix(seed) + (position + 1) * gamma)
    return ((mix(key + (index + 1) * gamma) >> 12) + 0.5) / 2**52


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(1, 70))
def test_noise_is_the_hash_it_is_defined_to_be(seed: int, position: int, size: int) -> None:
    expected = [reference_uniform(seed, position, index) for index in range(size)]
    assert uniform_noise(seed, position, np.arange(size)).tolist() == expected


def test_noise_of_an_index_does_not_depend_on_the_others() -> None:
    whole = uniform_noise(1, 2, np.arange(50_000))
    some = np.array([49_999, 0, 17])
    assert np.array_equal(uniform_noise(1, 2, some), whole[some])


def test_splitmix64_gives_its_published_first_value() -> None:
    # The first output of the generator with state 0, as in its author's test vectors.
    assert mix(GAMMA) == 0xE220A8397B1DCDAF


def test_uniform_noise_is_uniform_and_stays_inside_the_open_interval() -> None:
    noise = torch.cat([uniform(seed, p, 1000) for seed in range(10) for p in range(20)])
    assert 0 < noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    counts = torch.histc(noise, bins=100, min=0, max=1)
    # 99 degrees of freedom: a value above 160 has a probability of about 1e-4.
    assert chi_square(counts, torch.full((100,), 0.01)) < 160


@pytest.mark.parametrize("shift", ["position", "index", "seed"])
def test_neighbouring_noise_is_independent(shift: str) -> None:
    rows = torch.stack([uniform(7 + (shift == "seed") * i, i, 400) for i in range(200)])
    if shift == "seed":
        rows = torch.stack([uniform(seed, 3, 400) for seed in range(200)])
    first, second = (rows[:, :-1], rows[:, 1:]) if shift == "index" else (rows[:-1], rows[1:])
    cells = (first * 8).long() * 8 + (second * 8).long()
    counts = torch.bincount(cells.flatten(), minlength=64)
    # 63 degrees of freedom: a value above 115 has a probability of about 1e-4.
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 115


def test_gumbel_noise_is_finite() -> None:
    assert all(np.isfinite(gumbel_noise(seed, 0, np.arange(50_000))).all() for seed in range(20))


SCORES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "usual": lambda random, size: random.normal(0, 3, size),
    "flat": lambda random, size: np.zeros(size),
    "peaked": lambda random, size: random.normal(0, 1, size) + 25 * (np.arange(size) == 7),
    "cold": lambda random, size: random.normal(0, 300, size),
    "huge": lambda random, size: random.normal(0, 1, size) * 1e30,
    "beyond float32": lambda random, size: np.linspace(0, 1e200, size),
    "some impossible": lambda random, size: np.where(
        random.random(size) < 0.9, -np.inf, random.normal(0, 3, size)
    ),
}


@pytest.mark.parametrize("kind", SCORES)
def test_the_quick_draw_is_the_argmax_of_scores_and_noise(kind: str) -> None:
    random = np.random.default_rng(0)
    for position in range(300):
        scores = SCORES[kind](random, int(random.integers(8, 3000)))
        scores[3] = 0.0
        noisy = scores - scores.max() + gumbel_noise(11, position, np.arange(len(scores)))
        assert gumbel_argmax(scores, 11, position) == int(noisy.argmax())


def test_a_draw_among_some_ids_uses_the_noise_of_those_ids() -> None:
    random = np.random.default_rng(1)
    for position in range(200):
        ids = np.sort(random.choice(50_000, 40, replace=False))
        scores = random.normal(0, 2, 40)
        noisy = scores - scores.max() + gumbel_noise(5, position, ids)
        assert gumbel_argmax(scores, 5, position, ids) == int(noisy.argmax())


@pytest.mark.parametrize("top", [True, False])
def test_the_outermost_cells_of_coarse_noise_are_decided_exactly(
    monkeypatch: pytest.MonkeyPatch, top: bool
) -> None:
    # Hashes that random tests meet once in millions of draws: the first candidate's noise lies at
    # the very edge, where its coarse value is off the most.
    edge = 2**64 - 1 if top else 0
    others = [2**63, 2**64 - 2**43, 2**64 - 2**42, 2**41]
    hashes = np.array([edge, *others], dtype=np.uint64)
    exact = [-math.log(-math.log(((int(h) >> 12) + 0.5) * 2.0**-52)) for h in hashes]
    monkeypatch.setattr(noise_module, "_hash", lambda seed, position, ids: hashes[ids].copy())
    monkeypatch.setattr(noise_module, "_gumbel", lambda seed, position, token: exact[token])
    for lead in np.linspace(-40, 40, 401):
        scores = np.array([lead, 0.0, 0.0, 0.0, 0.0])
        expected = int(np.argmax(scores + np.array(exact)))
        assert gumbel_argmax(scores, 0, 0) == expected


def test_equal_huge_scores_are_drawn_alike() -> None:
    drawn = {gumbel_argmax(np.full(5, 1e300), 0, position) for position in range(100)}
    assert drawn == {0, 1, 2, 3, 4}
