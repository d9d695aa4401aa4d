"""The block tables of all requests, over one pool.

What the scheduler does with a request: ``add``; then, whenever it holds no blocks, ``match_prefix``
and ``allocate`` with the match; ``allocate`` and ``register`` at each step; ``free`` to preempt it;
``remove`` at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torpor.cache.invariants import check_tables
from torpor.cache.pool import NULL_BLOCK, BlockPool, Refill
from torpor.cache.prefix import Epochs, PrefixChain, PrefixHasher
from torpor.cache.spec import KVGroup, KVSpec
from torpor.cache.table import BlockTable
from torpor.errors import CacheInUseError

__all__ = ["Epochs", "KVCacheManager", "PrefixMatch"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that hold the start of a request; void once the pool has changed."""

    block_ids: tuple[int, ...] = ()
    """The start of the table; the null block where no layer looks any more."""
    num_tokens: int = 0


class KVCacheManager:
    """Which blocks hold which tokens of which request. Knows no tensors; one thread at a time."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        *,
        epochs: Callable[[], Epochs],
        enable_prefix_caching: bool = True,
        clear_fresh: bool = False,
        on_free: Callable[[Sequence[int]], None] | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            specs: every layer's keys and values; one table serves them all.
            num_blocks: blocks of the arena, the null block included.
            epochs: the present epochs; asked at every look-up and registration.
            enable_prefix_caching: whether blocks are shared between requests at all.
            clear_fresh: keep note of blocks to clear, for ``take_fresh_blocks``.
            on_free: told of blocks whose content nobody may read any more; see ``BlockPool``.
            secret: 32 bytes that key the hashes; random when None.

        Raises:
            ArgumentError: no layer, different block sizes, or too few blocks.
        """
        self.group = KVGroup.of(specs)
        self.pool = BlockPool(num_blocks, on_free=on_free)
        self._epochs = epochs
        self._enable_prefix_caching = enable_prefix_caching
        self._clear_fresh = clear_fresh
        self._fresh: dict[int, None] = {}
        self._tables: dict[str, BlockTable] = {}
        self._hasher = PrefixHasher(
            block_size=self.group.block_size,
            dtypes=[spec.dtype for spec in self.group.specs],
            secret=secret,
        )

    # -- sizes ------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.group.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the arena, the null block included."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks usable by requests that requests hold, 0 to 1; 1 when none is."""
        usable = self.pool.num_usable
        return self.pool.num_held / usable if usable else 1.0

    def blocks_for(self, num_tokens: int) -> int:
        """Table entries that ``num_tokens`` positions take."""
        return self.group.blocks_for(num_tokens)

    def fits_alone(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether a request of ``num_tokens`` can ever run, with no other request around.

        Args:
            num_tokens: prompt and output together.
            max_step_tokens: the most tokens that one step computes for a request.
        """
        return self.group.peak_blocks(num_tokens, max_step_tokens) <= self.pool.num_usable

    def blocks_needed(
        self, request_id: str, num_tokens: int, match: PrefixMatch | None = None
    ) -> int:
        """How many free blocks ``allocate`` would take for the same arguments.

        Hits that are free at present count: touching them takes them from the free order (I9).
        """
        hits = match.block_ids if match else ()
        have = len(self._tables[request_id].block_ids) + len(hits)
        revived = sum(self.pool.is_free(block) for block in hits)
        return max(0, self.blocks_for(num_tokens) - have) + revived

    def would_fit(
        self,
        request_id: str,
        num_tokens: int,
        match: PrefixMatch | None = None,
        *,
        spare: int = 0,
    ) -> bool:
        """Whether ``allocate`` would succeed and leave at least ``spare`` blocks free."""
        return self.blocks_needed(request_id, num_tokens, match) + spare <= self.num_free

    # -- requests ---------------------------------------------------------------------------------

    def add(
        self, request_id: str, token_ids: Sequence[int], *, adapter: str = "", salt: str = ""
    ) -> None:
        """Make a request known. It holds no blocks yet.

        Args:
            request_id: not in use.
            token_ids: the request's own list, read live: it may grow at its end, never change
                before. Ids fit 32 bits.
            adapter: name of the adapter that computes its keys and values.
            salt: only requests with an equal salt share blocks.
        """
        assert request_id not in self._tables, f"request {request_id!r} was added already"
        chain = PrefixChain(self._hasher, token_ids, adapter, salt)
        self._tables[request_id] = BlockTable(token_ids=token_ids, chain=chain)

    def match_prefix(self, request_id: str) -> PrefixMatch:
        """The longest start of the request that cached blocks hold; changes nothing.

        Whole blocks, and never the last token: its logits are wanted (I7). With a window only the
        blocks that the next token looks back at need to be there.
        """
        table = self._tables[request_id]
        most = max(0, len(table.token_ids) - 1) // self.block_size
        if not self._enable_prefix_caching or most == 0:
            return PrefixMatch()
        keys = table.chain.keys(most, self._epochs())
        start, hits = self.pool.index.longest_hit(keys[:most], self.group.window_blocks)
        num_tokens = (start + len(hits)) * self.block_size
        unseen = self.group.first_visible_block(num_tokens)
        return PrefixMatch((NULL_BLOCK,) * unseen + tuple(hits[unseen - start :]), num_tokens)

    def allocate(self, request_id: str, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Make the request's table cover ``num_tokens`` positions, all or nothing.

        Args:
            request_id: a known request.
            num_tokens: positions, from the request's first, cached ones included.
            match: what ``match_prefix`` has just found, for a request that holds no blocks.

        Returns:
            False when it does not fit; then nothing has changed.
        """
        table = self._tables[request_id]
        if not self.would_fit(request_id, num_tokens, match):
            return False
        if not table.block_ids:
            self._begin(table, match or PrefixMatch())
        else:
            assert not match or not match.block_ids, "I6: only an empty table begins with hits"
        count = self.blocks_for(num_tokens) - len(table.block_ids)
        if count > 0:
            last = table.block_ids[-1] if table.block_ids else NULL_BLOCK
            fresh = self.pool.allocate(count, after=last)
            table.block_ids += fresh
            if self._clear_fresh:
                self._fresh.update(dict.fromkeys(fresh))
        return True

    def register(self, request_id: str, num_tokens: int) -> None:
        """Let others find the request's full blocks among its first ``num_tokens`` positions.

        The positions are written, or will be at the end of this step, and hold tokens that stay
        (I8). If the request leaves the step after all, or the step fails, ``unregister`` it before
        anything else. Nothing is registered of a table that was begun under other epochs.
        """
        table = self._tables[request_id]
        epochs = self._epochs()
        if not self._enable_prefix_caching or table.epochs != epochs:
            return
        full = num_tokens // self.block_size
        assert num_tokens <= len(table.token_ids), f"I8: {num_tokens} registered, fewer tokens"
        assert full <= len(table.block_ids), f"I6: {num_tokens} registered, the table covers fewer"
        if full <= table.num_registered:
            return
        keys = table.chain.keys(full, epochs)
        for position in range(table.num_registered, full):
            block = table.block_ids[position]
            if block != NULL_BLOCK:
                self.pool.index.add(block, keys[position])
        table.num_registered = full

    def unregister(self, request_id: str) -> None:
        """The content of the request's blocks is not sure: nobody finds them any more.

        Until ``free``, the request registers nothing again.
        """
        table = self._tables[request_id]
        table.epochs = None
        for block in table.held():
            self.pool.forget(block)

    def skip_window(self, request_id: str, num_computed: int) -> None:
        """Give back the blocks that no layer looks at any more; the null block takes their place.

        Does nothing unless every layer has a window.

        Args:
            request_id: a known request.
            num_computed: positions whose keys and values are written by a step that has ended.
        """
        table = self._tables[request_id]
        end = min(self.group.first_visible_block(num_computed), len(table.block_ids))
        self.pool.release(reversed(table.skip_to(end)))

    def free(self, request_id: str) -> None:
        """Give all blocks back, ends of chains first; they can still be hit. For preemption.

        The request stays known, with an empty table.
        """
        table = self._tables[request_id]
        held = table.held()
        table.clear()
        self.pool.release(reversed(held))

    def remove(self, request_id: str) -> None:
        """Give all blocks back and forget the request."""
        assert request_id in self._tables, f"request {request_id!r} is not known"
        self.free(request_id)
        del self._tables[request_id]

    def table(self, request_id: str) -> list[int]:
        """The request's block ids by position; the manager's own list, not to be changed."""
        return self._tables[request_id].block_ids

    # -- everything at once -----------------------------------------------------------------------

    def reserve(self, num_blocks: int, owner: str, refill: Refill | None = None) -> tuple[int, ...]:
        """Hold blocks outside any request; see ``BlockPool.reserve``."""
        return self.pool.reserve(num_blocks, owner, refill)

    def take_fresh_blocks(self) -> list[int]:
        """Blocks handed out since the last call that hold no hit, each once; they need clearing.

        To be called for every step, before the step writes.
        Empty unless ``clear_fresh`` was asked for.
        """
        fresh = [block for block in self._fresh if self.pool.ref_count(block) > 0]
        self._fresh.clear()
        return fresh

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Reserved blocks are not touched.

        Raises:
            CacheInUseError: requests hold blocks; nothing has changed.
        """
        if held := self.pool.num_held:
            holders = sum(bool(table.held()) for table in self._tables.values())
            raise CacheInUseError(
                f"the prefix cache cannot be reset: {holders} running requests hold {held} "
                "blocks; let them finish, abort them or preempt them first"
            )
        self.pool.forget_all()

    def drop(self) -> None:
        """The cache's memory is gone: empty every table and forget all content.

        Requests stay known and reservations stay; ``pool.refill_reserved`` is due when the memory
        has come back. Nothing is said to ``on_free``: there is nothing to fill. The books are made
        anew from the reservations alone, so this also repairs them after a call that was cut off
        half way, by Ctrl-C or by an error in a callback.
        """
        for table in self._tables.values():
            table.clear()
        self.pool.drop()

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        self.pool.check()
        check_tables(self._tables, self.pool, self.block_size)

    def _begin(self, table: BlockTable, match: PrefixMatch) -> None:
        """Start a table with its hits, before anything new is handed out (I10)."""
        epochs = self._epochs()
        num_tokens = len(match.block_ids) * self.block_size
        assert num_tokens == match.num_tokens, f"I4: {match} is not whole blocks"
        assert num_tokens < max(1, len(table.token_ids)), f"I7: {match} leaves nothing to compute"
        keys = table.chain.keys(len(match.block_ids), epochs)
        hits = []
        for block, key in zip(match.block_ids, keys, strict=False):
            if block != NULL_BLOCK:
                found = self.pool.index.key_of(block)
                assert found == key, f"I4: block {block} is no longer the hit it was"
                hits.append(block)
        self.pool.touch(hits)
        table.begin(match.block_ids, epochs)
