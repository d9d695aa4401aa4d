"""The three benchmarks on a tiny model: what they count, and what they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.check.test_bench_options import Notes

from torpor.check.bench_engine import Workload
from torpor.check.bench_generation import bench_latency, bench_throughput
from torpor.check.bench_options import (
    EngineChoices,
    GenerationOptions,
    Repeats,
    SleepOptions,
)
from torpor.check.bench_sleep import bench_sleep
from torpor.errors import ArgumentError

ONE_THREAD = EngineChoices(num_threads=1)
TWICE = Repeats(num_iters=2, num_iters_warmup=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the n-th generation take n seconds; the tokens asked of each are noted."""
    asked: list[int] = []
    real = Workload.generate

    def generate(self: Workload, output_len: int) -> float:
        real(self, output_len)
        asked.append(output_len)
        return float(len(asked))

    monkeypatch.setattr(Workload, "generate", generate)
    return asked


def test_throughput_counts_tokens_of_all_prompts(tiny_folder: Path, clock: list[int]) -> None:
    notes = Notes()
    options = GenerationOptions(
        input_len=4, output_len=2, num_prompts=3, repeats=TWICE, engine=ONE_THREAD
    )
    result = bench_throughput(tiny_folder, options, listener=notes)
    assert clock == [2, 2, 2]
    assert result.elapsed_s.samples == (2.0, 3.0)
    assert result.output_tokens_per_s.samples == (3.0, 2.0)
    assert result.total_tokens_per_s.samples == (9.0, 6.0)
    assert result.requests_per_s.samples == (1.5, 1.0)
    assert [entry[1] for entry in notes.told] == [0, 1, 2]


def test_latency_separates_the_first_token(tiny_folder: Path, clock: list[int]) -> None:
    options = GenerationOptions(
        input_len=4, output_len=3, num_prompts=2, repeats=TWICE, engine=ONE_THREAD
    )
    result = bench_latency(tiny_folder, options)
    assert clock == [1, 3] * 3
    assert result.first_token_s.samples == (3.0, 5.0)
    assert result.elapsed_s.samples == (4.0, 6.0)
    assert result.step_s == (5.0 - 4.0) / 2
    assert result.output_tokens_per_s.samples == (1.5, 1.0)


def test_one_token_has_no_step(tiny_folder: Path) -> None:
    repeats = Repeats(num_iters=1, num_iters_warmup=0)
    options = GenerationOptions(
        num_prompts=1, input_len=4, output_len=1, repeats=repeats, engine=ONE_THREAD
    )
    assert bench_latency(tiny_folder, options).step_s is None


def test_sleep_has_phases_and_bytes_of_each_level(tiny_folder: Path) -> None:
    notes = Notes()
    result = bench_sleep(
        tiny_folder, SleepOptions(repeats=TWICE, engine=ONE_THREAD), listener=notes
    )
    assert [entry[:2] for entry in notes.told] == [
        (f"level {level}", number) for level in (1, 2) for number in (0, 1, 2)
    ]
    facts = result.to_dict()
    for level in ("level1", "level2"):
        entry = facts[level]
        assert len(entry["sleep_s"]["samples"]) == len(entry["copied_bytes"]) == 2
        assert {"fingerprint", "release"} <= set(entry["sleep_phase_s"])
        assert {"map", "verify"} <= set(entry["wake_phase_s"])
        assert sum(entry["released_bytes"].values()) == sum(facts["owned_bytes"].values())
        assert entry["arena_rss_bytes"]["asleep"] == 0 < entry["arena_rss_bytes"]["awake"]
        assert entry["verified_tensors"] == entry["verifiable_tensors"] > 0
    assert not facts["level1"]["reloaded"]
    assert facts["level2"]["reloaded"]


def test_a_phase_is_never_longer_than_its_call(tiny_folder: Path) -> None:
    result = bench_sleep(tiny_folder, SleepOptions(levels=(1,), repeats=TWICE, engine=ONE_THREAD))
    (level,) = result.levels
    assert sum(figure.min for figure in level.sleep_phase_s.values()) <= level.sleep_s.max
    assert sum(figure.min for figure in level.wake_phase_s.values()) <= level.wake_s.max


@pytest.mark.parametrize(("variable", "poisoned"), [("1", True), ("0", False)])
def test_sleep_tells_whether_memory_was_poisoned(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, poisoned: bool
) -> None:
    monkeypatch.setenv("TORPOR_POISON", variable)
    once = Repeats(num_iters=1, num_iters_warmup=0)
    options = SleepOptions(levels=(1,), repeats=once, engine=ONE_THREAD)
    assert bench_sleep(tiny_folder, options).to_dict()["poisoned"] is poisoned


def test_results_are_json(tiny_folder: Path) -> None:
    once = Repeats(num_iters=1, num_iters_warmup=0)
    results = (
        bench_throughput(
            tiny_folder,
            GenerationOptions(
                input_len=2, output_len=2, num_prompts=1, repeats=once, engine=ONE_THREAD
            ),
        ),
        bench_latency(
            tiny_folder,
            GenerationOptions(
                num_prompts=1, input_len=2, output_len=2, repeats=once, engine=ONE_THREAD
            ),
        ),
        bench_sleep(tiny_folder, SleepOptions(levels=(2,), repeats=once, engine=ONE_THREAD)),
    )
    names = []
    for result in results:
        facts = json.loads(json.dumps(result.to_dict()))
        names.append(facts["benchmark"])
        assert facts["model"] == str(tiny_folder)
        assert facts["engine"] == {"num_threads": 1}
        assert {"device", "rig", "num_threads", "commit", "load_average_1min"} <= set(facts)
    assert names == ["throughput", "latency", "sleep"]


@pytest.mark.parametrize(
    ("bench", "keys"),
    [
        (
            bench_throughput,
            [
                *("benchmark", "model", "engine", "input_len", "output_len", "num_prompts"),
                *("num_iters", "num_iters_warmup", "seed", "load_s", "elapsed_s"),
                *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"),
            ],
        ),
        (
            bench_latency,
            [
                *("benchmark", "model", "engine", "input_len", "output_len", "batch_size"),
                *("num_iters", "num_iters_warmup", "seed", "load_s", "first_token_s"),
                *("latency_s", "step_s", "output_tokens_per_s"),
            ],
        ),
    ],
)
def test_the_keys_of_a_result_are_these(tiny_folder: Path, bench: Any, keys: list[str]) -> None:
    options = GenerationOptions(
        num_prompts=2, input_len=3, output_len=4, seed=5, repeats=TWICE, engine=ONE_THREAD
    )
    facts = bench(tiny_folder, options).to_dict()
    scene = ["device", "rig", "num_threads", "commit", "load_average_1min"]
    assert list(facts) == keys + scene
    given = ("input_len", "output_len", keys[5], "num_iters", "num_iters_warmup", "seed")
    assert [facts[name] for name in given] == [3, 4, 2, 2, 1, 5]


def test_a_completion_that_does_not_fit_is_refused(tiny_folder: Path) -> None:
    options = GenerationOptions(
        num_prompts=1,
        input_len=6,
        output_len=6,
        repeats=TWICE,
        engine=EngineChoices(num_threads=1, max_model_len=8),
    )
    with pytest.raises(ArgumentError, match="6 tokens got 2 of 6 more; make max_model_len larger"):
        bench_throughput(tiny_folder, options)
