"""The same work gives the same bits; in batch-invariant mode, whatever the schedule."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.engine.conftest import TINY, tiny_weights, write_tokenizer

from torpor.engine.llm import LLM
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams

IDS = random.Random(0).choices(range(3, 300), k=70)
PROMPTS = [IDS[:9], IDS[:64], IDS[5:6], [*IDS[:32], 7, 8], IDS[40:], IDS[20:37], IDS[:33]]
"""Of 1 to 64 tokens, five of them beginning like another."""

Answer = tuple[Any, ...]


def params_of(index: int) -> SamplingParams:
    """Greedy and sampled, with and without what looks at the whole vocabulary."""
    options: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "logprobs": 4}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 11, "n": 2},
        {"temperature": 0, "prompt_logprobs": 3},
        {"seed": 12, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3},
    ]
    return SamplingParams(**options | kinds[index % len(kinds)])


PARAMS = [params_of(index) for index in range(len(PROMPTS))]


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Tokens, texts and every bit of every log probability."""
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[entry.token_ids for entry in output.outputs] for output in outputs]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, max_model_len=96, **options)


# -- the same schedule --------------------------------------------------------------------------

SCHEDULES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, chunks, preemption": {
        "block_size": 4,
        "num_gpu_blocks_override": 25,
        "max_num_batched_tokens": 24,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "float16, chunks": {"dtype": "float16", "max_num_batched_tokens": 24},
}
ORDERS: list[list[list[str] | None]] = [
    [None],
    [["weights"], ["kv_cache"]],
    [["kv_cache"], ["weights"]],
    [["graphs"], ["kv_cache"], ["weights"]],
    [["weights", "kv_cache", "graphs"]],
]


@pytest.fixture(params=SCHEDULES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SCHEDULES[request.param]


def run(llm: LLM) -> list[Answer]:
    """The same requests on an empty prefix cache, as an engine that has just started has."""
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.finished for output in outputs)
    return answers(outputs)


def test_the_same_schedule_gives_the_same_bits_again_and_after_a_restart(
    tiny_folder: Path, options: dict[str, Any]
) -> None:
    with engine(tiny_folder, **options) as llm:
        expected = run(llm)
        assert run(llm) == expected
        llm.generate(PROMPTS[1:4], SamplingParams(max_tokens=5))
        assert run(llm) == expected
    with engine(tiny_folder, **options) as llm:
        assert run(llm) == expected


def test_a_sleep_in_between_changes_no_bit(tiny_folder: Path, options: dict[str, Any]) -> None:
    with engine(tiny_folder, **options) as llm:
        expected = run(llm)
        for level, order in itertools.product((1, 2), ORDERS):
            llm.sleep(level)
            for tags in order:
                llm.wake_up(tags, reload=True if level == 2 else None)
            assert run(llm) == expected, f"level {level}, {order}"


def test_weights_that_come_back_bring_the_bits_back(
    tiny_folder: Path, options: dict[str, Any]
) -> None:
    with engine(tiny_folder, **options) as llm:
        expected = run(llm)
        dtype = llm.core._runner._model.lm_head.weight.dtype
        for seed in (1, 0):
            llm.update_weights((name, w.to(dtype)) for name, w in tiny_weights(seed).items())
            assert (run(llm) == expected) == (seed == 0)


def test_another_seed_gives_another_text(tiny_folder: Path) -> None:
    sampled = SamplingParams(max_tokens=14, ignore_eos=True)
    with engine(tiny_folder, seed=1) as first, engine(tiny_folder, seed=2) as second:
        assert tokens(first.generate(PROMPTS, sampled)) != tokens(second.generate(PROMPTS, sampled))


# -- any schedule -------------------------------------------------------------------------------


