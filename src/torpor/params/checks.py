"""Checks of single values, with the errors they raise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from torpor.errors import RequestError, shown


@dataclass(frozen=True, slots=True)
class Limit:
    """A range, and the words for it."""

    low: float
    high: float = math.inf
    above: bool = False
    """Whether ``low`` itself is excluded."""

    def holds(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        words = []
        if self.low > -math.inf:
            words.append(f"{'above' if self.above else 'of at least'} {self.low}")
        if self.high < math.inf:
            words.append(f"at most {self.high}")
        return " and ".join(words)


ANY = Limit(-math.inf)
"""Every finite number."""

SEED = Limit(-(2**63), 2**64 - 1)
"""What ``torch.Generator.manual_seed`` takes, to which vLLM hands a seed."""


def refuse_unsupported(params: Any, remedies: Mapping[str, str], prefix: str) -> None:
    """Refuse every parameter named in ``remedies`` that has not its default value."""
    for entry in fields(params):
        value = getattr(params, entry.name)
        if entry.name not in remedies:
            continue
        if entry.default is None and _is_empty(value):
            # An empty list or mapping asks for nothing; None can be hashed.
            object.__setattr__(params, entry.name, None)
        elif value != entry.default:
            raise RequestError(
                f"{prefix}{entry.name} is {shown(value)}, which torpor does not follow; "
                f"{remedies[entry.name]}"
            )


def _is_empty(value: object) -> bool:
    return isinstance(value, list | tuple | Mapping) and not value


def number(name: str, value: object, limit: Limit) -> float:
    """A finite number within the limit, as a float."""
    # bool is an int to Python, but True as a temperature is a mistake.
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not math.isfinite(number) or not limit.holds(number):
        remedy = f"give a finite number {limit}".rstrip()
        raise RequestError(f"{name} is {shown(value)}; {remedy}")
    return number


def integer(name: str, value: object, limit: Limit, *, optional: bool = False) -> int | None:
    """A whole number within the limit, as an int."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or not limit.holds(int(value)):
        also = ", or None" if optional else ""
        raise RequestError(f"{name} is {shown(value)}; give a whole number {limit}{also}")
    return int(value)


def flag(name: str, value: object) -> None:
    """True or False, nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; give True or False")


def text_or_none(name: str, value: object) -> None:
    """A string or None."""
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; give a string")


def strings(name: str, value: object, why_not_empty: str) -> tuple[str, ...]:
    """One string or several, none of them empty, as a tuple."""
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise RequestError(f"{name} is {shown(value)}; give a string or a list of strings")
    if "" in strings:
        raise RequestError(f"{name} is {shown(value)}: an empty string {why_not_empty}; remove it")
    for each in strings:
        if any("\ud800" <= character <= "\udfff" for character in each):
            raise RequestError(f"{name} has {shown(each)}, with a lone surrogate; remove it")
    return tuple(strings)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids as a tuple of ints."""
    if not isinstance(value, list | tuple) or not all(map(is_token_id, value)):
        raise RequestError(f"{name} is {shown(value)}; give a list of token ids from 0 up")
    return tuple(map(int, value))


def is_token_id(value: object) -> bool:
    """Whether this is a whole number from 0 up."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0
