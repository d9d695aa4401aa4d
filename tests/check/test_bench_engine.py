"""The prompts a benchmark makes, and how it has them completed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torpor.check import bench_engine
from torpor.check.bench_engine import Workload, load_engine
from torpor.check.bench_options import EngineChoices
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError
from torpor.params import SamplingParams


class Recorder:
    """Completes prompts with zeros and remembers what it was asked."""

    def __init__(self, shortfall: int = 0) -> None:
        """Answer with ``shortfall`` tokens too few."""
        self.shortfall = shortfall
        self.calls: list[tuple[list[list[int]], SamplingParams]] = []

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], params: SamplingParams, *, use_tqdm: bool
    ) -> Any:
        """Complete."""
        assert not use_tqdm, "a bar would be drawn over the benchmark's own"
        self.calls.append(([prompt["prompt_token_ids"] for prompt in prompts], params))
        assert params.max_tokens is not None
        completion = SimpleNamespace(token_ids=(0,) * (params.max_tokens - self.shortfall))
        return [SimpleNamespace(outputs=(completion,)) for _ in prompts]


def workload(**changes: int) -> Workload:
    chosen = {"vocab_size": 1000, "input_len": 5, "output_len": 3, "seed": 7, **changes}
    return Workload(
        chosen["vocab_size"],
        input_len=chosen["input_len"],
        output_len=chosen["output_len"],
        seed=chosen["seed"],
    )


def test_prompts_are_new_each_time_and_the_same_in_every_run() -> None:
    one, two = workload(), workload()
    first, second = one.prompts(4), one.prompts(4)
    assert [len(prompt) for prompt in first] == [5] * 4
    assert len({tuple(prompt) for prompt in first + second}) == 8
    assert [two.prompts(4), two.prompts(4)] == [first, second]
    assert workload(seed=8).prompts(4) != first


def test_prompts_stay_within_the_vocabulary() -> None:
    ids = {token for prompt in workload(vocab_size=3).prompts(50) for token in prompt}
    assert ids == {0, 1, 2}


def test_completions_are_greedy_and_go_past_end_tokens() -> None:
    llm, load = Recorder(), workload()
    prompts = load.prompts(2)
    assert load.generate(llm, prompts) > 0  # type: ignore[arg-type]
    ((asked, params),) = llm.calls
    assert asked == prompts
    assert (params.temperature, params.ignore_eos, params.max_tokens) == (0, True, 3)


def test_a_first_token_asks_for_one() -> None:
    llm, load = Recorder(), workload()
    load.generate(llm, load.prompts(1), 1)  # type: ignore[arg-type]
    assert llm.calls[0][1].max_tokens == 1


def test_a_completion_that_ends_early_is_refused() -> None:
    load = workload()
    with pytest.raises(ArgumentError, match="5 tokens got 1 of 3 more; make max_model_len larger"):
        load.generate(Recorder(shortfall=2), load.prompts(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["input_len", "output_len"])
def test_a_length_below_one_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is 0; give at least 1"):
        workload(**{name: 0})


def test_an_engine_gets_what_was_chosen_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def engine(model: str, **arguments: Any) -> object:
        seen.update(arguments, model=model)
        return object()

    monkeypatch.setattr(bench_engine, "LLM", engine)
    options = EngineChoices(kv_cache_memory_bytes=4096, batch_invariant=True, num_threads=1)
    load_engine("m", options)
    chosen = {"kv_cache_memory_bytes": 4096, "batch_invariant": True, "num_threads": 1}
    assert seen == {"model": "m", "progress": None, **chosen}


def test_a_real_engine_completes_the_prompts(tiny_folder: Path) -> None:
    llm, load_s = load_engine(tiny_folder, EngineChoices(num_threads=1))
    with llm:
        assert isinstance(llm, LLM)
        assert load_s > 0
        load = workload(vocab_size=llm.get_tokenizer().vocab_size)
        assert load.generate(llm, load.prompts(2)) > 0
