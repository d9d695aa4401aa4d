"""What the text of a completion must look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torpor.errors import RequestError, shown
from torpor.params.checks import flag, refuse_unsupported, text_or_none

MAX_CHOICES = 1000
"""Grammars of twice as many alternatives are beyond what the matcher takes."""

MAX_PATTERN_LENGTH = 100_000
"""Characters of a regular expression; the matcher gives up at some times as many, in the middle of
a text."""

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_UNSUPPORTED = {
    "disable_additional_properties": "remove it and write additionalProperties in the schema",
    "structural_tag": "remove it and give a grammar",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion must look like: exactly one constraint, and its options.

    Raises:
        RequestError: no constraint or several, a wrong type, or an option of vLLM that torpor does
            not follow. Whether a schema or grammar is valid is checked with the request.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object; kept as text."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar in Lark or GBNF (EBNF) form."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between the tokens of JSON."""
    disable_fallback: bool = False
    """Accepted from callers of vLLM: there is one grammar library, so nothing to fall back to."""
    disable_additional_properties: bool = False
    """Of vLLM, not followed: the schema itself says which properties it allows."""
    structural_tag: str | None = None
    """Of vLLM, not followed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            text_or_none(f"structured_outputs.{name}", getattr(self, name))
        for name in ("regex", "whitespace_pattern"):
            _check_length(name, getattr(self, name))
        if self.json_object is not None:
            flag("structured_outputs.json_object", self.json_object)
        for name in ("disable_any_whitespace", "disable_fallback"):
            flag(f"structured_outputs.{name}", getattr(self, name))
        self._check_together()

    def _check_together(self) -> None:
        refuse_unsupported(self, _UNSUPPORTED, "structured_outputs.")
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "no constraint"
            raise RequestError(
                f"structured_outputs has {found}; give exactly one of {', '.join(_CONSTRAINTS)}"
            )
        spaced = self.disable_any_whitespace or self.whitespace_pattern is not None
        if spaced and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"structured_outputs has {given[0]} with an option for white space in JSON; "
                "remove disable_any_whitespace and whitespace_pattern"
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs has disable_any_whitespace and whitespace_pattern "
                f"{self.whitespace_pattern!r:.80}; remove one"
            )


def _check_length(name: str, pattern: str | None) -> None:
    if pattern is not None and len(pattern) > MAX_PATTERN_LENGTH:
        raise RequestError(
            f"structured_outputs.{name} is {pattern[:40]!r}... with {len(pattern)} characters; "
            f"give at most {MAX_PATTERN_LENGTH}"
        )


def _schema_text(schema: object) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured_outputs.json is {shown(schema)}; give a JSON schema")
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.json is no JSON ({error}); give plain objects, lists and values"
        ) from error


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise RequestError(f"structured_outputs.choice is {shown(value)}; give a list of strings")
    if not value:
        raise RequestError("structured_outputs.choice is empty; give at least one string")
    if len(value) > MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice has {len(value)} entries; give at most {MAX_CHOICES}, or a "
            "regex"
        )
    return tuple(value)
