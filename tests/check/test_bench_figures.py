"""Samples, medians and rates."""

from __future__ import annotations

from torpor.check.bench_figures import rates, spread


def test_a_spread_tells_median_ends_and_samples() -> None:
    facts = spread([3.0, 1.0, 2.0, 10.0]).to_dict()
    assert facts == {"median": 2.5, "min": 1.0, "max": 10.0, "samples": [3.0, 1.0, 2.0, 10.0]}


def test_rates_are_taken_sample_by_sample() -> None:
    assert rates(6, spread([1.0, 2.0, 3.0])).samples == (6.0, 3.0, 2.0)


def test_samples_far_apart_are_noticed() -> None:
    assert not spread([1.0, 1.05, 1.09]).is_wide
    assert spread([1.0, 1.0, 1.2]).is_wide
