"""Figures for people: sizes, durations, counts. Decimal units, three digits at most."""

from __future__ import annotations

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_DURATIONS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def size(nbytes: float | None) -> str:
    """Bytes, such as ``538 MB``; 1 MB is a million bytes."""
    if nbytes is None:
        return "unknown"
    for unit, name in _SIZES:
        # 999.6 kB would read as 1000 kB: it is a MB by then.
        if nbytes >= 0.9995 * unit:
            return f"{_digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds, such as ``72 ms``."""
    if seconds is None:
        return "unknown"
    for least, factor, name in _DURATIONS:
        if seconds >= 0.9995 * least:
            return f"{_digits(seconds * factor)} {name}"
    raise AssertionError("the last unit takes everything")


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun, such as ``1 token`` and ``2 tokens``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def printable(text: str) -> str:
    """Text without control characters: what a model says must not steer the terminal."""
    return text.translate(_CONTROL)


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2f}"
