"""Giving owned tensors host copies: found by content, pointed at a checkpoint file, or made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torpor.errors import HostCopyError
from torpor.sleep.host import CheckpointCopy

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry
    from torpor.sleep.source import FileExtent, WeightSource


def ensure_copy(context: Context, entry: Entry) -> int:
    """Make sure that the entry's official content has a host copy; returns the bytes copied.

    Raises:
        HostFullError: no room; nothing was kept.
        HostCopyError: the copy cannot be written.
    """
    assert entry.digest is not None, f"{entry.name}: official content has a digest"
    if entry.host is not None and not entry.is_dirty and entry.host.is_current():
        return 0
    # A copy of other bytes is of no use, and its room may be the room that is needed now.
    entry.host = None
    existing = context.store.find(entry.digest, entry.nbytes)
    if existing is not None:
        entry.host = existing
        return 0
    view = context.device.host_view(entry.address, entry.nbytes)
    if view is None:
        view = memoryview(bytearray(entry.nbytes))
        context.device.copy_out(entry.address, entry.nbytes, view)
    entry.host, copied = context.store.keep(entry.digest, view)
    return copied


def distrust(context: Context, entry: Entry) -> None:
    """Let go of a host copy that did not give the official content back, for everybody."""
    if entry.host is not None:
        context.store.withdraw(entry.host)
        entry.host = None


def settle_copies(context: Context, changed: Iterable[Entry]) -> tuple[str, ...]:
    """Treat the host copies of changed tensors by the sleeper's policy; returns notices."""
    for entry in changed:
        if not entry.is_dirty:
            continue
        if context.host_copy == "drop":
            entry.host = None
        elif context.host_copy == "write_through":
            try:
                ensure_copy(context, entry)
            except HostCopyError as error:
                # The update itself is done; the copy is due at the next sleep.
                return (f"host copies are deferred to the next sleep: {error}",)
    return ()


def point_at_files(context: Context, entries: Iterable[Entry], source: WeightSource) -> None:
    """Use the checkpoint itself as the host copy of those that it holds byte for byte."""
    for entry in entries:
        extents = _extents(context, entry, source)
        if not extents or entry.digest is None:
            continue
        try:
            copy = CheckpointCopy(extents, entry.digest)
        except HostCopyError:
            continue  # The file is gone already: a copy is made at the next sleep.
        # The file may have changed since it was read, and strides may order the bytes otherwise.
        if copy.is_exact():
            entry.host = copy


def _extents(context: Context, entry: Entry, source: WeightSource) -> list[FileExtent]:
    extents: list[FileExtent] = []
    for part in context.slices_of(entry):
        extent = source.extent(part.name)
        if extent is None or extent.dtype != entry.dtype:
            return []
        extents += part.extents(extent)
    return extents if sum(extent.nbytes for extent in extents) == entry.nbytes else []
