"""What a benchmark measures: the choices, checked. Light: the command line reads them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torpor.errors import ArgumentError
from torpor.sleep.classes import LEVELS


class Listener(Protocol):
    """Is told what is about to be measured, for a person who waits."""

    def measuring(self, what: str, iteration: int, num_iters: int) -> None:
        """An iteration begins; ``iteration`` counts from 1, and is 0 while warming up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a measurement is taken.

    Raises:
        ArgumentError: nothing would be measured.
    """

    num_iters: int
    num_iters_warmup: int = 1
    """Taken first and thrown away: caches and buffers fill, files are read."""

    def __post_init__(self) -> None:
        at_least("num_iters", self.num_iters, 1)
        at_least("num_iters_warmup", self.num_iters_warmup, 0)

    def to_dict(self) -> dict[str, int]:
        """JSON-able form."""
        return asdict(self)

    def iterations(self, what: str, listener: Listener | None = None) -> Iterator[bool]:
        """Yield once per measurement: whether it counts."""
        for number in range(1 - self.num_iters_warmup, self.num_iters + 1):
            if listener:
                listener.measuring(what, max(number, 0), self.num_iters)
            yield number > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoices:
    """Arguments of ``LLM`` by its names; None leaves one to the engine's own default."""

    dtype: str | None = None
    max_model_len: int | None = None
    kv_cache_memory_bytes: int | None = None
    sink_placement: str | None = None
    batch_invariant: bool | None = None
    num_threads: int | None = None

    def given(self) -> dict[str, Any]:
        """Those that were chosen."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What is measured of throughput or latency.

    Raises:
        ArgumentError: an impossible value.
    """

    num_prompts: int
    """Handed over in one call, and computed together as far as they fit."""
    repeats: Repeats
    input_len: int = 32
    """Tokens of each prompt."""
    output_len: int = 64
    """Tokens generated from each prompt."""
    seed: int = 0
    """Of the prompts."""
    engine: EngineChoices = field(default_factory=EngineChoices)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            at_least(name, getattr(self, name), 1)

    @property
    def num_output_tokens(self) -> int:
        """Generated in one run."""
        return self.num_prompts * self.output_len


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepOptions:
    """What is measured.

    Raises:
        ArgumentError: an unknown level.
    """

    levels: Sequence[int] = LEVELS
    repeats: Repeats = field(default_factory=lambda: Repeats(num_iters=5))
    """At each level."""
    engine: EngineChoices = field(default_factory=EngineChoices)

    def __post_init__(self) -> None:
        known = " or ".join(map(str, LEVELS))
        if not self.levels:
            raise ArgumentError(f"levels is empty; give {known}")
        for level in self.levels:
            if level not in LEVELS:
                raise ArgumentError(f"level is {level!r}; give {known}")


def at_least(name: str, value: int, least: int) -> None:
    """Check a number.

    Raises:
        ArgumentError: it is smaller than ``least``.
    """
    if value < least:
        raise ArgumentError(f"{name} is {value}; give at least {least}")
