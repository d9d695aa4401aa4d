"""Tables of requests over one pool: hits, capacity, preemption, reset, windows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.cache.kit import Rig, spec

from torpor.cache.manager import Epochs, KVCacheManager, PrefixMatch
from torpor.errors import ArgumentError, CacheInUseError

PROMPT = list(range(10))
"""Two full blocks of four, and two tokens more."""


def test_a_table_covers_what_was_asked_and_grows_at_its_end() -> None:
    rig = Rig()
    table = list(rig.start("a", PROMPT))
    assert table == [1, 2, 3]
    assert rig.manager.allocate("a", 12)
    assert rig.manager.table("a") == table
    assert rig.manager.allocate("a", 13)
    assert rig.manager.table("a") == [*table, 4]
    assert rig.manager.allocate("a", 1), "a shorter table is covered already"
    rig.manager.check()


def test_a_request_grows_into_the_next_block_where_it_can() -> None:
    rig = Rig()
    for name in ("a", "b", "c", "d"):
        rig.start(name, [1] * 4)
    rig.manager.remove("b")
    rig.manager.remove("c")
    assert rig.manager.allocate("a", 12)
    assert rig.manager.table("a") == [1, 2, 3]
    rig.manager.check()


def test_a_finished_request_is_found_by_the_next() -> None:
    rig = Rig()
    first = rig.run("a", PROMPT)
    rig.manager.add("b", [*PROMPT, 99])
    match = rig.manager.match_prefix("b")
    assert match == PrefixMatch(tuple(first[:2]), 8)
    assert rig.manager.allocate("b", 11, match)
    assert rig.manager.table("b")[:2] == first[:2]
    rig.manager.check()


def test_requests_share_blocks_while_both_run() -> None:
    rig = Rig()
    first = rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    second = rig.start("b", PROMPT)
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert rig.manager.pool.ref_count(first[0]) == 2
    rig.manager.remove("a")
    assert not rig.manager.pool.is_free(second[0])
    rig.manager.check()


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_the_last_token_is_never_served_from_the_cache(length: int, hit: int) -> None:
    rig = Rig()
    rig.run("a", PROMPT)
    assert rig.hit(PROMPT[:length]) == hit


def test_only_registered_positions_are_found() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    assert rig.hit(PROMPT) == 0
    rig.manager.register("a", 7)
    assert rig.hit(PROMPT) == 4
    rig.manager.register("a", 8)
    assert rig.hit(PROMPT) == 8
    rig.manager.register("a", 4)
    assert rig.hit(PROMPT) == 8
    rig.manager.check()


def test_generated_tokens_are_found_too() -> None:
    rig = Rig()
    tokens = list(PROMPT)
    rig.start("a", tokens)
    tokens += [50, 51]
    assert rig.manager.allocate("a", 12)
    rig.manager.register("a", 12)
    assert rig.hit([*PROMPT, 50, 51, 0]) == 12
    assert rig.hit([*PROMPT, 50, 52, 0]) == 8


def test_registering_what_is_not_there_is_noticed() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    with pytest.raises(AssertionError, match="I8"):
        rig.manager.register("a", 11)
    rig.manager.add("b", PROMPT)
    assert rig.manager.allocate("b", 4)
    with pytest.raises(AssertionError, match="I6"):
        rig.manager.register("b", 8)


def test_a_match_changes_nothing() -> None:
    rig = Rig()
    rig.run("a", PROMPT)
    rig.manager.add("b", PROMPT)
    before = (rig.manager.num_free, list(rig.manager.pool._free))
    assert rig.manager.match_prefix("b") == rig.manager.match_prefix("b")
    assert (rig.manager.num_free, list(rig.manager.pool._free)) == before
    assert rig.manager.table("b") == []


def test_without_prefix_caching_nothing_is_shared() -> None:
    rig = Rig(enable_prefix_caching=False)
    rig.run("a", PROMPT)
    assert rig.hit(PROMPT) == 0
    assert sorted(rig.dead) == [1, 2, 3]
    rig.manager.check()


def test_without_prefix_caching_nothing_is_hashed() -> None:
    rig = Rig(enable_prefix_caching=False)
    too_large_to_hash = [2**40] * 10
    rig.run("a", too_large_to_hash)
    assert rig.hit(too_large_to_hash) == 0


def test_a_request_may_decline_its_hits() -> None:
    rig = Rig()
    first = list(rig.start("a", PROMPT))
    rig.manager.register("a", 8)
    rig.manager.add("b", PROMPT)
    assert rig.manager.allocate("b", 10)
    rig.manager.register("b", 8)
    assert not set(first) & set(rig.manager.table("b"))
    rig.manager.check()


# -- identity -------------------------------------------------------------------------------------


def test_other_adapters_and_salts_never_hit() -> None:
    rig = Rig(20)
    rig.run("plain", PROMPT)
    rig.run("adapter", PROMPT, adapter="x")
    rig.run("salt", PROMPT, salt="y")
    assert rig.hit(PROMPT) == 8
    assert rig.hit(PROMPT, adapter="x") == 8
    assert rig.hit(PROMPT, salt="y") == 8
    assert rig.hit(PROMPT, salt="x") == 0, "an adapter called x is not a salt x"
    assert rig.hit(PROMPT, adapter="y") == 0
    assert rig.hit(PROMPT, adapter="x", salt="y") == 0


@pytest.mark.parametrize("moved", [Epochs(weights=2, kv=1), Epochs(weights=1, kv=2)])
def test_a_forgotten_reset_cannot_give_a_hit(moved: Epochs) -> None:
    rig = Rig()
    rig.run("a", PROMPT)
    rig.manager.add("waiting", PROMPT)
    assert rig.manager.match_prefix("waiting").num_tokens == 8
    rig.epochs = moved
    assert rig.manager.match_prefix("waiting").num_tokens == 0
    assert rig.hit(PROMPT) == 0
    rig.run("b", PROMPT)
    assert rig.hit(PROMPT) == 8, "content of the present epochs is found"
    rig.manager.check()


def test_a_request_begun_under_other_epochs_registers_nothing() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    rig.manager.register("a", 4)
    rig.epochs = Epochs(weights=2, kv=1)
    rig.manager.register("a", 8)
    assert rig.hit(PROMPT) == 0
    rig.manager.free("a")
    rig.admit("a", 10)
    rig.manager.register("a", 8)
    assert rig.hit(PROMPT) == 8, "recomputed, it registers again"
    rig.manager.check()


def test_unsure_content_is_not_found_nor_registered_again() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    shared = rig.start("b", [*PROMPT, 1, 2])
    rig.manager.unregister("a")
    assert rig.hit(PROMPT) == 0
    rig.manager.register("a", 8)
    rig.manager.register("b", 12)
    assert rig.hit(PROMPT) == 0
    rig.manager.check()
    rig.manager.free("a")
    rig.manager.remove("b")
    assert shared[0] in rig.dead
    rig.admit("a", 10)
    rig.manager.register("a", 8)
    assert rig.hit(PROMPT) == 8
    rig.manager.check()


def test_two_blocks_with_one_content_outlive_each_other() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    second = rig.start("b", PROMPT)
    rig.manager.register("a", 10)
    rig.manager.register("b", 10)
    rig.manager.check()
    rig.manager.unregister("a")
    assert rig.manager.match_prefix("a").block_ids == tuple(second[:2])
    rig.manager.check()


def test_a_hit_that_is_void_by_now_is_noticed() -> None:
    rig = Rig(4)
    rig.run("a", PROMPT)
    rig.manager.add("b", PROMPT)
    match = rig.manager.match_prefix("b")
    rig.run("c", [7] * 12)
    with pytest.raises(AssertionError, match="I4"):
        rig.manager.allocate("b", 10, match)


def test_a_hit_only_starts_a_table() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    with pytest.raises(AssertionError, match="I6"):
        rig.manager.allocate("a", 10, rig.manager.match_prefix("a"))
    rig.manager.add("b", PROMPT[:8])
    whole = PrefixMatch(tuple(rig.manager.table("a")[:2]), 8)
    with pytest.raises(AssertionError, match="I7"):
        rig.manager.allocate("b", 8, whole)


# -- capacity -------------------------------------------------------------------------------------


def test_what_does_not_fit_changes_nothing() -> None:
    rig = Rig(4)
    rig.start("a", [1] * 8)
    rig.manager.add("b", [2] * 8)
    assert not rig.manager.allocate("b", 8)
    assert rig.manager.table("b") == []
    assert rig.manager.num_free == 1
    assert rig.manager.allocate("b", 4)
    assert not rig.manager.allocate("a", 9)
    rig.manager.check()


def test_free_hits_count_as_blocks_that_are_needed() -> None:
    rig = Rig(4)
    rig.run("a", PROMPT)
    rig.start("other", [9])
    rig.manager.add("b", [*PROMPT, 3])
    match = rig.manager.match_prefix("b")
    assert match.num_tokens == 8
    assert rig.manager.num_free == 2
    assert rig.manager.blocks_needed("b", 11, match) == 3
    assert not rig.manager.would_fit("b", 11, match)
    assert not rig.manager.allocate("b", 11, match)
    rig.manager.check()
    rig.manager.remove("other")
    assert rig.manager.would_fit("b", 11, match)
    assert not rig.manager.would_fit("b", 11, match, spare=1)
    assert rig.manager.allocate("b", 11, match)
    rig.manager.check()


def test_hits_that_others_hold_cost_nothing() -> None:
    rig = Rig(5)
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    rig.manager.add("b", PROMPT)
    match = rig.manager.match_prefix("b")
    assert rig.manager.blocks_needed("b", 10, match) == 1
    assert rig.manager.allocate("b", 10, match)
    assert rig.manager.num_free == 0
    rig.manager.check()


def test_new_blocks_never_take_the_hits_of_the_same_request() -> None:
    rig = Rig(5)
    # The hits are the oldest free blocks, so they are the next to be handed out.
    first = rig.run("a", PROMPT[:8])
    rig.run("b", [9] * 8)
    table = rig.start("c", [*PROMPT[:8], *[5] * 8])
    assert table[:2] == first
    assert len(set(table)) == 4
    rig.manager.check()


def test_a_full_pool_leaves_reserved_blocks_alone() -> None:
    rig = Rig(8)
    sinks = rig.manager.reserve(2, "sinks")
    for name in ("a", "b", "c"):
        for _ in range(3):
            rig.manager.add(name, [ord(name)] * 20)
            assert rig.manager.allocate(name, 20)
            assert not set(sinks) & set(rig.manager.table(name))
            assert not rig.manager.allocate(name, 21)
            rig.manager.register(name, 20)
            rig.manager.check()
            rig.manager.remove(name)
    assert not set(sinks) & set(rig.dead)


def test_usage_is_the_share_of_what_requests_can_hold() -> None:
    rig = Rig(9)
    assert rig.manager.usage == 0.0
    rig.manager.reserve(4, "sinks")
    assert rig.manager.usage == 0.0
    rig.start("a", PROMPT[:8])
    assert rig.manager.usage == 0.5
    rig.manager.pool.set_capacity(7)
    assert rig.manager.usage == 1.0
    rig.manager.remove("a")
    rig.manager.pool.release_reserved("sinks")
    rig.manager.pool.set_capacity(1)
    assert rig.manager.usage == 1.0


def test_a_request_larger_than_the_pool_can_be_told_beforehand() -> None:
    rig = Rig(9)
    assert rig.manager.fits_alone(32, 8)
    assert not rig.manager.fits_alone(33, 8)
    rig.manager.reserve(1, "sinks")
    assert not rig.manager.fits_alone(32, 8)
    assert Rig(9, window=5).manager.fits_alone(1000, 8)


def test_layers_behind_one_table_must_agree() -> None:
    with pytest.raises(ArgumentError, match="block sizes"):
        KVCacheManager([spec(), spec(block_size=8)], 9, epochs=lambda: Epochs(weights=0, kv=0))
    with pytest.raises(ArgumentError, match="pool of 1 blocks"):
        Rig(1)


# -- ends and preemption --------------------------------------------------------------------------


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    rig = Rig()
    table = list(rig.start("a", PROMPT))
    rig.manager.register("a", 10)
    rig.manager.free("a")
    assert rig.manager.table("a") == []
    assert rig.manager.num_free == 8
    assert rig.admit("a", 10)[:2] == table[:2]
    rig.manager.check()


def test_ends_of_prompts_are_evicted_before_their_starts() -> None:
    rig = Rig(5)
    rig.run("a", [*range(16)])
    rig.run("b", [99] * 4)
    assert rig.hit([*range(16), 0]) == 12
    rig.run("c", [98] * 4)
    assert rig.hit([*range(16), 0]) == 8


def test_unknown_and_double_names_are_noticed() -> None:
    rig = Rig()
    rig.manager.add("a", PROMPT)
    with pytest.raises(AssertionError, match="'a' was added already"):
        rig.manager.add("a", PROMPT)
    rig.manager.remove("a")
    with pytest.raises(AssertionError, match="'a' is not known"):
        rig.manager.remove("a")


def test_freeing_twice_is_harmless() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    rig.manager.free("a")
    rig.manager.free("a")
    rig.manager.check()
    rig.manager.remove("a")
    assert rig.manager.num_free == 8


# -- reset, drop, capacity ------------------------------------------------------------------------


def test_reset_says_who_is_in_the_way_and_changes_nothing() -> None:
    rig = Rig()
    rig.manager.reserve(1, "sinks")
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    rig.start("b", PROMPT)
    rig.manager.add("waiting", PROMPT)
    with pytest.raises(CacheInUseError, match="2 running requests hold 4 blocks"):
        rig.manager.reset_prefix_cache()
    assert rig.hit(PROMPT) == 8


def test_reset_works_after_preemption_and_with_reserved_blocks() -> None:
    rig = Rig()
    sinks = rig.manager.reserve(2, "sinks")
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    rig.manager.free("a")
    rig.manager.reset_prefix_cache()
    assert rig.hit(PROMPT) == 0
    assert rig.manager.pool.reserved()["sinks"].block_ids == sinks
    assert not set(sinks) & set(rig.dead)
    rig.manager.check()
    rig.manager.reset_prefix_cache()


def test_dropped_memory_empties_every_table() -> None:
    rig = Rig(clear_fresh=True)
    written: list[int] = []
    sinks = rig.manager.reserve(2, "sinks", written.extend)
    rig.start("a", PROMPT)
    rig.manager.register("a", 8)
    rig.manager.drop()
    assert rig.manager.table("a") == []
    assert rig.manager.num_free == 6
    assert rig.manager.take_fresh_blocks() == []
    assert rig.hit(PROMPT) == 0, "even though the epochs stand still"
    rig.manager.check()
    rig.manager.register("a", 8)
    rig.manager.free("a")
    rig.manager.pool.refill_reserved()
    assert tuple(written) == sinks
    rig.admit("a", 10)
    rig.manager.remove("a")
    rig.manager.check()


def test_dropping_repairs_books_that_an_interrupt_left_half_written() -> None:
    def interrupt(blocks: Sequence[int]) -> None:
        raise KeyboardInterrupt

    rig = Rig(5, on_free=interrupt)
    sinks = rig.manager.reserve(1, "sinks")
    rig.run("a", [*range(12)])
    rig.manager.add("b", [9] * 12)
    with pytest.raises(KeyboardInterrupt):
        rig.manager.allocate("b", 12)
    with pytest.raises(AssertionError, match="I1"):
        rig.manager.check()
    rig.manager.drop()
    rig.manager.check()
    assert rig.manager.num_free == 3
    assert not set(sinks) & set(rig.admit("b", 12))


def test_a_smaller_wake_leaves_fewer_blocks_to_requests() -> None:
    rig = Rig(9)
    rig.start("a", [*range(32)])
    rig.manager.register("a", 32)
    with pytest.raises(CacheInUseError, match=r"^4 blocks from number 5 on are in use"):
        rig.manager.pool.set_capacity(5)
    rig.manager.free("a")
    rig.manager.pool.set_capacity(5)
    assert rig.manager.num_free == 4
    match = rig.manager.match_prefix("a")
    assert match == PrefixMatch((1, 2, 3, 4), 16)
    assert not rig.manager.allocate("a", 17, match)
    assert rig.start("b", [*range(16)]) == [1, 2, 3, 4]
    rig.manager.check()


# -- fresh blocks ---------------------------------------------------------------------------------


def test_fresh_blocks_are_named_once_and_hits_never() -> None:
    rig = Rig(clear_fresh=True)
    rig.manager.reserve(1, "sinks")
    first = list(rig.start("a", PROMPT))
    assert rig.manager.take_fresh_blocks() == first
    assert rig.manager.take_fresh_blocks() == []
    rig.manager.register("a", 8)
    second = rig.start("b", PROMPT)
    assert rig.manager.take_fresh_blocks() == second[2:]


def test_blocks_given_back_at_once_need_no_clearing() -> None:
    rig = Rig(clear_fresh=True)
    table = list(rig.start("a", PROMPT))
    rig.manager.free("a")
    rig.manager.reserve(1, "sinks")
    assert rig.manager.take_fresh_blocks() == []
    rig.start("b", [5] * 12)
    rig.manager.free("b")
    again = rig.start("c", [6] * 8)
    assert set(again) & set(table)
    assert rig.manager.take_fresh_blocks() == again


def test_nothing_is_noted_unless_fresh_blocks_are_cleared() -> None:
    rig = Rig()
    rig.start("a", PROMPT)
    assert rig.manager.take_fresh_blocks() == []


# -- windows --------------------------------------------------------------------------------------


def test_blocks_that_left_the_window_go_back() -> None:
    rig = Rig(window=5)
    table = list(rig.start("a", [*range(14)]))
    rig.manager.skip_window("a", 7)
    assert rig.manager.table("a") == table, "position 3 is still seen by position 7"
    rig.manager.skip_window("a", 8)
    assert rig.manager.table("a") == [0, *table[1:]]
    rig.manager.skip_window("a", 13)
    assert rig.manager.table("a") == [0, 0, *table[2:]]
    assert rig.manager.num_free == 6
    rig.manager.check()
    rig.manager.register("a", 14)
    rig.manager.check()
    rig.manager.remove("a")
    assert rig.manager.num_free == 8
    assert 0 not in rig.dead


def test_a_window_never_moves_back_and_needs_a_table() -> None:
    rig = Rig(window=5)
    table = list(rig.start("a", [*range(14)]))
    rig.manager.skip_window("a", 13)
    rig.manager.skip_window("a", 8)
    assert rig.manager.table("a") == [0, 0, *table[2:]]
    rig.manager.check()
    rig.manager.free("a")
    rig.manager.skip_window("a", 13)
    assert rig.manager.table("a") == []
    rig.manager.check()


def test_without_a_window_nothing_is_skipped() -> None:
    rig = Rig()
    table = list(rig.start("a", PROMPT))
    rig.manager.skip_window("a", 10)
    assert rig.manager.table("a") == table


def test_a_windowed_hit_needs_only_what_the_next_token_sees() -> None:
    rig = Rig(8, window=5)
    table = list(rig.start("a", [*range(12)]))
    rig.manager.register("a", 12)
    rig.manager.skip_window("a", 12)
    rig.manager.free("a")
    # Takes the empty blocks and those that left the window first.
    assert set(rig.start("b", [9] * 24)) == {1, 2, 3, 4, 5, 6, 7} - {table[2]}
    rig.manager.add("c", [*range(13)])
    match = rig.manager.match_prefix("c")
    assert match == PrefixMatch((0, 0, table[2]), 12)
    assert not rig.manager.allocate("c", 13, match)
    rig.manager.remove("b")
    assert rig.manager.allocate("c", 13, match)
    rig.manager.check()


def test_windowed_hits_skip_the_head_and_do_not_take_it() -> None:
    rig = Rig(window=5)
    table = rig.run("a", [*range(12)])
    rig.manager.add("b", [*range(13)])
    match = rig.manager.match_prefix("b")
    assert match == PrefixMatch((0, 0, table[2]), 12)
    assert rig.manager.blocks_needed("b", 13, match) == 2
    assert rig.manager.allocate("b", 13, match)
    rig.manager.check()
    rig.manager.skip_window("b", 12)
    rig.manager.register("b", 13)
    rig.manager.check()
    rig.manager.free("b")
    rig.manager.check()


def test_a_window_of_one_sees_no_earlier_block() -> None:
    rig = Rig(window=1)
    rig.run("a", PROMPT)
    rig.manager.add("b", PROMPT)
    match = rig.manager.match_prefix("b")
    assert match == PrefixMatch((0, 0), 8)
    assert rig.manager.allocate("b", 10, match)
    rig.manager.check()
    rig.manager.remove("b")
    rig.manager.check()


def test_a_window_keeps_a_long_request_small() -> None:
    rig = Rig(4, window=5)
    tokens = [*range(100)]
    rig.manager.add("a", tokens)
    for end in range(1, 101):
        rig.manager.skip_window("a", end - 1)
        assert rig.manager.allocate("a", end)
        rig.manager.register("a", end)
        rig.manager.check()
    assert len(rig.manager.table("a")) == 25
