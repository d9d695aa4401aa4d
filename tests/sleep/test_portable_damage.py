"""A million damaged tensors, in batches: each must change both lanes of the portable digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from torpor.sleep.portable import LANES, Lane, Words, lane_sums, mix_in_place, position_keys

NUM_WORDS = 24
BATCH = 16_384
TRIALS = 1_000_000
KINDS = ("flip", "negate", "swap", "move")

Mix = Callable[[Words, Lane, Words], None]
Mask = npt.NDArray[np.bool_]


def contents(random: np.random.Generator) -> list[Words]:
    """One batch (BATCH, NUM_WORDS) for each kind of content that weights have."""
    shape = (BATCH, NUM_WORDS)
    normal = random.standard_normal((BATCH, NUM_WORDS * 2), dtype=np.float32)
    halves = random.standard_normal((BATCH, NUM_WORDS * 4), dtype=np.float32).view(np.uint32)
    return [
        normal.view(np.uint64),
        (halves >> 16).astype(np.uint16).view(np.uint64),  # bfloat16
        np.zeros(shape, np.uint64),
        np.ones((BATCH, NUM_WORDS * 2), np.float32).view(np.uint64),
        random.integers(0, 1 << 63, shape, dtype=np.uint64),
        random.integers(-8, 8, (BATCH, NUM_WORDS * 8), dtype=np.int8).view(np.uint64),
        np.broadcast_to(np.arange(NUM_WORDS, dtype=np.uint64), shape).copy(),
    ]


def places(random: np.random.Generator, count: int) -> npt.NDArray[np.intp]:
    """(BATCH, count) distinct word indices in each row, in random order."""
    return np.argsort(random.random((BATCH, NUM_WORDS)), axis=1)[:, :count]


def masks(random: np.random.Generator, kind: str, count: int) -> Words:
    """(BATCH, 1 or count) bits to touch in a word.

    A flip takes all 64 positions in turn, and in every other row another one in each word. Negate
    takes sign bits of float32 or bfloat16 lanes. Swap and move take one bit or the whole word.
    """
    place = np.arange(BATCH, dtype=np.uint64)
    bits = np.uint64(1) << place % np.uint64(64)
    if kind == "flip":
        step = random.integers(1, 64, (BATCH, 1), dtype=np.uint64)
        step[place % np.uint64(128) < 64] = 0
        each = place[:, None] + step * np.arange(count, dtype=np.uint64)
        return np.uint64(1) << each % np.uint64(64)
    if kind == "negate":
        lanes = random.integers(0, 2, (BATCH, 4), dtype=np.uint64)
        half = lanes @ (np.uint64(1) << np.array([15, 31, 47, 63], dtype=np.uint64))
        single = lanes[:, :2] @ (np.uint64(1) << np.array([31, 63], dtype=np.uint64))
        bits = np.where(np.arange(BATCH) % 2 == 0, half, single)
    elif kind in ("swap", "move"):
        whole = np.uint64((1 << 64) - 1)
        bits = np.where(random.random(BATCH) < 0.5, whole, bits)
    return bits[:, None]


def damaged(random: np.random.Generator, words: Words, kind: str, count: int) -> Words:
    """A copy of ``words`` with ``count`` words of each row damaged."""
    mask = masks(random, kind, count)
    if kind in ("flip", "negate"):
        change = np.zeros_like(words)
        np.put_along_axis(change, places(random, count), mask, axis=1)
        return words ^ change
    source = np.broadcast_to(np.arange(NUM_WORDS), words.shape).copy()
    if kind == "swap":
        chosen = places(random, 2 * count)
        partner = np.concatenate([chosen[:, count:], chosen[:, :count]], axis=1)
        np.put_along_axis(source, chosen, partner, axis=1)
    else:
        # A run of ``count`` words leaves its place; what lies between closes up.
        start = random.integers(0, NUM_WORDS - count, (BATCH, 1))
        end = random.integers(start + count + 1, NUM_WORDS + 1)
        inside = (source >= start) & (source < end)
        source = np.where(inside, start + (source - start + count) % (end - start), source)
    moved = np.take_along_axis(words, source, axis=1)
    return words & ~mask | moved & mask


def sums(words: Words, lane: Lane, mix: Mix) -> Words:
    mixed = words + position_keys(NUM_WORDS, lane)
    mix(mixed, lane, np.empty_like(mixed))
    return mixed.sum(axis=1, dtype=np.uint64)


def batches(seed: int, kinds: tuple[str, ...]) -> Iterator[tuple[Words, Words]]:
    """Yield (words, damaged words) for every content, kind and number of words."""
    random = np.random.default_rng(seed)
    for words in contents(random):
        for kind in kinds:
            for count in (1, 2, 3, 4):
                yield words, damaged(random, words, kind, count)


def misses(words: Words, broken: Words, mix: Mix = mix_in_place) -> tuple[Mask, list[Mask]]:
    """Which rows were damaged at all, and for each lane which of those it does not notice."""
    changed = (words != broken).any(axis=1)
    blind = [changed & (sums(words, lane, mix) == sums(broken, lane, mix)) for lane in LANES]
    return changed, blind


def test_batched_sums_are_those_of_the_digest() -> None:
    words, broken = next(batches(seed=5, kinds=("move",)))
    for rows in (words, broken):
        batched = np.stack([sums(rows, lane, mix_in_place) for lane in LANES], axis=1)
        for row, expected in zip(rows[:50], batched[:50], strict=True):
            assert lane_sums(row.view(np.uint8)) == tuple(expected.tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_damage_touches_the_words_it_should(kind: str, count: int) -> None:
    random = np.random.default_rng(7)
    words = contents(random)[4]
    touched = (words != damaged(random, words, kind, count)).sum(axis=1)
    limit = {"flip": count, "negate": count, "swap": 2 * count, "move": NUM_WORDS}[kind]
    assert touched.max() == limit
    assert (touched > 0).mean() > 0.5


def test_a_million_damaged_tensors_without_a_miss() -> None:
    trials, unnoticed, per_lane = 0, 0, np.zeros(len(LANES), dtype=np.int64)
    for words, broken in batches(seed=11, kinds=KINDS):
        changed, blind = misses(words, broken)
        trials += int(changed.sum())
        unnoticed += int(np.logical_and.reduce(blind).sum())
        per_lane += [int(lane.sum()) for lane in blind]
    assert trials >= TRIALS
    assert unnoticed == 0
    assert per_lane.tolist() == [0, 0]


def test_one_round_would_miss_double_sign_flips() -> None:
    def one_round(x: Words, lane: Lane, scratch: Words) -> None:
        x *= np.uint64(lane.first)
        np.right_shift(x, np.uint64(30), out=scratch)
        x ^= scratch

    random = np.random.default_rng(13)
    words = contents(random)[0]
    changed, blind = misses(words, damaged(random, words, "negate", 2), one_round)
    assert blind[0].sum() > changed.sum() // 100
    assert np.logical_and.reduce(blind).any()
