"""Ten thousand random steps of the whole engine: every invariant, every block, every token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torpor.engine.llm import LLM
from torpor.engine.requests.prompts import Prompt
from torpor.engine.requests.request import Request
from torpor.params import SamplingParams

NUM_STEPS = 2_000
"""Of each run; there are five."""

SHARED = [list(range(40, 58)), list(range(60, 67))]
"""Beginnings that several prompts share: one longer than a block or two, one shorter."""


def a_prompt(random_: random.Random) -> list[int]:
    prefix = random_.choice([[], *SHARED])
    return [*prefix, *(random_.randrange(3, 300) for _ in range(random_.randint(1, 20)))]


def some_params(random_: random.Random) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": random_.randint(1, 24), "ignore_eos": True}
    kind = random_.randrange(4)
    if kind == 0:
        options |= {"seed": random_.randrange(1000), "temperature": 0.9, "top_p": 0.9, "n": 2}
    elif kind == 1:
        options |= {"seed": random_.randrange(1000), "top_k": 20, "presence_penalty": 0.5}
    else:
        options |= {"temperature": 0}
    if kind == 3:
        options |= {"prompt_logprobs": 1}
    return SamplingParams(**options)


Case = tuple[list[int], SamplingParams]


def cases(seed: int) -> list[Case]:
    random_ = random.Random(seed)
    return [(a_prompt(random_), some_params(random_)) for _ in range(40)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[list[tuple[int, ...]]]:
    """What each case says with nobody beside it and nothing cached."""
    with LLM(tiny_folder, enable_prefix_caching=False) as llm:
        return [
            [entry.token_ids for entry in llm.generate([prompt], params)[0].outputs]
            for prompt, params in cases(0)
        ]


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    # 27 blocks of 4: two or three sequences fill them, so that others are preempted.
    with LLM(
        tiny_folder,
        max_model_len=96,
        block_size=4,
        num_gpu_blocks_override=28,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        scheduling_policy="priority",
    ) as made:
        yield made


class Chaos:
    """Does one random thing after another."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.random = llm, random.Random(seed)
        self.alive: dict[int, tuple[Request, int]] = {}
        self.done: list[tuple[Request, int]] = []
        self.cases = cases(0)
        self.counts = dict.fromkeys(["arrival", "abort", "preempt", "sleep", "reset"], 0)

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.25 and len(self.alive) < 24:
            self.arrive()
        elif dice < 0.26 and self.alive:
            self.abort()
        elif dice < 0.265:
            self.counts["preempt"] += self.llm.core.scheduler.preempt_all()
        elif dice < 0.275:
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.counts["reset"] += 1
        elif dice < 0.295:
            self.nap()
        if self.llm.core.can_step:
            self.llm.core.step()
        self.llm.cache.check()
        self.collect()

    def arrive(self) -> None:
        index = self.random.randrange(len(self.cases))
        prompt, params = self.cases[index]
        priority = self.random.randrange(3)
        request = self.llm.prepare(Prompt(None, tuple(prompt)), params, priority=priority)
        self.llm.submit(request)
        self.alive[request.number] = (request, index)
        self.counts["arrival"] += 1

    def abort(self) -> None:
        number = self.random.choice(list(self.alive))
        request, _ = self.alive.pop(number)
        self.llm.core.abort([request.request_id])
        assert request.finished
        self.counts["abort"] += 1

    def nap(self) -> None:
        level = self.random.choice([1, 1, 2])
        tags: list[str] | None = self.random.choice([None, ["kv_cache"], ["weights"], ["graphs"]])
        self.llm.sleep(level, tags=tags, mode="keep")
        self.llm.cache.check()
        orders: list[list[list[str] | None]] = [[None], [["weights"], ["kv_cache"], ["graphs"]]]
        for part in self.random.choice(orders):
            self.llm.wake_up(part, reload=True if level == 2 else None)
        self.counts["sleep"] += 1

    def collect(self) -> None:
        finished = [number for number, (request, _) in self.alive.items() if request.finished]
        self.done += [self.alive.pop(number) for number in finished]


@pytest.mark.parametrize("seed", range(5))
def test_random_steps(llm: LLM, expected: list[list[tuple[int, ...]]], seed: int) -> None:
    chaos = Chaos(llm, seed)
    while llm.core.scheduler.stats.num_steps < NUM_STEPS:
        chaos.act()
    while llm.core.can_step:
        llm.core.step()
        llm.cache.check()
    chaos.collect()
    assert not chaos.alive
    assert min(chaos.counts.values()) > 3, f"something hardly happened: {chaos.counts}"
    assert llm.core.scheduler.stats.num_preemptions > 100
    assert llm.core.scheduler.stats.num_prefix_hit_tokens > 300
    for request, index in chaos.done:
        found = [tuple(entry.completion.token_ids) for entry in request.sequences]
        assert found == expected[index], f"case {index}"
    assert llm.status()["kv_cache_usage"] == 0
    assert llm.reset_prefix_cache()
    assert llm.verify().ok
