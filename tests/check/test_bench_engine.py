"""The prompts a benchmark makes, and how it has them completed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torpor.check import bench_engine
from torpor.check.bench_engine import Workload, run_engine
from torpor.check.bench_options import EngineChoices, GenerationOptions, Repeats
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError, StateError
from torpor.params import SamplingParams


class Recorder:
    """Completes prompts with zeros and remembers what it was asked."""

    def __init__(self, vocab_size: int = 1000, *, shortfall: int = 0) -> None:
        """Answer with ``shortfall`` tokens too few."""
        self.vocab_size = vocab_size
        self.shortfall = shortfall
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []

    def get_tokenizer(self) -> Any:
        """Of so many ids."""
        return SimpleNamespace(vocab_size=self.vocab_size)

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], params: SamplingParams, *, use_tqdm: bool
    ) -> Any:
        """Complete."""
        assert not use_tqdm, "a bar would be drawn over the benchmark's own"
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        assert params.max_tokens is not None
        completion = SimpleNamespace(token_ids=(0,) * (params.max_tokens - self.shortfall))
        return [SimpleNamespace(outputs=(completion,)) for _ in prompts]


def workload(llm: Any = None, **changes: int) -> Workload:
    chosen = {"num_prompts": 4, "input_len": 5, "output_len": 3, "seed": 7, **changes}
    return Workload(llm or Recorder(), GenerationOptions(**chosen, repeats=Repeats(num_iters=1)))


def test_prompts_are_new_each_time_and_the_same_in_every_run() -> None:
    one, two = workload(), workload()
    first, second = one.prompts(), one.prompts()
    assert [len(prompt) for prompt in first] == [5] * 4
    assert len({tuple(prompt) for prompt in first + second}) == 8
    assert [two.prompts(), two.prompts()] == [first, second]
    assert workload(seed=8).prompts() != first


def test_prompts_stay_within_the_vocabulary() -> None:
    prompts = workload(Recorder(vocab_size=3), num_prompts=50).prompts()
    assert {token for prompt in prompts for token in prompt} == {0, 1, 2}


@pytest.mark.parametrize("output_len", [1, 3])
def test_completions_are_greedy_and_go_past_end_tokens(output_len: int) -> None:
    llm = Recorder()
    assert workload(llm).generate(output_len) > 0
    ((asked, params),) = llm.calls
    assert asked == workload().prompts()
    assert (params.temperature, params.ignore_eos, params.max_tokens) == (0, True, output_len)


def test_a_completion_that_ends_early_is_refused() -> None:
    with pytest.raises(ArgumentError, match="5 tokens got 1 of 3 more; make max_model_len larger"):
        workload(Recorder(shortfall=2)).generate(3)


def test_an_engine_gets_what_was_chosen_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def engine(model: str, **arguments: Any) -> Any:
        seen.update(arguments, model=model)
        return nullcontext("the engine")

    monkeypatch.setattr(bench_engine, "LLM", engine)
    options = EngineChoices(kv_cache_memory_bytes=4096, batch_invariant=True, num_threads=1)
    assert run_engine("m", options, lambda llm: [llm]).measured == ["the engine"]
    chosen = {"kv_cache_memory_bytes": 4096, "batch_invariant": True, "num_threads": 1}
    assert seen == {"model": "m", "progress": None, **chosen}


def test_a_real_engine_is_measured_awake_and_closed_afterwards(tiny_folder: Path) -> None:
    seen: list[LLM] = []

    def measure(llm: LLM) -> float:
        seen.append(llm)
        return workload(llm).generate(2)

    run = run_engine(tiny_folder, EngineChoices(num_threads=1), measure)
    assert run.measured > 0
    assert run.load_s > 0
    with pytest.raises(StateError, match="is closed"):
        seen[0].generate("a")
