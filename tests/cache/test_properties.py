"""Random calls against a model that holds the bytes: what a request reads is what it would write.

The model has no hashes and no index. It keeps, for every block, what its memory holds (the tokens
that were written, under which circumstances), and who may find it; hits, capacity and freed blocks
are derived from that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cache.kit import Rig

from torpor.cache.manager import Epochs
from torpor.errors import CacheInUseError

NUM_BLOCKS = 9
BLOCK_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
NAMES = st.sampled_from(["", "x"])
NAN = "NaN"

Content = tuple[Any, ...] | str
"""Circumstances and every token up to the block's end, or a mark for anything else."""


@dataclass
class Request:
    """What the model knows of a request."""

    token_ids: list[int]
    names: tuple[str, str]
    begun: Epochs | None = None
    num_computed: int = 0
    trusted: bool = True
    table: list[int] = field(default_factory=list)
    registered: set[int] = field(default_factory=set)
    """Positions in the table that were registered or hit."""

    def held(self) -> list[int]:
        return [block for block in self.table if block]

    def content(self, position: int, epochs: Epochs) -> Content:
        tokens = tuple(self.token_ids[: (position + 1) * BLOCK_SIZE])
        return (epochs, self.names, tokens)


class Machine(RuleBasedStateMachine):
    """A manager, the memory of its blocks, and requests."""

    window: int | None = None
    caching = True

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(
            NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            window=self.window,
            enable_prefix_caching=self.caching,
            clear_fresh=True,
            on_free=self.on_free,
        )
        self.manager = self.rig.manager
        self.memory: dict[int, Content] = dict.fromkeys(range(NUM_BLOCKS), NAN)
        self.findable: set[int] = set()
        self.reserved: dict[str, tuple[int, ...]] = {}
        self.capacity = NUM_BLOCKS
        self.requests: dict[str, Request] = {}
        self.num_added = 0

    # -- the model --------------------------------------------------------------------------------

    def on_free(self, blocks: Sequence[int]) -> None:
        """Fill with NaN, as a debug switch would. A block that somebody may read is an error."""
        reserved = {block for ids in self.reserved.values() for block in ids}
        for block in blocks:
            assert 0 < block < self.capacity
            assert block not in reserved
            self.memory[block] = NAN
            self.findable.discard(block)

    def held(self) -> set[int]:
        return {block for request in self.requests.values() for block in request.held()}

    def free(self) -> set[int]:
        reserved = {block for ids in self.reserved.values() for block in ids}
        return set(range(1, self.capacity)) - self.held() - reserved

    def first_seen(self, num_tokens: int) -> int:
        oldest = 0 if self.window is None else max(0, num_tokens - self.window + 1)
        return oldest // BLOCK_SIZE

    def expected_hit(self, request: Request) -> int:
        """Blocks of the longest start that may be hit, by what the memory holds."""
        if not self.caching:
            return 0
        there = [
            any(self.memory[block] == wanted for block in self.findable)
            for wanted in (
                request.content(position, self.rig.epochs)
                for position in range((len(request.token_ids) - 1) // BLOCK_SIZE)
            )
        ]
        ends = range(len(there), 0, -1)
        seen = {end: min(end - 1, self.first_seen(end * BLOCK_SIZE)) for end in ends}
        return next((end for end in ends if all(there[seen[end] : end])), 0)

    def fill(self, request: Request, start: int, end: int) -> None:
        """Write the keys and values of positions ``start`` to ``end``."""
        for position in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            block = request.table[position]
            assert block, "a position in the window has a block"
            assert block not in self.findable, "what others can find is never written over"
            is_full = end >= (position + 1) * BLOCK_SIZE
            pure = request.trusted and request.begun == self.rig.epochs
            self.memory[block] = (
                request.content(position, self.rig.epochs) if is_full and pure else "mixed"
            )

    def some(self, data: st.DataObject, *, with_blocks: bool) -> tuple[str, Request]:
        names = [name for name, req in self.requests.items() if bool(req.table) == with_blocks]
        name = data.draw(st.sampled_from(sorted(names)))
        return name, self.requests[name]

    def any_with_blocks(self) -> bool:
        return any(request.table for request in self.requests.values())

    def any_without_blocks(self) -> bool:
        return any(not request.table for request in self.requests.values())

    # -- requests ---------------------------------------------------------------------------------

    @initialize()
    def share_two_prompts(self) -> None:
        self.add([0, 1, 0, 1, 0, 1], "", "")
        self.add([0, 1, 0, 1, 1], "", "")

    @rule(token_ids=TOKENS, adapter=NAMES, salt=NAMES)
    def add(self, token_ids: list[int], adapter: str, salt: str) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        self.requests[name] = Request(list(token_ids), (adapter, salt))
        own = self.requests[name].token_ids
        self.manager.add(name, own, adapter=adapter, salt=salt)

    @precondition(any_without_blocks)
    @rule(data=st.data(), chunk=st.integers(1, 12), use_hits=st.booleans())
    def admit(self, data: st.DataObject, chunk: int, use_hits: bool) -> None:
        name, request = self.some(data, with_blocks=False)
        match = self.manager.match_prefix(name)
        assert match == self.manager.match_prefix(name)
        assert match.num_tokens == self.expected_hit(request) * BLOCK_SIZE
        unseen = self.first_seen(match.num_tokens)
        for position, block in enumerate(match.block_ids):
            if position < unseen:
                assert block == 0
            else:
                assert self.memory[block] == request.content(position, self.rig.epochs)
        hits = match if use_hits else None
        request.num_computed = match.num_tokens if use_hits else 0
        request.begun, request.trusted = self.rig.epochs, True
        request.registered = set(range(len(match.block_ids))) if use_hits else set()
        self.compute(name, request, chunk, hits.block_ids if hits else (), hits)

    @precondition(any_with_blocks)
    @rule(data=st.data(), chunk=st.integers(1, 12), append=st.lists(st.integers(0, 1), max_size=2))
    def step(self, data: st.DataObject, chunk: int, append: list[int]) -> None:
        name, request = self.some(data, with_blocks=True)
        request.token_ids += append
        if request.num_computed < len(request.token_ids):
            self.compute(name, request, chunk, tuple(request.table), None)

    def compute(
        self, name: str, request: Request, chunk: int, before: tuple[int, ...], match: Any
    ) -> None:
        """One request's part of a step: blocks, clearing, writing, registration."""
        end = min(len(request.token_ids), request.num_computed + chunk)
        free = self.free()
        revived = len(free & set(before))
        num_new = max(0, -(-end // BLOCK_SIZE) - len(before))
        fits = num_new + revived <= len(free)
        assert self.manager.blocks_needed(name, end, match) == num_new + revived
        assert self.manager.allocate(name, end, match) is fits
        if not fits:
            assert self.manager.table(name) == request.table
            return
        table = list(self.manager.table(name))
        assert tuple(table[: len(before)]) == before, "a table grows at its end only"
        fresh = table[len(before) :]
        assert set(fresh) <= free
        assert not set(fresh) & set(before)
        assert sorted(self.manager.take_fresh_blocks()) == sorted(fresh)
        request.table = table
        for block in fresh:
            assert block not in self.findable, "on_free is told of evicted blocks"
            self.memory[block] = "cleared"
        self.fill(request, request.num_computed, end)
        request.num_computed = end

    @precondition(any_with_blocks)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        name, request = self.some(data, with_blocks=True)
        self.manager.register(name, request.num_computed)
        if self.caching and request.trusted and request.begun == self.rig.epochs:
            full = set(range(request.num_computed // BLOCK_SIZE))
            for position in full - request.registered:
                if request.table[position]:
                    self.findable.add(request.table[position])
            request.registered |= full

    @precondition(any_with_blocks)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        name, request = self.some(data, with_blocks=True)
        self.manager.unregister(name)
        request.trusted = False
        self.findable -= set(request.held())

    @precondition(any_with_blocks)
    @rule(data=st.data())
    def leave_the_window(self, data: st.DataObject) -> None:
        name, request = self.some(data, with_blocks=True)
        end = min(self.first_seen(request.num_computed), len(request.table))
        request.table[:end] = [0] * end
        self.manager.skip_window(name, request.num_computed)
        assert self.manager.table(name) == request.table

    @precondition(any_with_blocks)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name, request = self.some(data, with_blocks=True)
        request.table, request.num_computed = [], 0
        self.manager.free(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[name]
        self.manager.remove(name)

    # -- the whole cache --------------------------------------------------------------------------

    @rule(count=st.integers(1, 3), owner=st.sampled_from(["sinks", "padding"]))
    def reserve_or_release(self, count: int, owner: str) -> None:
        if owner in self.reserved:
            del self.reserved[owner]
            self.manager.pool.release_reserved(owner)
        elif count <= len(self.free()):
            blocks = self.manager.reserve(count, owner)
            assert not set(blocks) & self.findable
            self.reserved[owner] = blocks
            for block in blocks:
                self.memory[block] = owner

    @rule(weights=st.booleans())
    def move_an_epoch(self, weights: bool) -> None:
        now = self.rig.epochs
        self.rig.epochs = Epochs(weights=now.weights + weights, kv=now.kv + (not weights))

    @rule()
    def reset(self) -> None:
        held = self.held()
        if held:
            with pytest.raises(CacheInUseError, match=f"hold {len(held)} blocks"):
                self.manager.reset_prefix_cache()
        else:
            self.manager.reset_prefix_cache()
            assert not self.findable

    @rule(move_epoch=st.booleans())
    def drop(self, move_epoch: bool) -> None:
        for request in self.requests.values():
            request.table, request.num_computed = [], 0
        self.findable.clear()
        self.manager.drop()
        if move_epoch:
            self.move_an_epoch(weights=False)
        for block in set(range(NUM_BLOCKS)) - {b for ids in self.reserved.values() for b in ids}:
            self.memory[block] = NAN

    @rule(mapped=st.integers(1, NUM_BLOCKS))
    def map_other_blocks(self, mapped: int) -> None:
        in_use = set(range(mapped, self.capacity)) - self.free()
        if in_use:
            with pytest.raises(CacheInUseError, match=f"^{len(in_use)} blocks"):
                self.manager.pool.set_capacity(mapped)
            return
        self.manager.pool.set_capacity(mapped)
        self.capacity = mapped
        for block in range(mapped, NUM_BLOCKS):
            self.memory[block] = NAN
            self.findable.discard(block)

    # -- between any two calls --------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check()
        assert self.manager.num_free == len(self.free())
        assert {block for block in range(NUM_BLOCKS) if self.manager.pool.is_free(block)} == (
            self.free()
        )
        assert set(self.manager.pool.index) == self.findable

    @invariant()
    def reserved_bytes_are_unchanged(self) -> None:
        for owner, blocks in self.reserved.items():
            assert [self.memory[block] for block in blocks] == [owner] * len(blocks)

    @invariant()
    def running_requests_read_what_they_wrote(self) -> None:
        for name, request in self.requests.items():
            assert self.manager.table(name) == request.table
            seen = self.first_seen(request.num_computed)
            for position in range(seen, request.num_computed // BLOCK_SIZE):
                content = self.memory[request.table[position]]
                if content != "mixed":
                    assert request.begun is not None
                    assert content == request.content(position, request.begun)


class SlidingWindow(Machine):
    """Every layer has a window that is no multiple of the block size."""

    window = 4


class NarrowWindow(Machine):
    """Every layer sees one earlier token."""

    window = 2


class NoPrefixCache(Machine):
    """Nothing is shared."""

    caching = False


def case(machine: type[Machine], examples: int) -> Any:
    test = machine.TestCase
    test.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    return test


TestMachine = case(Machine, 60)
TestSlidingWindow = case(SlidingWindow, 50)
TestNarrowWindow = case(NarrowWindow, 30)
TestNoPrefixCache = case(NoPrefixCache, 15)
