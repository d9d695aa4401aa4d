"""Blocks of the KV arena: who holds which, and which one goes next.

A block is the null block, reserved, held by requests (reference count above 0), free, or without
memory (at or beyond the capacity). A free block that has a key still holds what its key says and
can be hit; it loses the key when it is handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torpor.cache.prefix import PrefixIndex
from torpor.errors import ArgumentError, CacheInUseError

NULL_BLOCK = 0
"""Fills table entries that nobody looks at. Never handed out, counted, cleared or freed."""

Refill = Callable[[Sequence[int]], None]
"""Writes the content of reserved blocks anew, given their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks held outside any request."""

    block_ids: tuple[int, ...]
    refill: Refill | None = None
    """Run after the memory has come back, None when the content needs no writing."""


class BlockPool:
    """Hands out blocks ``1 .. num_blocks - 1``: first those without content, then the oldest."""

    def __init__(
        self, num_blocks: int, *, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """Start with every block but the null block free.

        Args:
            num_blocks: blocks of the arena, the null block included.
            on_free: called with blocks whose content nobody may read any more, while their memory
                is there: the last holder went and they have no key, or a free one lost its key.

        Raises:
            ArgumentError: no block beside the null block.
        """
        if num_blocks < 2:
            raise ArgumentError(
                f"a pool of {num_blocks} blocks has none to hand out; it needs at least 2, "
                "so give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.index = PrefixIndex(num_blocks)
        self._on_free = on_free
        self._capacity = num_blocks
        self.highest = NULL_BLOCK
        """The highest id handed out since the memory came."""
        self._ref_counts = [0] * num_blocks
        # Next to be handed out first. Blocks without a key come before those with one.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._reserved: dict[str, Reservation] = {}
        self._num_reserved = 0

    @property
    def capacity(self) -> int:
        """Blocks with memory, the null block included: ids below this number are usable."""
        return self._capacity

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_reserved(self) -> int:
        """Blocks held outside requests."""
        return self._num_reserved

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold together: all but null, reserved and missing ones."""
        return self._capacity - 1 - self._num_reserved

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, each counted once."""
        return self.num_usable - len(self._free)

    def ref_count(self, block: int) -> int:
        """Table entries that name the block; 0 for free, null and reserved ones."""
        return self._ref_counts[block]

    def is_free(self, block: int) -> bool:
        """Whether the block can be handed out."""
        return block in self._free

    # -- requests ---------------------------------------------------------------------------------

    def allocate(self, count: int, after: int = NULL_BLOCK) -> list[int]:
        """Hand out free blocks with one reference each; ``count`` must not exceed ``num_free``.

        Args:
            count: how many.
            after: the block that comes before them in the table. Ids that follow each other are
                gathered faster, so its successor is taken where that costs no cached content.
        """
        blocks = self._take(count, after)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks; free ones leave the free order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one reference from each, in the order given: the first are handed out first."""
        dead: list[int] = []
        for block in blocks:
            count = self._ref_counts[block] - 1
            assert count >= 0, f"I3: block {block} is released but nobody holds it"
            self._ref_counts[block] = count
            if count == 0:
                self._free[block] = None
                if block not in self.index:
                    self._free.move_to_end(block, last=False)
                    dead.append(block)
        self._died(dead)

    # -- reserved blocks --------------------------------------------------------------------------

    def reserve(self, count: int, owner: str, refill: Refill | None = None) -> tuple[int, ...]:
        """Take blocks out of the requests' reach, until they are released by name.

        Args:
            count: how many.
            owner: who holds them; one reservation each.
            refill: writes their content again after the memory has come back.

        Raises:
            ArgumentError: bad count, an owner that has blocks already, or too few blocks at all.
            CacheInUseError: requests hold too many blocks at present.
        """
        if count < 1:
            raise ArgumentError(f"{owner!r} reserves {count} blocks; reserve at least 1")
        if owner in self._reserved:
            held = len(self._reserved[owner].block_ids)
            raise ArgumentError(f"{owner!r} has {held} reserved blocks; release them first")
        if count > self.num_usable:
            raise ArgumentError(
                f"{owner!r} reserves {count} blocks but only {self.num_usable} are there; "
                "give the KV cache more memory"
            )
        if count > self.num_free:
            raise CacheInUseError(
                f"{owner!r} reserves {count} blocks but requests hold {self.num_held} and "
                f"{self.num_free} are free; reserve before requests run, or preempt them"
            )
        blocks = tuple(self._take(count, NULL_BLOCK))
        self._reserved[owner] = Reservation(block_ids=blocks, refill=refill)
        self._num_reserved += count
        return blocks

    def release_reserved(self, owner: str) -> None:
        """Give an owner's reserved blocks back.

        Raises:
            ArgumentError: the owner has none.
        """
        reservation = self._reserved.pop(owner, None)
        if reservation is None:
            raise ArgumentError(
                f"{owner!r} has no reserved blocks; owners that do: {sorted(self._reserved)}"
            )
        self._num_reserved -= len(reservation.block_ids)
        self._add_unkeyed(reservation.block_ids)
        self._died(reservation.block_ids)

    def reserved(self) -> Mapping[str, Reservation]:
        """Every reservation by owner, in the order they were made."""
        return MappingProxyType(self._reserved)

    def refill_reserved(self) -> None:
        """Write all reserved content anew, in the order of reservation; a callback's error passes.

        To be called when the memory has come back and whatever the content derives from is valid.
        """
        for reservation in tuple(self._reserved.values()):
            if reservation.refill is not None:
                reservation.refill(reservation.block_ids)

    # -- content and memory -----------------------------------------------------------------------

    def forget(self, block: int) -> None:
        """Take the key of a held block away, if it has one."""
        assert self._ref_counts[block] > 0, f"I2: block {block} is forgotten while nobody holds it"
        self.index.remove(block)

    def forget_all(self) -> None:
        """Take every key away. No request may hold a block."""
        assert self.num_held == 0, f"I2: {self.num_held} blocks are held"
        self._died(self.index.clear())

    def drop(self) -> None:
        """The memory is gone: every key and every reference too. Reservations stay."""
        self.index.clear()
        self._ref_counts = [0] * self.num_blocks
        self._free.clear()
        taken = self._reserved_blocks()
        self.highest = max(taken, default=NULL_BLOCK)
        self._add_unkeyed([block for block in range(1, self._capacity) if block not in taken])

    def set_capacity(self, mapped: int) -> None:
        """Make only blocks below ``mapped`` usable: the others have no memory.

        Cached content beyond is forgotten. On failure nothing has changed.

        Args:
            mapped: blocks with memory, the null block included.

        Raises:
            ArgumentError: not within 1 and ``num_blocks``.
            CacheInUseError: requests or reservations hold blocks at or beyond ``mapped``.
        """
        if not 1 <= mapped <= self.num_blocks:
            raise ArgumentError(
                f"{mapped} mapped blocks in a pool of {self.num_blocks}; "
                f"give a number from 1 to {self.num_blocks}"
            )
        beyond = range(mapped, self._capacity)
        if in_use := sum(block not in self._free for block in beyond):
            raise CacheInUseError(
                f"{in_use} blocks from number {mapped} on are in use; preempt the requests that "
                "hold them and release reservations, or map more"
            )
        for block in beyond:
            del self._free[block]
            self.index.remove(block)
        self._add_unkeyed(range(self._capacity, mapped))
        self._capacity = mapped

    def check(self) -> None:
        """Assert I1, I2 and I5, and that no reserved or missing block has a key or a reference."""
        held = [block for block, count in enumerate(self._ref_counts) if count > 0]
        reserved = self._reserved_blocks()
        free = set(self._free)
        assert len(reserved) == self._num_reserved, "I1: reserved blocks are distinct and counted"
        assert len(free) + len(held) + len(reserved) == self._capacity - 1, "I1: conservation"
        parts = free.union(held, reserved)
        assert parts == set(range(1, self._capacity)), "I2: each block is in exactly one place"
        assert min(self._ref_counts) >= 0, "I3: no negative reference count"
        keyed = set(self.index)
        assert keyed <= free.union(held), "I5: null, reserved and missing blocks have no key"
        order = [block in keyed for block in self._free]
        assert order == sorted(order), "free blocks without a key go before those with one"
        self.index.check()

    def _take(self, count: int, after: int) -> list[int]:
        """Take blocks out of the free order and their keys away."""
        assert count <= len(self._free), f"I1: {count} blocks taken, {len(self._free)} are free"
        free, index = self._free, self.index
        blocks: list[int] = []
        evicted: list[int] = []
        for _ in range(count):
            block = after + 1
            if block in free and block not in index:
                del free[block]
            else:
                block, _ = free.popitem(last=False)
                if index.remove(block):
                    evicted.append(block)
            blocks.append(block)
            after = block
        self.highest = max(self.highest, *blocks) if blocks else self.highest
        self._died(evicted)
        return blocks

    def _add_unkeyed(self, blocks: Sequence[int]) -> None:
        """Put blocks without content before all others, keeping their order."""
        for block in reversed(blocks):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _reserved_blocks(self) -> set[int]:
        return {block for entry in self._reserved.values() for block in entry.block_ids}

    def _died(self, blocks: Sequence[int]) -> None:
        if blocks and self._on_free is not None:
            self._on_free(blocks)
