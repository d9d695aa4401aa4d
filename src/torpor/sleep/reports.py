"""What sleep, wake, update and verify answer: bytes by class, seconds by phase, epochs, residue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from torpor.sleep.residents import Resident


class _Report:
    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Resident):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport(_Report):
    """What a sleep did. All sizes in bytes, all times in seconds."""

    level: int
    tags: tuple[str, ...]
    """Tags whose memory this call released."""
    changed: bool
    """False for a call that found nothing to do."""
    notices: tuple[str, ...] = ()
    released_bytes: dict[str, int] = field(default_factory=dict)
    """By ownership class."""
    copied_bytes: int = 0
    """Written to host copies; 0 for a clean sleeper."""
    resident_bytes: int = 0
    """Known tensors that stay in memory."""
    residents: tuple[Resident, ...] = ()
    escaped: tuple[str, ...] = ()
    """Names whose bytes left their slot (``.to()``, a replaced parameter); not counted as freed."""
    arena_rss_before_bytes: int = 0
    """Physical memory under the released arenas just before, as the system counts it."""
    arena_rss_after_bytes: int = 0
    verified: int = 0
    """Tensors whose digest equalled the official one."""
    total_verifiable: int = 0
    adopted: tuple[str, ...] = ()
    """Names written outside the door whose new content was taken as official."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    total_s: float = 0.0
    weights_epoch: int = 0
    kv_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeReport(_Report):
    """What a wake did. All sizes in bytes, all times in seconds."""

    tags: tuple[str, ...]
    """Tags whose memory this call acquired."""
    changed: bool
    """False for a call that found nothing to do."""
    notices: tuple[str, ...] = ()
    mapped_bytes: int = 0
    restored_bytes: int = 0
    """Copied back from host copies."""
    reloaded: bool = False
    """Whether content was read again from the checkpoint."""
    rebuilt: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    """Names that came back damaged and were copied or reloaded once more."""
    verified: int = 0
    """Tensors whose digest equalled the official one."""
    total_verifiable: int = 0
    missing: tuple[str, ...] = ()
    """Names that have to be reloaded or updated before anything runs."""
    seconds: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    weights_epoch: int = 0
    kv_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport(_Report):
    """What an update through the door did."""

    version: str | None
    weights_epoch: int
    updated: int
    """Tensors written."""
    updated_bytes: int
    changed: tuple[str, ...]
    """Names whose bytes differ from before, derived ones included."""
    notices: tuple[str, ...] = ()
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport(_Report):
    """Digests of the present bytes against the official ones."""

    verified: int
    total_verifiable: int
    differing: tuple[str, ...]
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every tensor that has official content was equal."""
        return not self.differing and self.verified == self.total_verifiable


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start_s = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to one phase."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    @property
    def total_s(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self._start_s
