"""``torpor bench``: options, what a person reads, JSON, exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.serve.conftest import Torpor

from torpor.check import bench_generation, bench_sleep
from torpor.check.bench_options import (
    EngineChoices,
    GenerationOptions,
    Repeats,
    SleepOptions,
)
from torpor.errors import VerificationError
from torpor.serve.bench_words import rate

ONCE = ("--num-iters", 1, "--num-iters-warmup", 0, "--threads", 1)
SHORT = ("--input-len", 3, "--output-len", 2, *ONCE)


@pytest.fixture
def asked(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options that a command line comes to."""
    seen: list[Any] = []

    def note(model: str, options: Any, **_: Any) -> None:
        seen.append((model, options))
        raise KeyboardInterrupt

    for module, name in (
        (bench_generation, "bench_throughput"),
        (bench_generation, "bench_latency"),
        (bench_sleep, "bench_sleep"),
    ):
        monkeypatch.setattr(module, name, note)

    def call(*arguments: object) -> Any:
        torpor("bench", *arguments)
        return seen.pop()

    return call


def test_throughput_takes_every_option(asked: Any) -> None:
    model, options = asked(
        *("throughput", "--model", "m", "--input-len", 5, "--output-len", 6, "--num-prompts", 7),
        *("--num-iters", 8, "--num-iters-warmup", 9, "--seed", 10, "--dtype", "bfloat16"),
        *("--threads", 2, "--max-model-len", 64, "--kv-cache-memory-bytes", 4096),
        *("--batch-invariant", "--sink-placement", "reserved"),
    )
    assert model == "m"
    assert (options.input_len, options.output_len, options.num_prompts) == (5, 6, 7)
    assert options.repeats == Repeats(num_iters=8, num_iters_warmup=9)
    assert options.seed == 10
    assert options.engine == EngineChoices(
        dtype="bfloat16",
        max_model_len=64,
        kv_cache_memory_bytes=4096,
        sink_placement="reserved",
        batch_invariant=True,
        num_threads=2,
    )


def test_latency_takes_a_batch_size(asked: Any) -> None:
    model, options = asked("latency", "--batch-size", 4, "--seed", 3)
    assert (model, options.num_prompts, options.seed) == ("smollm2", 4, 3)
    assert options.engine.given() == {}


def test_each_benchmark_has_its_defaults(asked: Any) -> None:
    for name, num_prompts, num_iters in (("throughput", 16, 3), ("latency", 1, 5)):
        model, options = asked(name)
        assert (model, options) == (
            "smollm2",
            GenerationOptions(
                num_prompts=num_prompts,
                input_len=32,
                output_len=64,
                seed=0,
                repeats=Repeats(num_iters=num_iters, num_iters_warmup=1),
                engine=EngineChoices(),
            ),
        )
    assert asked("sleep")[1] == SleepOptions(
        levels=(1, 2), repeats=Repeats(num_iters=5, num_iters_warmup=1), engine=EngineChoices()
    )


COMMON = {
    *("--model", "-m", "--num-iters", "--num-iters-warmup", "--dtype", "--threads"),
    *("--max-model-len", "--kv-cache-memory-bytes", "--sink-placement", "--json", "--help"),
}
GENERATION = COMMON | {"--input-len", "--output-len", "--seed", "--batch-invariant"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("throughput", GENERATION | {"--num-prompts"}),
        ("latency", GENERATION | {"--batch-size"}),
        ("sleep", COMMON | {"--level"}),
    ],
)
def test_help_lists_the_options_of_each_benchmark(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch, name: str, options: set[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that no name is cut off
    outcome = torpor("bench", name, "--help")
    assert outcome.code == 0
    assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", outcome.out)) == options


def test_sleep_takes_levels(asked: Any) -> None:
    assert asked("sleep")[1].levels == (1, 2)
    assert asked("sleep", "--level", 2)[1].levels == (2,)
    assert asked("sleep", "--level", 2, "--level", 1, "--level", 2)[1].levels == (2, 1)


def test_a_person_reads_throughput(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("bench", "throughput", "-m", tiny_folder, "--num-prompts", 2, *SHORT)
    assert outcome.code == 0
    assert outcome.err == ""
    text = " ".join(outcome.out.split())
    for words in ("Throughput of", "2 prompts at once, 3 tokens in, 2 out", "median", "tokens/s"):
        assert words in text
    for words in ("Medians of 1 run:", "1 thread on", "torch", "load"):
        assert words in text


def test_a_person_reads_latency(torpor: Torpor, tiny_folder: Path) -> None:
    # Forty tokens: of two, a busy machine may make the first take longer than both did before.
    outcome = torpor("bench", "latency", "-m", tiny_folder, *SHORT, "--output-len", 40)
    text = " ".join(outcome.out.split())
    assert outcome.code == 0
    for words in ("a batch of 1", "first token in", "whole batch in", "after the first one"):
        assert words in text


def test_a_person_reads_sleep(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("bench", "sleep", "-m", tiny_folder, *ONCE)
    text = " ".join(outcome.out.split())
    assert outcome.code == 0
    for words in ("Level 1", "Level 2", "falls asleep in", "wakes up in", "digests equal"):
        assert words in text
    assert "from its host copies" in text
    assert "by reading the checkpoint again" in text


def test_json_is_one_object(torpor: Torpor, tiny_folder: Path) -> None:
    facts = torpor("bench", "latency", "-m", tiny_folder, *SHORT, "--json").json
    assert facts["benchmark"] == "latency"
    assert facts["latency_s"]["median"] >= 0
    facts = torpor("bench", "sleep", "-m", tiny_folder, "--level", 2, *ONCE, "--json").json
    assert "level2" in facts
    assert "level1" not in facts


def test_a_person_sees_what_is_under_way(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("bench", "sleep", "-m", tiny_folder, *ONCE, "--json", terminal=True)
    assert outcome.json["benchmark"] == "sleep"
    assert "level 2: 1 of 1" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("throughput", "--num-prompts", 0),
        ("latency", "--batch-size", 0),
        ("latency", "--num-iters", 0),
        ("sleep", "--level", 3),
        ("sleep", "--batch-invariant"),
        ("nothing",),
    ],
)
def test_impossible_options_are_a_usage_error(torpor: Torpor, arguments: tuple[object]) -> None:
    outcome = torpor("bench", *arguments)
    assert outcome.code == 2
    assert "--help" in outcome.err


def test_prompts_that_do_not_fit_are_a_usage_error(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor(
        *("bench", "latency", "-m", tiny_folder, *ONCE),
        *("--input-len", 6, "--output-len", 6, "--max-model-len", 8),
    )
    assert outcome.code == 2
    assert "max_model_len" in outcome.err


def test_a_missing_model_fails(torpor: Torpor) -> None:
    outcome = torpor("bench", "sleep", "-m", "no-such-model", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "ModelNotFoundError"


def test_a_model_that_woke_otherwise_is_a_mismatch(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_: Any, **__: Any) -> None:
        raise VerificationError("w differs", names=("w",))

    monkeypatch.setattr(bench_sleep, "bench_sleep", differ)
    assert torpor("bench", "sleep").code == 3


@pytest.mark.parametrize(
    ("value", "words"), [(0.123456, "0.123"), (11.25, "11.2"), (113.4, "113"), (12345.6, "12,346")]
)
def test_rates_have_three_digits(value: float, words: str) -> None:
    assert rate(value) == words
