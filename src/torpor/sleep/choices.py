"""Reading what callers choose: levels, tags, policies. Impossible choices change nothing."""

from __future__ import annotations

from collections.abc import Collection

from torpor.errors import ArgumentError, shown
from torpor.sleep.classes import LEVELS, TAGS

FOREIGN_WRITE_POLICIES = ("adopt", "restore", "error")
"""What a sleep does when content was changed outside the door."""


def level_from(level: object) -> int:
    """A sleep level given as a number or a digit string.

    Raises:
        ArgumentError: it is none of the levels that move memory.
    """
    if isinstance(level, str) and level.isdecimal() and len(level) < 10:
        level = int(level)
    if isinstance(level, bool) or not isinstance(level, int) or level not in LEVELS:
        raise ArgumentError(
            f"sleep level {shown(level, 80)} is none of {LEVELS}: 1 keeps host copies of the "
            "weights, 2 discards them"
        )
    return level


def version_from(version: object) -> str | None:
    """The name of an update's weights.

    Raises:
        ArgumentError: neither a string nor None.
    """
    if version is not None and not isinstance(version, str):
        raise ArgumentError(
            f"version is {shown(version, 80)}; give a string that names the weights, or None"
        )
    return version


def tags_from(tags: Collection[str] | str | None) -> tuple[str, ...]:
    """The tags a call speaks of; None is all. ``graphs`` follows ``kv_cache``.

    Raises:
        ArgumentError: an empty collection or an unknown tag.
    """
    if tags is None:
        return TAGS
    given: object = tags  # Callers without a type checker pass anything.
    if not isinstance(given, Collection):
        raise ArgumentError(
            f"tags is {shown(given, 80)}; name some of {TAGS}, or pass None for all"
        )
    named = (tags,) if isinstance(tags, str) else tuple(tags)
    if not named:
        raise ArgumentError(f"tags is empty; name some of {TAGS}, or pass None for all")
    unknown = [tag for tag in named if tag not in TAGS]
    if unknown:
        raise ArgumentError(f"unknown tag {shown(unknown[0], 80)}; the tags are {TAGS}")
    follows = ("graphs",) if "kv_cache" in named else ()
    return tuple(tag for tag in TAGS if tag in (*named, *follows))


def flag_or_none(name: str, value: object) -> None:
    """Check a choice between True, False and None.

    Raises:
        ArgumentError: it is something else.
    """
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(f"{name}={shown(value, 80)} is none of True, False, None")


def one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """A choice out of a fixed set.

    Raises:
        ArgumentError: it is none of them.
    """
    if value not in allowed:
        raise ArgumentError(f"{name}={shown(value, 80)} is none of {tuple(allowed)}")
    return value
