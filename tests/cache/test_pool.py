"""The block pool: who holds which block, and which goes next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torpor.cache.pool import NULL_BLOCK, BlockPool
from torpor.errors import ArgumentError, CacheInUseError


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def cached(pool: BlockPool, count: int) -> list[int]:
    """Hand out blocks, give each a key, and release them tail first."""
    blocks = pool.allocate(count)
    for block in blocks:
        pool.index.add(block, key(block))
    pool.release(reversed(blocks))
    return blocks


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.num_free, pool.num_held, pool.num_usable) == (0, 3, 3)
    assert pool.ref_count(NULL_BLOCK) == 0
    pool.check()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ArgumentError, match=f"pool of {num_blocks} blocks"):
        BlockPool(num_blocks)


def test_a_block_is_free_when_its_last_holder_goes() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.index.add(block, key(7))
    pool.touch([block])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    pool.check()


def test_releasing_a_free_block_is_noticed() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="I3"):
        pool.release([1])


def test_taking_more_than_there_is_is_noticed() -> None:
    with pytest.raises(AssertionError, match="I1"):
        BlockPool(3).allocate(3)


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(6)
    assert cached(pool, 2) == [1, 2]
    plain = pool.allocate(2)
    pool.release(reversed(plain))
    assert pool.allocate(3) == [3, 4, 5]
    assert 1 in pool.index
    assert 2 in pool.index


def test_ends_of_chains_go_before_roots_and_old_before_new() -> None:
    pool = BlockPool(7)
    first, second = cached(pool, 3), cached(pool, 3)
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    assert [pool.allocate(1)[0] for _ in range(6)] == [3, 2, 1, 6, 5, 4]


def test_a_hit_makes_a_block_the_newest_at_its_release() -> None:
    pool = BlockPool(4)
    cached(pool, 3)
    pool.touch([3])
    pool.release([3])
    assert [pool.allocate(1)[0] for _ in range(3)] == [2, 1, 3]


def test_the_next_id_is_taken_where_it_costs_no_content() -> None:
    pool = BlockPool(9)
    blocks = pool.allocate(8)
    pool.release([6, 4, 5, 2])
    assert blocks == list(range(1, 9))
    assert pool.allocate(1, after=3) == [4]
    assert pool.allocate(2, after=4) == [5, 6]
    pool.index.add(4, key(4))
    pool.release([4])
    assert pool.allocate(1, after=3) == [2], "the successor is cached"
    pool.release([2])
    assert pool.allocate(1, after=8) == [2], "there is no successor"


def test_handing_a_cached_block_out_takes_its_key() -> None:
    pool = BlockPool(3)
    cached(pool, 2)
    assert pool.allocate(1) == [2]
    assert pool.index.get(key(2)) is None
    assert pool.index.get(key(1)) == 1
    pool.check()


# -- reserved blocks ------------------------------------------------------------------------------


def test_reserved_blocks_are_never_given_to_requests() -> None:
    pool = BlockPool(6)
    sinks = pool.reserve(2, "sinks")
    blocks = pool.allocate(pool.num_free)
    assert sorted([*sinks, *blocks]) == [1, 2, 3, 4, 5]
    assert (pool.num_reserved, pool.num_usable, pool.num_held) == (2, 3, 3)
    assert not any(pool.is_free(block) or pool.ref_count(block) for block in sinks)
    pool.check()


def test_reserving_takes_cached_blocks_when_no_others_are_left() -> None:
    pool = BlockPool(4)
    cached(pool, 3)
    assert pool.reserve(2, "sinks") == (3, 2)
    assert [block in pool.index for block in (1, 2, 3)] == [True, False, False]
    pool.check()


def test_released_reservations_are_free_again() -> None:
    pool = BlockPool(4)
    pool.reserve(2, "sinks")
    pool.reserve(1, "padding")
    pool.release_reserved("sinks")
    assert list(pool.reserved()) == ["padding"]
    assert (pool.num_free, pool.num_reserved) == (2, 1)
    pool.check()


def test_bad_reservations_change_nothing() -> None:
    pool = BlockPool(5)
    pool.reserve(1, "sinks")
    pool.allocate(2)
    with pytest.raises(ArgumentError, match="'padding' reserves 0 blocks"):
        pool.reserve(0, "padding")
    with pytest.raises(ArgumentError, match="'sinks' has 1 reserved blocks"):
        pool.reserve(1, "sinks")
    with pytest.raises(ArgumentError, match=r"reserves 4 blocks but only 3 are there.*more memory"):
        pool.reserve(4, "padding")
    with pytest.raises(CacheInUseError, match="requests hold 2 and 1 are free"):
        pool.reserve(2, "padding")
    with pytest.raises(ArgumentError, match=r"'padding' has no reserved blocks.*\['sinks'\]"):
        pool.release_reserved("padding")
    assert pool.num_reserved == 1
    pool.check()


def test_refills_run_in_the_order_of_reservation_with_their_ids() -> None:
    pool = BlockPool(8)
    calls: list[tuple[str, tuple[int, ...]]] = []
    pool.reserve(2, "z", lambda ids: calls.append(("z", tuple(ids))))
    pool.reserve(1, "silent")
    pool.reserve(1, "a", lambda ids: calls.append(("a", tuple(ids))))
    assert calls == [], "nothing is written before the owner asks"
    pool.refill_reserved()
    assert calls == [("z", (1, 2)), ("a", (4,))]
    assert pool.reserved()["z"].block_ids == (1, 2)
    assert pool.reserved()["silent"].refill is None


def test_a_failing_refill_is_told_to_the_caller() -> None:
    pool = BlockPool(3)

    def fail(ids: Sequence[int]) -> None:
        raise OSError(f"cannot write {ids}")

    pool.reserve(1, "sinks", fail)
    with pytest.raises(OSError, match=r"cannot write \(1,\)"):
        pool.refill_reserved()
    pool.check()


def test_reservations_cannot_be_changed_from_outside() -> None:
    pool = BlockPool(3)
    with pytest.raises(TypeError):
        pool.reserved()["mine"] = None  # type: ignore[index]


# -- content and memory ---------------------------------------------------------------------------


def test_on_free_hears_of_blocks_nobody_may_read() -> None:
    told: list[int] = []
    pool = BlockPool(6, on_free=told.extend)
    shared, plain, keyed = pool.allocate(3)
    pool.index.add(shared, key(1))
    pool.index.add(keyed, key(3))
    pool.touch([shared])
    pool.release([keyed, plain, shared])
    assert told == [plain], "cached and shared content stays readable"
    pool.release([shared])
    assert told == [plain]
    told.clear()
    pool.allocate(5)
    assert told == [keyed, shared], "evicted"


def test_on_free_hears_of_a_reset_and_of_released_reservations() -> None:
    told: list[int] = []
    pool = BlockPool(6, on_free=told.extend)
    cached(pool, 2)
    pool.reserve(2, "sinks")
    assert told == []
    pool.forget_all()
    assert sorted(told) == [1, 2]
    told.clear()
    pool.release_reserved("sinks")
    assert told == [3, 4]


def test_dropping_frees_all_but_the_reserved_and_says_nothing() -> None:
    told: list[int] = []
    pool = BlockPool(7, on_free=told.extend)
    cached(pool, 2)
    sinks = pool.reserve(1, "sinks")
    pool.allocate(2)
    told.clear()
    pool.drop()
    assert told == [], "there is no memory to fill"
    assert sinks == (3,)
    assert (pool.num_free, pool.num_reserved, list(pool.index)) == (5, 1, [])
    assert pool.allocate(5) == [1, 2, 4, 5, 6]
    pool.check()


def test_forgetting_everything_needs_idle_blocks() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are held"):
        pool.forget_all()
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.forget(2)


def test_only_mapped_blocks_are_usable() -> None:
    told: list[int] = []
    pool = BlockPool(8, on_free=told.extend)
    cached(pool, 7)
    pool.set_capacity(4)
    assert (pool.capacity, pool.num_blocks, pool.num_free, pool.num_usable) == (4, 8, 3, 3)
    assert list(pool.index) == [1, 2, 3]
    assert told == [], "the memory of the others is going or gone"
    pool.check()
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    pool.set_capacity(6)
    assert pool.allocate(2) == [4, 5]
    pool.set_capacity(8)
    assert pool.allocate(2) == [6, 7]
    pool.check()


def test_a_pool_may_lose_all_its_memory() -> None:
    pool = BlockPool(4)
    pool.set_capacity(1)
    assert (pool.num_free, pool.num_usable) == (0, 0)
    pool.check()
    pool.drop()
    pool.check()
    pool.set_capacity(4)
    assert pool.allocate(3) == [1, 2, 3]


def test_growing_puts_empty_blocks_before_cached_ones() -> None:
    pool = BlockPool(5)
    pool.set_capacity(3)
    cached(pool, 2)
    pool.set_capacity(5)
    assert pool.allocate(2) == [3, 4]
    pool.check()


def test_memory_in_use_cannot_be_taken_away() -> None:
    pool = BlockPool(8)
    pool.allocate(3)
    pool.reserve(2, "sinks")
    with pytest.raises(CacheInUseError, match=r"^3 blocks from number 3 on are in use"):
        pool.set_capacity(3)
    assert pool.capacity == 8
    pool.check()
    pool.set_capacity(6)
    pool.check()


@pytest.mark.parametrize("mapped", [-1, 0, 5])
def test_an_impossible_capacity_is_refused(mapped: int) -> None:
    with pytest.raises(ArgumentError, match=f"^{mapped} mapped blocks in a pool of 4"):
        BlockPool(4).set_capacity(mapped)
