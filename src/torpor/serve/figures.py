"""The figures of a cycle in words: the same rows for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torpor.serve.words import count, duration, size
from torpor.sleep.classes import LEVELS

if TYPE_CHECKING:
    from torpor.check.result import CycleResult

Row = tuple[str, list[str]]
"""A label, and one cell per level."""


def figure_rows(result: CycleResult) -> list[Row]:
    """What matters, medians over the cycles of a level."""
    facts = result.to_dict()

    def each(label: str, key: str, worded: Callable[[Any], str]) -> Row:
        return label, [worded(facts[key][f"level{level}"]) for level in LEVELS]

    def fall(label: str, key: str) -> Row:
        sizes = facts[key]
        awake = size(sizes["awake"])
        return label, [f"{awake} → {size(sizes[f'asleep_level{level}'])}" for level in LEVELS]

    return [
        each("falls asleep in", "sleep_s", duration),
        each("wakes up in", "wake_s", duration),
        fall("memory of the arenas", "arena_rss_bytes"),
        fall("memory of the process", "rss_bytes"),
        each("copied, all cycles", "copied_bytes", size),
        ("digests equal", [_digests(facts, f"level{level}") for level in LEVELS]),
        each("tokens equal", "tokens_equal", _yes),
        each("log probabilities equal", "logprobs_equal", _yes),
    ]


def _digests(facts: dict[str, Any], level: str) -> str:
    if not facts["verified"][level]:
        return "NO"
    times = count(facts["cycles_done"][level], "time")
    return f"{facts['verified_tensors'][level]}, {times}"


def _yes(equal: bool) -> str:
    return "yes" if equal else "NO"
