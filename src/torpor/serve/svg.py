"""Just enough SVG for the report's charts: elements, scales, axes. Colours are classes of its CSS.

Lengths are SVG units, which are CSS pixels as long as a chart is shown at its own width.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHAR_WIDTH = 6.6
"""Width of an average character at the charts' font size of 12, on the safe side."""


def element(name: str, *children: str, **attributes: object) -> str:
    """One element. Children are markup; attribute values are escaped.

    A trailing underscore in an attribute's name is dropped (``class_``), others become hyphens.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children:
        return f"<{name}{written}/>"
    return f"<{name}{written}>{''.join(children)}</{name}>"


def text(words: str, x: float, y: float, *, anchor: str = "start", class_: str = "") -> str:
    """A line of text; ``y`` is its baseline."""
    return element("text", html.escape(words), x=x, y=y, text_anchor=anchor, class_=class_ or None)


def rectangle(x: float, y: float, width: float, height: float, class_: str, hint: str = "") -> str:
    """A rectangle with a native tooltip."""
    children = (element("title", html.escape(hint)),) if hint else ()
    return element("rect", *children, x=x, y=y, width=max(width, 0.0), height=height, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def polyline(points: Iterable[tuple[float, float]], class_: str) -> str:
    """An open line through points."""
    return element("polyline", points=_points(points), class_=class_)


def polygon(points: Iterable[tuple[float, float]], class_: str) -> str:
    """A filled area."""
    return element("polygon", points=_points(points), class_=class_)


def picture(width: float, height: float, label: str, *children: str, class_: str = "") -> str:
    """A whole chart; ``label`` is what a screen reader says."""
    return element(
        "svg", *children, viewBox=f"0 0 {_short(width)} {_short(height)}", width=width,
        height=height, role="img", aria_label=label, class_=class_ or None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Linear:
    """Values from ``low`` to ``high`` on a stretch of the picture."""

    low: float
    high: float
    low_at: float
    high_at: float

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return self.low_at + share * (self.high_at - self.low_at)

    def ticks(self, about: int) -> list[float]:
        """Round values from ``low`` to ``high``, roughly so many."""
        step = round_step((self.high - self.low) / max(about, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """Positive values on a stretch of the picture, each decade as long as the next."""

    low: float
    high: float
    low_at: float
    high_at: float

    def __call__(self, value: float) -> float:
        """Where a value lies; values below ``low`` lie at the edge."""
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return self.low_at + min(share, 1.0) * (self.high_at - self.low_at)

    def ticks(self) -> list[float]:
        """The powers of ten."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def decades_around(values: Sequence[float], floor: float) -> tuple[float, float]:
    """The powers of ten that enclose the values, none below ``floor``."""
    low = max(min(values), floor)
    high = max(max(values), 10 * floor)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    assert least > 0, "a scale spans something"
    decade = 10.0 ** math.floor(math.log10(least))
    return next(
        factor * decade for factor in (1, 2, 5, 10, 20) if factor * decade >= 0.9999999 * least
    )


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(value: object) -> str:
    """A number with two decimals at most: a hundredth of a pixel is nothing."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
