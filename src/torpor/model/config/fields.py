"""Reads typed fields out of JSON files and other loosely typed mappings, and misses none."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from torpor.errors import ConfigError, TorporError, shown

MAX_JSON_BYTES = 64 * 1024 * 1024
"""A config, index or manifest is at most a few MB; more is damage, and parsing it would hang."""

MAX_SIZE = 2**31 - 1
"""No size, count or id of a model is larger."""

MAX_LAYERS = 4096
MAX_EXPERTS = 4096
"""Far more than any model has. Each is a module, and has names: more would be built for minutes."""

_T = TypeVar("_T")


class _DuplicateKeyError(ValueError):
    """A JSON object holds a key twice, so that its meaning depends on the reader."""


def parse_json_object(raw: bytes, where: str, error: type[TorporError]) -> dict[str, object]:
    """Parse UTF-8 JSON bytes whose top level is an object.

    Args:
        raw: the bytes.
        where: what the bytes are, for messages.
        error: the class to raise.

    Raises:
        error: not UTF-8, not JSON, a duplicate key, NaN or infinity, or not an object.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except UnicodeDecodeError as cause:
        raise error(f"{where} is not UTF-8 ({cause}); fetch the file again") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{where} is not valid JSON ({cause}); fetch the file again") from cause
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{where} holds a JSON {kind}, not an object; fetch the file again")
    return value


def read_json_object(path: Path, error: type[TorporError] = ConfigError) -> dict[str, object]:
    """Read a JSON file whose top level is an object.

    Raises:
        error: the file is missing, unreadable, absurdly large, or fails `parse_json_object`.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as cause:
        raise error(f"{path} cannot be read ({cause.strerror}); check the path") from cause
    if len(raw) > MAX_JSON_BYTES:
        raise error(f"{path} is larger than {MAX_JSON_BYTES} bytes; it is not a model's JSON file")
    return parse_json_object(raw, str(path), error)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKeyError(f"key {repeated!r} appears twice")
    return result


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON number")


class Fields:
    """Typed access to a mapping that remembers what was read, so that nothing is ignored unseen.

    A field whose value is None counts as missing. Every method raises ConfigError with the value
    and the accepted range when a field has the wrong type or size.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self._spelled: Mapping[str, str] = {}
        self.where = where

    def raw(self, name: str) -> object:
        """The value as it stands, or None when missing."""
        self._read.add(name)
        return self._values.get(name)

    def values(self) -> dict[str, object]:
        """A copy of all fields; those read through it do not count as read."""
        return dict(self._values)

    def with_values(self, values: Mapping[str, object], spelled: Mapping[str, str]) -> Fields:
        """Other values in the same place; what was read here counts as read there.

        Args:
            values: by name.
            spelled: what the file calls a name, for messages, where it calls it something else.
        """
        made = Fields(values, self.where)
        made._read |= self._read
        made._spelled = spelled
        return made

    def states(self, name: str) -> bool:
        """Whether the field is there at all, be it as null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int:
        """A whole number in [low, high]; required when there is no default."""
        value = self.optional_integer(name, low=low, high=high)
        return value if value is not None else self._needed(name, default)

    def optional_integer(self, name: str, *, low: int, high: int) -> int | None:
        """A whole number in [low, high], or None when missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above zero; required when there is no default."""
        value = self.raw(name)
        if value is None:
            return self._needed(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, value, "a number above zero")
        if not 0 < value <= 1e30 or not math.isfinite(value):
            raise self.error(name, value, "a number above zero")
        return float(value)

    def exactly(self, name: str, accepted: float) -> None:
        """Accept a missing field or the one value that changes nothing."""
        value = self.raw(name)
        if value is not None and (isinstance(value, bool) or value != accepted):
            raise self.error(name, value, str(accepted))

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required when there is no default."""
        value = self.raw(name)
        if value is None:
            return self._needed(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def choice(self, name: str, accepted: Collection[str], default: str | None = None) -> str:
        """One of the accepted strings."""
        value = self.text(name, default)
        if value not in accepted:
            raise self.error(name, value, " or ".join(repr(entry) for entry in accepted))
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as one whole number or a list of them; empty when missing."""
        value = self.raw(name)
        if value is None:
            return ()
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < 2**31:
                raise self.error(name, value, "a token id or a list of token ids")
        return tuple(entries)

    def indices(self, name: str, below: int) -> tuple[int, ...]:
        """A list of indices from 0 to ``below - 1``; empty when missing."""
        value = self.raw(name)
        if value is None:
            return ()
        entries = value if isinstance(value, list) else [None]
        for entry in entries:
            if not isinstance(entry, int) or isinstance(entry, bool) or not 0 <= entry < below:
                raise self.error(name, value, f"a list of whole numbers from 0 to {below - 1}")
        return tuple(entries)

    def refuse_unread(self, harmless: Collection[str]) -> None:
        """Refuse every field that was not read, is switched on, and is not known to be harmless.

        Switched off means null, false, zero or empty.
        """
        for name, value in self._values.items():
            known = name in self._read or name in harmless or name.startswith("_")
            if value and not known:
                said = self._spelled.get(name, name)
                raise ConfigError(
                    f"{self.where}: {said} = {shown(value, 80)} is a feature torpor does not know "
                    "and will not ignore; remove the field if it does not change the logits"
                )

    def error(self, name: str, value: object, accepted: str) -> ConfigError:
        """The error for a value that is not accepted."""
        said = self._spelled.get(name, name)
        return ConfigError(f"{self.where}: {said} is {shown(value, 80)}; it must be {accepted}")

    def _needed(self, name: str, default: _T | None) -> _T:
        if default is None:
            said = self._spelled.get(name, name)
            raise ConfigError(f"{self.where}: {said} is missing; add it, or fetch the file again")
        return default
