"""Patterns for pages that come back, so that anything that was not restored is loud.

0xFF is NaN in every IEEE-like float and in the fp8 types with NaN; the fnuz types spell NaN 0x80.
The second pattern, 0x7F, catches code that happens to survive the first one: NaN in fp16 and fp8,
and close to the largest number in the wider floats. Signed integers get their lowest or highest
values, since 0xFF would be -1, a legal index. The scale type e8m0 knows no other NaN than 0xFF.
Booleans are filled with a legal value, since torch reads any other byte as undefined behaviour.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

PATTERNS = (0xFF, 0x7F)
"""The two patterns that poison tests run with."""

ENVIRONMENT_VARIABLE = "TORPOR_POISON"
_SPELLINGS = {"": None, "0": None, "off": None, "1": 0xFF, "on": 0xFF, "ff": 0xFF, "7f": 0x7F}
_FNUZ_NAN = 0x80
_LOWEST_INTEGER = 0x80


@dataclass(frozen=True, slots=True)
class Poison:
    """A fill pattern."""

    pattern: int
    """Byte that fills returned pages, unless the dtype needs another to be loud."""

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ArgumentError(f"poison pattern {self.pattern!r} is none of {PATTERNS}")

    def byte_for(self, dtype: torch.dtype) -> int:
        """The byte that fills memory of this dtype."""
        if dtype == torch.bool:
            return 1
        if "fnuz" in str(dtype):
            return _FNUZ_NAN
        if "e8m0" in str(dtype):
            return 0xFF
        if self.pattern == 0xFF and not (dtype.is_floating_point or dtype.is_complex):
            return _LOWEST_INTEGER
        return self.pattern


def poison_from(
    value: int | bool | Poison | None, environ: Mapping[str, str] | None = None
) -> Poison | None:
    """Read a caller's choice: a pattern, True (0xFF), False (off), or None for the environment.

    Raises:
        ArgumentError: neither the value nor ``TORPOR_POISON`` is a known pattern.
    """
    if isinstance(value, Poison):
        return value
    if value is None:
        text = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE, "").lower()
        if text not in _SPELLINGS:
            raise ArgumentError(
                f"{ENVIRONMENT_VARIABLE}={text!r} is none of {sorted(filter(None, _SPELLINGS))}"
            )
        pattern = _SPELLINGS[text]
        return None if pattern is None else Poison(pattern)
    if value is False:
        return None
    return Poison(PATTERNS[0] if value is True else value)
