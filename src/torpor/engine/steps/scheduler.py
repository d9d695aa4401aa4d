"""Who computes how many tokens in the next step. No phases, no torch.

Every sequence has tokens and computed tokens; a step hands out token counts so that the second
catch up with the first. That is a prefill, a part of one, a decode step, or the recomputation
after a preemption, without a name for any of them.

Order within a step: sequences that need one token each, so that a long prompt never holds up
those that answer already; then the rest of those that run; then those that wait, by arrival (or
by priority first). Whoever cannot get blocks preempts the last in that order; a waiting sequence
never preempts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torpor.cache.manager import KVCacheManager, PrefixMatch
from torpor.engine.requests.request import Sequence, Status
from torpor.engine.steps.step import Row, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step; vLLM's names."""

    max_num_seqs: int
    """Sequences that hold blocks at a time."""
    max_num_batched_tokens: int
    """New tokens of all rows of a step."""
    long_prefill_token_threshold: int = 0
    """The most tokens of one sequence in a step while others want some too; 0 for half of
    ``max_num_batched_tokens``."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free, so that those who run can grow."""

    @property
    def chunk(self) -> int:
        """Tokens that one sequence gets while others want some."""
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 2)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    """Tokens whose keys and values were computed, recomputed ones included."""
    num_prefix_hit_tokens: int = 0
    """Prompt tokens that the prefix cache served."""
    num_preemptions: int = 0


