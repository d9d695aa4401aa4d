"""A weight source that reports how far reading has come, for a progress bar."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Protocol

from torpor.sleep.source import WeightSource

if TYPE_CHECKING:
    import torch

    from torpor.model.checkpoints.files import Progress
    from torpor.sleep.source import FileExtent


class SizedSource(WeightSource, Protocol):
    """A source that knows how much it holds."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        ...


class WatchedSource:
    """The same source, with the stage ``load`` reported while somebody watches."""

    def __init__(self, source: SizedSource, progress: Progress | None) -> None:
        """Watch a source.

        Args:
            source: what is read.
            progress: told ("load", bytes read, bytes in all); None for nobody.
        """
        self._source = source
        self._progress = progress

    def unwatch(self) -> None:
        """Report no more: the caller's progress bar belongs to the first load alone."""
        self._progress = None

    def names(self) -> Collection[str]:
        """As the source."""
        return self._source.names()

    def extent(self, name: str) -> FileExtent | None:
        """As the source."""
        return self._source.extent(name)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the source; each tensor counts once the next one is asked for."""
        done, total = 0, self._source.total_bytes
        self._report(done, total)
        for name, tensor in self._source.pairs():
            yield name, tensor
            done += tensor.nbytes
            self._report(done, total)

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress("load", done, total)
