"""A scheduler's world without torch: sequences whose next token follows from those before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from torpor.cache.manager import Epochs, KVCacheManager
from torpor.cache.spec import KVSpec
from torpor.engine.requests.prompts import Prompt
from torpor.engine.requests.request import Request, Sequence
from torpor.engine.steps.scheduler import Scheduler, SchedulerConfig
from torpor.engine.steps.step import Step
from torpor.params import SamplingParams


def next_token(token_ids: Seq[int]) -> int:
    """What a model would say: any function of all tokens before."""
    value = 17
    for token in token_ids:
        value = (value * 31 + token + 1) % 1009
    return value % 50


class FakeCompletion:
    """Ends after a number of tokens."""

    def __init__(self, index: int, max_tokens: int) -> None:
        self.index = index
        self.max_tokens = max_tokens
        self.token_ids: list[int] = []


@dataclass
class World:
    """A scheduler over a real cache manager, and a cache whose slots remember what was written."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    window: int | None = None
    epochs: Epochs = field(default_factory=lambda: Epochs(weights=1, kv=1))

    def __post_init__(self) -> None:
        spec = KVSpec(
            block_size=self.block_size,
            num_kv_heads=1,
            k_dim=1,
            v_dim=1,
            dtype="float32",
            itemsize=4,
            window=self.window,
        )
        self.cache = KVCacheManager([spec], self.num_blocks, epochs=lambda: self.epochs)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
        )
        self.scheduler = Scheduler(config, self.cache)
        self.slots: dict[int, Any] = {}
        self.number = 0
        self.steps: list[Step] = []

    def add(
        self, prompt: Seq[int], max_tokens: int = 3, *, priority: int = 0, n: int = 1
    ) -> Request:
        request = Request(
            request_id=str(self.number),
            number=self.number,
            prompt=Prompt(None, tuple(prompt)),
            params=SamplingParams(),
            arrival_s=0.0,
            priority=priority,
        )
        self.number += 1
        for index in range(n):
            completion: Any = FakeCompletion(index, max_tokens)
            sequence = Sequence(
                seq_id=f"{request.request_id}/{index}",
                request=request,
                completion=completion,
                seed=0,
                token_ids=list(prompt),
            )
            request.sequences.append(sequence)
            self.scheduler.add(sequence)
        return request

    def step(self) -> Step:
        """Schedule, write and read slots as a backend would, append tokens, end the finished."""
        step = self.scheduler.schedule()
        self.steps.append(step)
        self._write(step)
        for row in step.rows:
            first = 0 if self.window is None else max(0, row.start - self.window + 1)
            expected = row.sequence.token_ids[first : row.end]
            assert self._context(row.sequence, first, row.end) == expected
            if row.samples:
                self._append(row.sequence)
        self.cache.check()
        return step

    def run(self) -> None:
        while self.scheduler.has_work:
            assert self.step().rows, "work, but nothing scheduled"
            assert len(self.steps) < 10_000

    def _write(self, step: Step) -> None:
        for row in step.rows:
            table = self.cache.table(row.sequence.seq_id)
            for position in range(row.start, row.end):
                slot = table[position // self.block_size] * self.block_size
                token = row.sequence.token_ids[position]
                self.slots[slot + position % self.block_size] = (position, token, self.epochs.kv)

    def _context(self, sequence: Sequence, first: int, end: int) -> list[int]:
        """The tokens that the first query of a row and those after it can see."""
        table, found = self.cache.table(sequence.seq_id), []
        for position in range(first, end):
            slot = table[position // self.block_size] * self.block_size
            written, token, epoch = self.slots[slot + position % self.block_size]
            assert (written, epoch) == (position, self.epochs.kv), "a slot of another sequence"
            found.append(token)
        return found

    def _append(self, sequence: Sequence) -> None:
        completion: Any = sequence.completion
        token = next_token(sequence.token_ids)
        sequence.token_ids.append(token)
        completion.token_ids.append(token)
        if len(completion.token_ids) == completion.max_tokens:
            self.scheduler.finish(sequence)


def alone(prompt: Seq[int], max_tokens: int) -> list[int]:
    """The tokens a sequence gets with nobody beside it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
