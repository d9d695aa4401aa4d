"""A soak of the asynchronous engine: random load, a sleep every few seconds, every answer compared.

Run: python benchmarks/soak_cpu.py [--minutes 10] [--model smollm2] [--max-model-len 512]
     [--json FILE]

First every case (a prompt and its parameters) is answered alone, with nothing cached. Then clients
send random cases for the given time, some leaving early, while a keeper puts the model to sleep at
random levels, tags and modes, wakes it in random order, reloads the weights and resets the prefix
cache. Every answer that ended by itself must be the reference's, token by token. Where it differs,
it counts as a tie only if the log probabilities of both tokens there are closer than 1e-4. Resident
memory is compared asleep, at the start and at the end. A line of progress comes every half minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torpor
from torpor.check.bench_scene import load_average, scene_since
from torpor.errors import AsleepError
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams
from torpor.sleep.procfs import process_rss_bytes

TIE = 1e-4
NUM_CASES = 24
NUM_CLIENTS = 6
WARM_UP = 0.15
"""Share of the sleeps that the memory of the end is not compared with."""

TELL_EVERY_S = 30.0
MAX_POINTS = 200
"""Of the series in the result."""

Case = tuple[list[int], SamplingParams]
Point = tuple[float, int]
"""Seconds since the load began, and bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_before = load_average()
    soak = Soak(options.model, options.seed, options.threads, options.max_model_len)
    asyncio.run(soak.run(options.minutes * 60))
    result = {
        **soak.result(),
        **scene_since(load_before).to_dict(),
        "poison": os.environ.get("TORPOR_POISON"),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    raise SystemExit(0 if result["ok"] else 1)


def cases(vocab_size: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    shared = [[rng.randrange(100, vocab_size) for _ in range(length)] for length in (48, 90)]
    made = []
    for index in range(NUM_CASES):
        prompt = [*rng.choice([[], *shared])]
        prompt += [rng.randrange(100, vocab_size) for _ in range(rng.randint(1, 60))]
        common: dict[str, Any] = {
            "max_tokens": rng.randint(4, 40),
            "ignore_eos": True,
            "logprobs": 1,
        }
        if index % 3:
            params = SamplingParams(temperature=0, **common)
        else:
            params = SamplingParams(temperature=0.8, top_p=0.9, seed=index, **common)
        made.append((prompt, params))
    return made


class Soak:
    """The engine, its clients and its keeper."""

    def __init__(self, model: str, seed: int, threads: int, max_model_len: int) -> None:
        self._model, self._seed = model, seed
        self._rng = random.Random(seed + 1)
        self._options: dict[str, Any] = {"max_model_len": max_model_len, "num_threads": threads}
        self.counts: dict[str, int] = {}
        self.wrong: list[dict[str, Any]] = []
        self.asleep_rss: list[Point] = []
        self._sent = 0
        self._start_s = time.monotonic()

    async def run(self, duration_s: float) -> None:
        with torpor.LLM(self._model, enable_prefix_caching=False, **self._options) as llm:
            tell(f"answering {NUM_CASES} cases alone")
            vocab_size = llm.get_tokenizer().vocab_size
            self._cases = cases(vocab_size, self._seed)
            self._expected = [llm.generate([prompt], params)[0] for prompt, params in self._cases]
        # 200 blocks: a few clients fill them, so that some are preempted.
        async with torpor.AsyncLLM(
            self._model, num_gpu_blocks_override=200, max_num_batched_tokens=128, **self._options
        ) as engine:
            self._start_s = time.monotonic()
            self._until = self._start_s + duration_s
            telling = asyncio.create_task(self._tell())
            try:
                await asyncio.gather(
                    self._keep(engine), *(self._ask(engine) for _ in range(NUM_CLIENTS))
                )
            finally:
                telling.cancel()
            assert engine.get_num_unfinished_requests() == 0
            await engine.reset_prefix_cache()
            self.status = engine.status()
            self.verified = (await engine.verify()).ok

    async def _ask(self, engine: torpor.AsyncLLM) -> None:
        while time.monotonic() < self._until:
            index = self._rng.randrange(NUM_CASES)
            prompt, params = self._cases[index]
            leave_after = self._rng.randint(1, 5) if self._rng.random() < 0.1 else None
            self._sent += 1
            outputs: list[RequestOutput] = []
            async with aclosing(engine.generate(prompt, params)) as stream:
                async for output in stream:
                    outputs.append(output)
                    if len(outputs) == leave_after:
                        break
            self._judge(index, outputs[-1])

    def _judge(self, index: int, output: RequestOutput) -> None:
        completion, expected = output.outputs[0], self._expected[index].outputs[0]
        kind = completion.finish_reason or "left"
        self.counts[kind] = self.counts.get(kind, 0) + 1
        pairs = zip(completion.token_ids, expected.token_ids, strict=False)
        different = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        whole = kind in ("abort", "left") or len(completion.token_ids) == len(expected.token_ids)
        if different is None and whole:
            return
        if different is not None and _is_tie(completion, expected, different):
            self.counts["tie"] = self.counts.get("tie", 0) + 1
            return
        self.wrong.append({"case": index, "at": different, "finish_reason": kind})

    async def _keep(self, engine: torpor.AsyncLLM) -> None:
        while time.monotonic() < self._until:
            await asyncio.sleep(self._rng.uniform(0.5, 4.0))
            what = self._rng.random()
            if what < 0.08:
                await engine.reload_weights()
                self._count("reload")
            elif what < 0.16:
                await engine.reset_prefix_cache(reset_running_requests=True)
                self._count("reset")
            else:
                await self._nap(engine)

    async def _nap(self, engine: torpor.AsyncLLM) -> None:
        level = self._rng.choice([0, 1, 1, 2, 2])
        mode = self._rng.choice(["keep", "keep", "wait", "abort"])
        tags = (
            self._rng.choice([None] * 5 + [["kv_cache"], ["weights"], ["graphs"]])
            if level
            else None
        )
        try:
            await engine.sleep(level, tags, mode)
        except AsleepError:
            self._count("refused")
            return
        self._count(f"sleep {level} {mode}")
        if level and tags is None:
            await asyncio.sleep(0.05)
            self.asleep_rss.append((time.monotonic() - self._start_s, process_rss_bytes()))
        orders: list[list[list[str] | None]] = [[None], [["weights"], None], [["kv_cache"], None]]
        for part in self._rng.choice(orders) if level else [None]:
            # A wake that names tags leaves the filling of discarded weights to its caller.
            await engine.wake_up(part, reload=True if level == 2 else None)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            tell(self.progress())

    def progress(self) -> str:
        """How far it has come, in one line."""
        sleeps = sum(number for what, number in self.counts.items() if what.startswith("sleep"))
        words = [
            f"{time.monotonic() - self._start_s:.0f} s: {self._sent} sent",
            f"{sleeps} sleeps",
            f"{len(self.wrong)} wrong",
        ]
        if self.asleep_rss:
            words.append(f"{self.asleep_rss[-1][1] / 1e6:.1f} MB when last asleep")
        return ", ".join(words)

    def result(self) -> dict[str, Any]:
        """Everything that was seen, and whether it is as it must be."""
        rss = [nbytes for _, nbytes in self.asleep_rss[int(len(self.asleep_rss) * WARM_UP) :]]
        if len(rss) < 3:
            raise SystemExit(f"the model slept {len(rss)} times after the warm-up; soak it longer")
        third = len(rss) // 3
        first, last = statistics.median(rss[:third]), statistics.median(rss[-third:])
        growth = last / first - 1
        series = thinned(self.asleep_rss)
        return {
            "model": self._model,
            "max_model_len": self._options["max_model_len"],
            "sent": self._sent,
            "counts": self.counts,
            "wrong": self.wrong,
            "num_steps": self.status["num_steps"],
            "num_preemptions": self.status["num_preemptions"],
            "num_prefix_hit_tokens": self.status["num_prefix_hit_tokens"],
            "kv_cache_usage_at_end": self.status["kv_cache_usage"],
            "asleep_rss_bytes": {"first_third": first, "last_third": last, "growth": growth},
            "asleep_rss_series": {
                "seconds": [round(at_s, 1) for at_s, _ in series],
                "MB": [nbytes / 1e6 for _, nbytes in series],
            },
            "verified": self.verified,
            "ok": not self.wrong and growth <= 0.01 and self.verified,
        }


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most so many points, evenly from the first to the last."""
    if len(points) <= most:
        return list(points)
    return [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]


def tell(words: str) -> None:
    """Tell whoever waits."""
    print(words, file=sys.stderr, flush=True)


def _is_tie(found: Any, expected: Any, at: int) -> bool:
    """Whether both tokens are as likely as each other in the reference, to the last bits."""
    entries = expected.logprobs[at]
    ours, theirs = found.token_ids[at], expected.token_ids[at]
    if ours not in entries:
        return False
    return abs(entries[ours].logprob - entries[theirs].logprob) < TIE


if __name__ == "__main__":
    main()
