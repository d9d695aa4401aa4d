"""Impossible levels, tags and policies are refused with the value in the message."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.errors import ArgumentError
from torpor.sleep.choices import level_from, one_of, tags_from
from torpor.sleep.classes import TAGS


@pytest.mark.parametrize(("given", "level"), [(1, 1), (2, 2), ("1", 1), ("2", 2)])
def test_a_level_is_a_number_or_its_digits(given: Any, level: int) -> None:
    assert level_from(given) == level


@pytest.mark.parametrize("level", [7, 0, -1, True, False, None, 1.0, "", "one", "-1", "7", [1]])
def test_any_other_level_is_refused(level: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        level_from(level)
    assert repr(int(level) if level == "7" else level) in str(caught.value)
    assert "1 keeps host copies" in str(caught.value)


def test_no_tags_means_all() -> None:
    assert tags_from(None) == TAGS


@pytest.mark.parametrize(
    ("given", "tags"),
    [
        (["weights"], ("weights",)),
        ("weights", ("weights",)),
        (["kv_cache"], ("kv_cache", "graphs")),
        (["graphs"], ("graphs",)),
        (("kv_cache", "weights"), ("weights", "kv_cache", "graphs")),
        ({"optimizer"}, ("optimizer",)),
        (["weights", "weights"], ("weights",)),
    ],
)
def test_graphs_follow_the_cache_and_order_does_not_matter(
    given: Any, tags: tuple[str, ...]
) -> None:
    assert tags_from(given) == tags


@pytest.mark.parametrize("tags", [[], (), "", ["weights", "kv"], "kv", [None], 5, True])
def test_empty_or_unknown_tags_are_refused(tags: Any) -> None:
    with pytest.raises(ArgumentError, match="weights"):
        tags_from(tags)


def test_a_choice_is_one_of_its_set() -> None:
    assert one_of("policy", "b", ("a", "b")) == "b"
    with pytest.raises(ArgumentError, match="policy='c' is none of"):
        one_of("policy", "c", ("a", "b"))
