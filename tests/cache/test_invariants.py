"""``check`` notices each way in which the books can be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cache.kit import Rig


def lose_a_free_block(rig: Rig) -> None:
    rig.manager.pool._free.popitem()


def free_a_held_block(rig: Rig) -> None:
    rig.manager.pool._free[rig.manager.table("a")[0]] = None


def miscount_a_reference(rig: Rig) -> None:
    rig.manager.pool._ref_counts[rig.manager.table("a")[0]] += 1


def name_a_block_twice(rig: Rig) -> None:
    table = rig.manager.table("a")
    table[2] = table[1]


def put_null_inside(rig: Rig) -> None:
    rig.manager.table("a")[1] = 0


def use_a_wrong_block(rig: Rig) -> None:
    table = rig.manager.table("a")
    table[0], table[1] = table[1], table[0]


def key_an_unfilled_block(rig: Rig) -> None:
    rig.manager.pool.index.add(rig.manager.table("a")[2], b"k" * 16)


def key_the_null_block(rig: Rig) -> None:
    rig.manager.pool.index.add(0, b"k" * 16)


def key_a_reserved_block(rig: Rig) -> None:
    rig.manager.pool.index.add(rig.manager.pool.reserved()["sinks"].block_ids[0], b"k" * 16)


def reserve_behind_the_back(rig: Rig) -> None:
    rig.manager.pool._num_reserved += 1


def change_written_tokens(rig: Rig) -> None:
    del rig.manager._tables["a"].token_ids[5:]  # type: ignore[attr-defined]


def put_a_cached_block_first(rig: Rig) -> None:
    rig.manager.remove("a")
    rig.manager.pool._free.move_to_end(next(iter(rig.manager.pool.index)), last=False)


DAMAGE = [
    (lose_a_free_block, "I1"),
    (free_a_held_block, "I1"),
    (miscount_a_reference, "I3"),
    (name_a_block_twice, "I3"),
    (put_null_inside, "I3"),
    (use_a_wrong_block, "I4"),
    (key_an_unfilled_block, "I4"),
    (key_the_null_block, "I5"),
    (key_a_reserved_block, "I5"),
    (reserve_behind_the_back, "I1"),
    (change_written_tokens, "I8"),
    (put_a_cached_block_first, "without a key go before"),
]


@pytest.mark.parametrize(("damage", "rule"), DAMAGE, ids=[f.__name__ for f, _ in DAMAGE])
def test_damage_is_noticed(damage: Callable[[Rig], None], rule: str) -> None:
    rig = Rig()
    rig.manager.reserve(2, "sinks")
    rig.start("a", list(range(10)))
    rig.manager.register("a", 8)
    rig.manager.check()
    damage(rig)
    with pytest.raises(AssertionError, match=rule):
        rig.manager.check()
