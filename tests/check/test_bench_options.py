"""What can be asked of a benchmark."""

from __future__ import annotations

import pytest

from torpor.check.bench_options import (
    EngineChoices,
    GenerationOptions,
    Repeats,
    SleepOptions,
)
from torpor.errors import ArgumentError


class Notes:
    """Notes what it is told."""

    def __init__(self) -> None:
        """Begin empty."""
        self.told: list[tuple[str, int, int]] = []

    def measuring(self, what: str, iteration: int, num_iters: int) -> None:
        """Take a note."""
        self.told.append((what, iteration, num_iters))


def generation(**changes: int) -> GenerationOptions:
    return GenerationOptions(**{"num_prompts": 1, **changes}, repeats=Repeats(num_iters=1))


def test_only_chosen_arguments_reach_the_engine() -> None:
    assert EngineChoices().given() == {}
    chosen = EngineChoices(dtype="bfloat16", num_threads=2)
    assert chosen.given() == {"dtype": "bfloat16", "num_threads": 2}


def test_warm_ups_come_first_and_do_not_count() -> None:
    notes = Notes()
    repeats = Repeats(num_iters=3, num_iters_warmup=2)
    assert list(repeats.iterations("it", notes)) == [False, False, True, True, True]
    assert notes.told == [("it", number, 3) for number in (0, 0, 1, 2, 3)]


def test_no_warm_up_is_allowed() -> None:
    assert list(Repeats(num_iters=1, num_iters_warmup=0).iterations("it")) == [True]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Repeats(num_iters=0), "num_iters is 0; give at least 1"),
        (lambda: Repeats(num_iters=1, num_iters_warmup=-1), "num_iters_warmup is -1"),
        (lambda: generation(num_prompts=0), "num_prompts is 0; give at least 1"),
        (lambda: generation(num_prompts=-2), "num_prompts is -2"),
        (lambda: generation(input_len=0), "input_len is 0; give at least 1"),
        (lambda: generation(output_len=0), "output_len is 0; give at least 1"),
        (lambda: SleepOptions(levels=(1, 3)), "level is 3; give 1 or 2"),
        (lambda: SleepOptions(levels=()), "levels is empty; give 1 or 2"),
    ],
)
def test_impossible_values_are_refused(make: type[object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