class Scheduler:
    """Holds every unfinished sequence. Not thread-safe: the engine's turn protects it."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        """Start with no sequences."""
        self.config = config
        self.stats = SchedulerStats()
        self._cache = cache
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        """Sorted by ``Sequence.order``; what was preempted is at its old place again."""
        self._newest: list[int] = []
        """For each drain that runs: the number of the last request that may start."""

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold blocks."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that hold none, in the order they will be admitted."""
        return tuple(self._waiting)

    @property
    def num_unfinished(self) -> int:
        """Sequences running or waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would have rows."""
        return bool(self._running) or self._next_waiting() is not None

    @contextmanager
    def holding_back_new(self) -> Iterator[None]:
        """Requests that come from now on wait until the with block ends."""
        numbers = (seq.request.number for seq in (*self._running, *self._waiting))
        newest = max(numbers, default=-1)
        # Several drains may overlap and end in any order, so each takes away its own alone.
        self._newest.append(newest)
        try:
            yield
        finally:
            self._newest.remove(newest)

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        request = sequence.request
        self._cache.add(sequence.seq_id, sequence.token_ids, salt=request.cache_salt)
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever it was doing; its blocks go back."""
        if sequence.finished:
            return
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        sequence.status = Status.FINISHED
        self._cache.remove(sequence.seq_id)

    def distrust(self, sequence: Sequence) -> None:
        """Nobody may hit the blocks of a sequence whose content is unsure."""
        if sequence.status is Status.RUNNING:
            self._cache.unregister(sequence.seq_id)

    def preempt_all(self) -> int:
        """Take the blocks from every running sequence; returns how many there were.

        Each is recomputed when it is admitted again.
        """
        count = len(self._running)
        for sequence in reversed(self._running[:]):
            self._preempt(sequence)
        return count

    def drop_cache(self) -> None:
        """The cache's memory is gone: nobody holds blocks, nothing can be hit."""
        self.preempt_all()
        self._cache.drop()

    def recover(self, sequences: Iterable[Sequence]) -> None:
        """A step was interrupted: start every unfinished sequence over, with empty books."""
        self._cache.drop()
        self._running.clear()
        self._waiting.clear()
        for sequence in sequences:
            if not sequence.finished:
                sequence.num_computed_tokens = 0
                self._enqueue(sequence)

    def undo(self, step: Step) -> None:
        """A step failed: what its rows wrote is unsure, so they start over."""
        for row in step.rows:
            self.distrust(row.sequence)
        for row in reversed(step.rows):
            if row.sequence.status is Status.RUNNING:
                self._preempt(row.sequence)

    def schedule(self) -> Step:
        """Decide the next step, and count its tokens as computed.

        Either collect the step, or ``undo`` it.
        """
        plan = _Plan(self.config.max_num_batched_tokens)
        num_preemptions = self.stats.num_preemptions
        self._schedule_running(plan)
        for row in plan.rows.values():
            self._cache.register(row.sequence.seq_id, row.end)
        if self.stats.num_preemptions == num_preemptions:
            self._schedule_waiting(plan)
        for row in plan.rows.values():
            row.sequence.num_computed_tokens = row.end
        self.stats.num_steps += bool(plan.rows)
        step = Step(tuple(plan.rows.values()), self._cache.take_fresh_blocks())
        self.stats.num_scheduled_tokens += step.num_tokens
        return step

    # -- those that hold blocks -------------------------------------------------------------------

    def _schedule_running(self, plan: _Plan) -> None:
        one_token = [seq for seq in self._running if seq.num_tokens - seq.num_computed_tokens == 1]
        others = [seq for seq in self._running if seq.num_tokens - seq.num_computed_tokens > 1]
        for sequence in (*one_token, *others):
            if sequence.status is not Status.RUNNING:
                continue  # preempted by one before it
            need = sequence.num_tokens - sequence.num_computed_tokens
            alone = len(self._running) == 1 and not self._waiting
            count = min(need, plan.budget, need if alone else self.config.chunk)
            if count > 0 and self._make_room(sequence, count, plan):
                plan.add(Row(sequence, sequence.num_computed_tokens, count))

    def _make_room(self, sequence: Sequence, count: int, plan: _Plan) -> bool:
        """Blocks for the next tokens of a running sequence, taken from others if need be."""
        self._cache.skip_window(sequence.seq_id, sequence.num_computed_tokens)
        end = sequence.num_computed_tokens + count
        while not self._cache.allocate(sequence.seq_id, end):
            victim = max(self._running, key=lambda other: other.order)
            plan.drop(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._cache.free(sequence.seq_id)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._enqueue(sequence)

    # -- those that wait --------------------------------------------------------------------------

    def _schedule_waiting(self, plan: _Plan) -> None:
        while plan.budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._next_waiting()
            if sequence is None:
                break
            match = self._match(sequence)
            need = sequence.num_tokens - match.num_tokens
            alone = not self._running and len(self._waiting) == 1
            count = min(need, plan.budget, need if alone else self.config.chunk)
            if not self._admit(sequence, match, count):
                break
            row = Row(sequence, match.num_tokens, count)
            plan.add(row)
            self._cache.register(sequence.seq_id, row.end)

    def _next_waiting(self) -> Sequence | None:
        newest = min(self._newest, default=None)
        for sequence in self._waiting:
            if newest is None or sequence.request.number <= newest:
                return sequence
        return None

    def _match(self, sequence: Sequence) -> PrefixMatch:
        if sequence.reads_cache:
            return self._cache.match_prefix(sequence.seq_id)
        return PrefixMatch(block_ids=(), num_tokens=0)

    def _admit(self, sequence: Sequence, match: PrefixMatch, count: int) -> bool:
        """Give a waiting sequence its first blocks, if all its tokens will fit."""
        if self._running and not self._fits(sequence, match):
            return False
        end = match.num_tokens + count
        if not self._cache.allocate(sequence.seq_id, end, match):
            assert self._running, f"{sequence.seq_id} does not fit into an empty cache"
            return False
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.status = Status.RUNNING
        sequence.num_computed_tokens = match.num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = match.num_tokens
            self.stats.num_prefix_hit_tokens += match.num_tokens
        return True

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        # Of a long prompt the first chunk alone would always fit, and then block those that run.
        spare = int(self._cache.pool.num_usable * self.config.watermark)
        return self._cache.would_fit(sequence.seq_id, sequence.num_tokens, match, spare=spare)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=lambda other: other.order)


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        self.rows[row.sequence.seq_id] = row
        self.budget -= row.num_new_tokens

    def drop(self, sequence: Sequence) -> None:
        row = self.rows.pop(sequence.seq_id, None)
        if row is not None:
            self.budget += row.num_new_tokens
