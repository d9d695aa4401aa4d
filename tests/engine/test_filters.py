from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.engine.sampling.filters import surviving_ids, top_ids
from torpor.params import SamplingParams

KINDS = ("random", "flat", "steps", "peaked", "wide", "impossible")


def scores_of(kind: str, size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "random": random.normal(0, 2, size),
        "flat": np.zeros(size),
        "steps": random.integers(0, 4, size).astype(float),
        "peaked": random.normal(0, 1, size) + 30 * (np.arange(size) == size // 2),
        "wide": random.normal(0, 500, size),
        "impossible": np.where(np.arange(size) % 3 == 1, random.normal(0, 2, size), -np.inf),
    }[kind]


def reference(scores: np.ndarray, min_p: float, top_k: int, top_p: float) -> list[int]:
    """One token after another, by the definitions alone."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    best = scores[order[0]]
    if min_p > 0:
        order = [i for i in order if math.exp(scores[i] - best) >= min_p * (1 - 1e-12)]
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(scores[i] - best) for i in order]
    total, before, kept = math.fsum(weights), 0.0, []
    for i, weight in zip(order, weights, strict=True):
        if top_p < 1 and before >= top_p * total * (1 - 1e-12):
            break
        kept.append(i)
        before += weight
    return sorted(kept)


@given(
    st.sampled_from(KINDS),
    st.integers(2, 400),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, 0, 1, 2, 17, 1000]),
    st.sampled_from([1.0, 0.9, 0.511, 0.1, 1e-9, 0.999999]),
)
def test_the_filters_keep_what_their_definitions_say(
    kind: str, size: int, seed: int, min_p: float, top_k: int, top_p: float
) -> None:
    scores = scores_of(kind, size, seed)
    params = SamplingParams(min_p=min_p, top_k=top_k, top_p=top_p)
    ids = surviving_ids(scores.copy(), params)
    found = list(range(size)) if ids is None else ids.tolist()
    possible = [i for i in found if scores[i] > -math.inf]
    expected = [i for i in reference(scores, min_p, top_k, top_p) if scores[i] > -math.inf]
    if found == possible:
        assert len(set(found)) == len(found)
    if possible != expected:
        # The last token in may differ only where the sums meet the bound to the last bits.
        assert edge_is_rounding(scores, possible, expected, top_p)


def edge_is_rounding(
    scores: np.ndarray, found: list[int], expected: list[int], top_p: float
) -> bool:
    few, many = sorted((found, expected), key=len)
    if len(many) - len(few) != 1 or not set(few) < set(many):
        return False
    weights = np.exp(scores - scores.max())
    return bool(abs(weights[few].sum() / weights.sum() - top_p) < 1e-9)


def test_without_filters_everything_survives() -> None:
    assert surviving_ids(np.zeros(5), SamplingParams()) is None
    assert surviving_ids(np.zeros(5), SamplingParams(top_k=5)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_top_ids_are_exact_and_ties_go_to_the_lower_id(dtype: Any, count: int) -> None:
    scores = np.array([0.1, 2.0, 0.1, 2.0, 2.0, -np.inf, 0.1, 5.0], dtype=dtype)
    order = sorted(range(8), key=lambda i: (-scores[i], i))
    assert top_ids(scores, count).tolist() == sorted(order[:count])


@pytest.mark.parametrize("steps", [2, 3, 50, 10_000])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_a_nucleus_is_cut_inside_a_crowd_of_similar_scores(steps: int, top_p: float) -> None:
    # Far more scores than places to tell them apart by size alone, and many equal ones.
    scores = np.random.default_rng(steps).integers(0, steps, 3000) / steps
    ids = surviving_ids(scores, SamplingParams(top_p=top_p))
    assert ids is not None
    assert ids.tolist() == reference(scores, 0.0, 0, top_p)


def test_equal_scores_between_others_of_their_size_are_cut_by_id() -> None:
    scores = np.random.default_rng(0).integers(0, 3, 3000) / 100
    ids = surviving_ids(scores, SamplingParams(top_p=0.5))
    assert ids is not None
    assert ids.tolist() == reference(scores, 0.0, 0, 0.5)


def test_a_nucleus_of_a_large_flat_vocabulary_is_cut_by_id() -> None:
    ids = surviving_ids(np.zeros(10_000), SamplingParams(top_p=0.25))
    assert ids is not None
    assert ids.tolist() == list(range(2500))


def test_the_scores_are_not_changed() -> None:
    scores = scores_of("random", 100, 0)
    before = scores.copy()
    surviving_ids(scores, SamplingParams(min_p=0.1, top_k=30, top_p=0.8))
    assert np.array_equal(scores, before)