class Company:
    """Runs the requests in many ways, each time on an engine of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder = folder
        self._options = options
        self._engine: LLM | None = None

    def alone(self) -> list[RequestOutput]:
        """One after another, nothing cached."""
        with self._llm(enable_prefix_caching=False) as llm:
            pairs = zip(PROMPTS, PARAMS, strict=True)
            return [llm.generate([prompt], params)[0] for prompt, params in pairs]

    def ways(self) -> Iterator[tuple[str, list[RequestOutput]]]:
        """Names of schedules and what they answer."""
        yield from self._with_hits()
        yield from self._in_orders()
        for budget in (1, 3, 16, 41):
            with self._llm(max_num_batched_tokens=budget, max_num_seqs=min(budget, 4)) as llm:
                yield f"{budget} tokens a step", llm.generate(PROMPTS, PARAMS)
        for budget in (9, 64):
            few = {"block_size": 4, "num_gpu_blocks_override": 25}
            with self._llm(**few, max_num_batched_tokens=budget) as llm:
                outputs = llm.generate(PROMPTS, PARAMS)
                assert llm.status()["num_preemptions"] > 2
                yield f"preemption, {budget} tokens a step", outputs
        with self._llm(max_num_batched_tokens=16) as llm:
            yield "kept through sleep", self._through_sleep(llm)

    def _with_hits(self) -> Iterator[tuple[str, list[RequestOutput]]]:
        for block_size in (1, 4, 16):
            with self._llm(block_size=block_size) as llm:
                yield f"one batch, blocks of {block_size}", llm.generate(PROMPTS, PARAMS)
                outputs = llm.generate(PROMPTS, PARAMS)
                assert sum(output.num_cached_tokens or 0 for output in outputs) > 64
                yield f"hits, blocks of {block_size}", outputs

    def _in_orders(self) -> Iterator[tuple[str, list[RequestOutput]]]:
        random_ = random.Random(2)
        with self._llm(max_num_batched_tokens=33) as llm:
            for number in range(3):
                order = random_.sample(range(len(PROMPTS)), len(PROMPTS))
                fill = [random_.choices(range(3, 300), k=5) for _ in range(number * 9)]
                prompts = [*(PROMPTS[i] for i in order), *fill]
                params = [*(PARAMS[i] for i in order), *[params_of(1)] * len(fill)]
                outputs = llm.generate(prompts, params)
                yield f"order {order}", [outputs[order.index(i)] for i in range(len(order))]

    def _through_sleep(self, llm: LLM) -> list[RequestOutput]:
        prompts = llm.reader.read_all(PROMPTS)
        requests = [llm.prepare(*pair) for pair in zip(prompts, PARAMS, strict=True)]
        for request in requests:
            llm.submit(request)
        for level, num_steps in ((1, 4), (2, 9), (1, 12)):
            for _ in range(num_steps):
                llm.core.step()
            assert llm.core.can_step, "nothing is left to keep"
            llm.sleep(level, mode="keep")
            llm.wake_up(reload=True if level == 2 else None)
        while llm.core.can_step:
            llm.core.step()
        return [llm.output(request) for request in requests]

    def _llm(self, **options: Any) -> LLM:
        return engine(self._folder, **self._options, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_batch_invariant_bits_depend_on_the_request_alone(tiny_folder: Path, dtype: str) -> None:
    company = Company(tiny_folder, dtype=dtype, batch_invariant=True)
    expected = answers(company.alone())
    for name, outputs in company.ways():
        assert answers(outputs) == expected, name


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    """The tiny model with a context of several hundred tokens."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 640}))
    save_file(tiny_weights(0), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_batch_invariant_bits_of_long_texts(long_folder: Path) -> None:
    """Attention that goes over its keys in several tiles; blocks of any power of two up to 256."""
    ids = random.Random(1).choices(range(3, 300), k=600)
    prompts = [ids, ids[:250], [*ids[:400], *ids[:60]], ids[300:303]]
    params = SamplingParams(seed=2, max_tokens=10, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = {"max_model_len": 640, "batch_invariant": True}
    with LLM(long_folder, **options, enable_prefix_caching=False) as llm:
        expected = [answers(llm.generate([prompt], params))[0] for prompt in prompts]
    ways: list[dict[str, Any]] = [
        {"block_size": 1, "max_num_batched_tokens": 250},
        {"block_size": 4, "num_gpu_blocks_override": 161, "max_num_batched_tokens": 301},
        {"block_size": 256},
    ]
    for way in ways:
        with LLM(long_folder, **options, **way) as llm:
            assert answers(llm.generate(prompts, params)) == expected, way
            again = llm.generate(prompts[::-1], params)[::-1]
            assert any(output.num_cached_tokens for output in again)
            assert answers(again) == expected, f"again, {way}"


def test_tokens_depend_on_the_request_alone(tiny_folder: Path) -> None:
    company = Company(tiny_folder)
    expected = tokens(company.alone())
    for name, outputs in company.ways():
        assert tokens(outputs) == expected, name
