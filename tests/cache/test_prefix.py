"""Identity of cached blocks."""

from __future__ import annotations

import hashlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.kit import SECRET

from torpor.cache.prefix import KEY_BYTES, Epochs, PrefixChain, PrefixHasher, PrefixIndex
from torpor.errors import ArgumentError

FIRST = Epochs(weights=1, kv=1)


def hasher(block_size: int = 4, dtypes: tuple[str, ...] = ("float32",)) -> PrefixHasher:
    return PrefixHasher(block_size=block_size, dtypes=dtypes, secret=SECRET)


def chain_of(tokens: list[int], block_size: int = 4, seed: bytes = b"s" * 16) -> list[bytes]:
    chain: list[bytes] = []
    hasher(block_size).extend(chain, seed, tokens, len(tokens) // block_size)
    return chain


def test_everything_that_content_depends_on_is_in_the_seed() -> None:
    seeds = [
        hasher().seed(FIRST, "", ""),
        hasher().seed(Epochs(weights=2, kv=1), "", ""),
        hasher().seed(Epochs(weights=1, kv=2), "", ""),
        hasher(dtypes=("bfloat16",)).seed(FIRST, "", ""),
        hasher(dtypes=("float32", "float32")).seed(FIRST, "", ""),
        hasher(block_size=8).seed(FIRST, "", ""),
        hasher().seed(FIRST, "x", ""),
        hasher().seed(FIRST, "", "x"),
        PrefixHasher(block_size=4, dtypes=["float32"], secret=bytes(32)).seed(FIRST, "", ""),
    ]
    assert len(set(seeds)) == len(seeds)
    assert hasher().seed(FIRST, "x", "y") == hasher().seed(Epochs(weights=1, kv=1), "x", "y")
    assert {len(seed) for seed in seeds} == {KEY_BYTES}


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_adapter_and_salt_never_run_into_each_other(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    seeds = [hasher().seed(FIRST, *names) for names in (left, right)]
    assert (seeds[0] == seeds[1]) == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("", "adapter|1|x"), ("x", "")),
        (("xsalt|1|y", ""), ("x", "y")),
        (("xsalt|y", "z"), ("x", "ysalt|z")),
    ],
)
def test_values_that_look_like_records_stay_values(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    assert hasher().seed(FIRST, *left) != hasher().seed(FIRST, *right)


def test_a_seed_is_the_documented_hash() -> None:
    records = b"weights_epoch|1|1kv_epoch|1|2block_size|1|4dtype|7|float32"
    records += b"adapter|2|losalt|0|"
    expected = hashlib.blake2b(records, digest_size=16, key=SECRET, person=b"torpor kv seed")
    assert hasher().seed(Epochs(weights=1, kv=2), "lo", "") == expected.digest()


def test_a_lone_surrogate_is_a_salt_like_any_other() -> None:
    assert hasher().seed(FIRST, "", "\ud800") != hasher().seed(FIRST, "", "\udfff")


def test_a_key_covers_all_tokens_before_it() -> None:
    first = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    other = chain_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(set(first + other)) == 4
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == first[0]
    assert chain_of([1, 2, 3, 4], seed=b"t" * 16)[0] != first[0]


def test_token_ids_are_hashed_whole() -> None:
    assert chain_of([1, 0], 1) != chain_of([257, 0], 1)
    assert chain_of([2**31 - 1], 1) != chain_of([2**31 - 2], 1)
    with pytest.raises(OverflowError):
        chain_of([2**31], 1)


def test_a_chain_is_the_documented_hash() -> None:
    tokens = [5, 6, 7, 8]
    octets = b"".join(token.to_bytes(4, sys.byteorder) for token in tokens)
    expected = hashlib.blake2b(
        b"s" * 16 + octets, digest_size=16, key=SECRET, person=b"torpor kv block"
    )
    assert chain_of(tokens) == [expected.digest()]


def test_two_hashers_differ_unless_they_share_a_secret() -> None:
    random = [PrefixHasher(block_size=4, dtypes=[]).seed(FIRST, "", "") for _ in range(2)]
    assert random[0] != random[1]
    assert hasher().seed(FIRST, "", "") == hasher().seed(FIRST, "", "")
    with pytest.raises(ArgumentError, match="secret has 3 bytes; give 32"):
        PrefixHasher(block_size=4, dtypes=[], secret=b"abc")


def test_growing_a_chain_gives_the_keys_of_computing_it_at_once() -> None:
    tokens = [1, 2, 3, 4, 5]
    chain = PrefixChain(hasher(), tokens, "", "")
    one = list(chain.keys(1, FIRST))
    tokens += [6, 7, 8, 9, 10, 11, 12]
    grown = list(chain.keys(3, FIRST))
    assert grown[:1] == one
    assert grown == PrefixChain(hasher(), list(tokens), "", "").keys(3, FIRST)


def test_keys_are_kept_until_the_epochs_move() -> None:
    tokens = [1, 2, 3, 4]
    chain = PrefixChain(hasher(), tokens, "", "")
    before = chain.keys(1, FIRST)
    assert chain.keys(1, FIRST) is before
    after = chain.keys(1, Epochs(weights=2, kv=1))
    assert after != before
    assert chain.keys(1, FIRST) == before


def test_the_index_keeps_the_other_block_of_a_key() -> None:
    for removed, left in ((3, 5), (5, 3)):
        index = PrefixIndex(8)
        index.add(3, b"k")
        index.add(5, b"k")
        assert index.remove(removed)
        assert index.get(b"k") == left
        index.check()
        assert index.remove(left)
        assert index.get(b"k") is None
        assert list(index) == []
        index.check()


def test_many_blocks_of_one_key_go_in_any_order() -> None:
    index = PrefixIndex(8)
    for block in (1, 2, 3, 4):
        index.add(block, b"k")
    for block in (2, 1, 4):
        assert index.remove(block)
        index.check()
    assert index.get(b"k") == 3
    assert not index.remove(2)


def test_a_second_key_for_a_block_is_noticed() -> None:
    index = PrefixIndex(4)
    index.add(1, b"k")
    with pytest.raises(AssertionError, match="I4"):
        index.add(1, b"l")


def test_clearing_names_the_blocks_that_had_keys() -> None:
    index = PrefixIndex(6)
    for block, key in ((4, b"k"), (2, b"l"), (3, b"k")):
        index.add(block, key)
    assert index.clear() == [2, 3, 4]
    assert list(index) == []
    assert index.get(b"k") is None
    index.check()
    index.add(4, b"k")


@pytest.mark.parametrize(
    ("present", "run", "expected"),
    [
        ("abcd", None, (0, "abcd")),
        ("abd", None, (0, "ab")),
        ("bcd", None, (0, "")),
        ("", None, (0, "")),
        ("abcd", 2, (2, "cd")),
        ("bc", 2, (1, "bc")),
        ("abd", 2, (0, "ab")),
        ("ac", 2, (0, "a")),
        ("bd", 2, (0, "")),
        ("abcd", 9, (0, "abcd")),
        ("bcd", 9, (0, "")),
        ("ad", 1, (3, "d")),
    ],
)
def test_the_longest_hit_needs_what_the_window_sees(
    present: str, run: int | None, expected: tuple[int, str]
) -> None:
    index = PrefixIndex(8)
    for name in present:
        index.add("?abcd".index(name), name.encode())
    start, blocks = index.longest_hit([b"a", b"b", b"c", b"d"], run)
    found = "".join("?abcd"[block] for block in blocks)
    assert found == expected[1]
    assert start == expected[0] or not found


def test_damage_to_the_index_is_noticed() -> None:
    index = PrefixIndex(4)
    index.add(1, b"k")
    index._key_of[1] = b"l"
    with pytest.raises(AssertionError, match="I5"):
        index.check()
