"""The door: the only calls that change official content.

An update begins, takes (name, tensor) pairs, and finishes. Finishing checks that nothing is
missing, rebuilds what is derived, takes digests, moves the epoch, and treats host copies by policy.
An update that fails puts back what it touched from the host copies; where there is none, the
tensors become invalid and are named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import (
    ArgumentError,
    HostCopyError,
    OwnershipError,
    StateError,
    TorporError,
    WeightsError,
    WeightsIncompleteError,
    WeightsMismatchError,
)
from torpor.sleep.adopt import refuse_inference_mode
from torpor.sleep.derive import dependants, rebuild_stale
from torpor.sleep.host import CheckpointCopy
from torpor.sleep.reports import Stopwatch, UpdateReport
from torpor.sleep.source import WeightSource

if TYPE_CHECKING:
    from torpor.sleep.context import Context, Epochs
    from torpor.sleep.ledger import Entry
    from torpor.sleep.source import FileExtent, WeightSlice

HOST_COPY_POLICIES = ("defer", "write_through", "drop")
"""What finishing does with host copies of changed tensors: copy them at the next sleep, copy them
now, or let the old copies go now and copy at the next sleep."""


class _Update:
    """One open update, and what it would take to undo it."""

    def __init__(self, version: str | None, epochs: Epochs) -> None:
        self.version = version
        self.epochs_before = dataclasses.replace(epochs)
        self.before: dict[int, tuple[Entry, bool, str | None]] = {}
        self.updated = 0
        self.updated_bytes = 0
        self.stopwatch = Stopwatch()

    @property
    def touched(self) -> list[Entry]:
        """Entries whose bytes may have changed, in the order of their first change."""
        return [entry for entry, _valid, _digest in self.before.values()]

    def touch(self, entry: Entry) -> None:
        """Note an entry before its bytes change for the first time."""
        self.before.setdefault(id(entry), (entry, entry.valid, entry.digest))


class Door:
    """Begin, write and finish updates of one sleeper. Callers hold the sleeper's lock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: _Update | None = None
        self._aborted: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not finished."""
        return self._open is not None

    def begin(self, version: str | None = None) -> None:
        """Open an update.

        Raises:
            StateError: one is open already, or the weights are asleep.
        """
        if self._open is not None:
            raise StateError("an update is open already; finish_update() before the next one")
        refuse_inference_mode()
        self._require_mapped()
        self._aborted = None
        self._open = _Update(version, self._context.epochs)

    def write(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write pairs into place, opening an update if none is open.

        Returns:
            The owned names written.

        Raises:
            WeightsMismatchError: a name, shape or dtype does not fit.
            WeightsError: a value is NaN.
            StateError: an earlier pair failed and nobody began anew.

        On any failure the whole update is undone.
        """
        if self._open is None:
            if self._aborted is not None:
                raise StateError(
                    f"the update was undone after: {self._aborted}; begin_update() to send it again"
                )
            self.begin()
        update = self._open
        assert update is not None
        try:
            return {self._write_one(update, *_pair(item)) for item in pairs} - {""}
        except BaseException as error:
            self.abort(error)
            raise

    def finish(self, source: WeightSource | None = None) -> UpdateReport:
        """Close the open update and make its content official.

        Args:
            source: where the content came from, when files hold it as it is.

        Raises:
            WeightsIncompleteError: invalid tensors are not covered; what was covered is official,
                and further pairs may follow.
            OwnershipError: a rebuild failed; the update is undone.
        """
        update = self._open
        if update is None:
            raise StateError("no update is open; begin_update() or load_weights() first")
        context = self._context
        try:
            covered = [entry for entry in update.touched if self._accept(entry)]
            for entry in dependants(context, covered):
                entry.stale = True
            rebuilt = rebuild_stale(context, before=update.touch)
            changed = self._make_official(update, [*covered, *rebuilt], source)
            self._open = None
        except BaseException as error:
            self.abort(error)
            raise
        notices = self._settle_host_copies(changed, covered, source)
        self._require_complete()
        return UpdateReport(
            version=context.epochs.version,
            weights_epoch=context.epochs.weights,
            updated=update.updated,
            updated_bytes=update.updated_bytes,
            changed=tuple(entry.name for entry in changed),
            notices=notices,
            total_s=update.stopwatch.total_s,
        )

    def run(
        self,
        source: WeightSource | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: str | None,
    ) -> UpdateReport:
        """A whole update from one source.

        Raises:
            WeightsMismatchError, WeightsError, WeightsIncompleteError: see ``write``, ``finish``.
        """
        files = source if isinstance(source, WeightSource) else None
        self.begin(version)
        self.write(_pairs(source))
        return self.finish(files)

    def abort(self, cause: BaseException) -> None:
        """Undo the open update: restore what it touched, or mark it invalid by name."""
        update = self._open
        if update is None:
            return
        for entry, was_valid, digest in update.before.values():
            self._put_back(entry, was_valid, digest)
        # Caches and derived tensors without a host copy come back from their restored sources.
        with contextlib.suppress(OwnershipError):
            rebuild_stale(self._context)
        before = update.epochs_before
        self._context.epochs.version = before.version
        self._context.epochs.from_checkpoint = before.from_checkpoint
        lost = [entry.name for entry, valid, _ in update.before.values() if valid > entry.valid]
        self._open = None
        self._aborted = cause
        cause.add_note(
            f"the update was undone, but {len(lost)} tensors had no host copy and are invalid "
            f"until updated or reloaded: {', '.join(lost[:8])}"
            if lost
            else "the update was undone; the weights are as before"
        )

    def _require_mapped(self) -> None:
        if not all(arena.is_mapped for arena in self._context.ledger.arenas(["weights"])):
            raise StateError(
                "the weights are asleep; wake_up(['weights'], reload=False) before updating them"
            )

    def _write_one(self, update: _Update, name: str, value: torch.Tensor) -> str:
        slices = self._context.slices
        if name in slices.ignored:
            return ""
        if name not in slices:
            raise WeightsMismatchError(f"the model has no weight {name!r}{_hint(name, slices)}")
        part = slices[name]
        entry = self._context.ledger.get(part.parameter)
        target = None if entry is None else entry.aliases[part.parameter]()
        if entry is None or target is None:
            raise OwnershipError(
                f"{part.parameter!r} has left its memory (moved or replaced); adopt() it again "
                "before updating it"
            )
        target = part.rows_of(target)
        _check_fits(name, value, target, check_nan=self._context.check_nan)
        update.touch(entry)
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(value)
        entry.covered.add(name)
        update.updated += 1
        update.updated_bytes += target.numel() * target.element_size()
        return part.parameter

    def _accept(self, entry: Entry) -> bool:
        """Whether a touched entry's content is complete; invalid ones must be covered in full."""
        if not entry.valid:
            entry.valid = self._covers(entry)
        return entry.valid

    def _covers(self, entry: Entry) -> bool:
        by_parameter = self._context.slices.by_parameter()
        for alias in entry.aliases:
            parts = by_parameter.get(alias, ())
            if parts and all(part.name in entry.covered for part in parts):
                return True
        return False

    def _make_official(
        self, update: _Update, entries: list[Entry], source: WeightSource | None
    ) -> list[Entry]:
        """Take digests and move the epoch; returns the entries whose bytes changed."""
        verified = [entry for entry in entries if entry.policy.verified]
        digests = self._context.device.fingerprint([entry.range for entry in verified])
        changed = [
            entry for entry, new in zip(verified, digests, strict=True) if entry.digest != new
        ]
        epochs = self._context.epochs
        epochs.weights += bool(changed)
        # A caller's pairs part ways with the checkpoint even when the bytes happen to be equal.
        epochs.from_checkpoint = source is not None and source is self._context.reload
        epochs.version = update.version if update.version is not None else epochs.version
        for entry, digest in zip(verified, digests, strict=True):
            entry.digest = digest
            entry.covered.clear()
        return changed

    def _settle_host_copies(
        self, changed: list[Entry], covered: list[Entry], source: WeightSource | None
    ) -> tuple[str, ...]:
        if source is not None:
            for entry in covered:
                self._point_at_file(entry, source)
        for entry in changed:
            if not entry.is_dirty:
                continue
            if self._context.host_copy == "drop":
                entry.host = None
            elif self._context.host_copy == "write_through":
                try:
                    entry.host = keep(self._context, entry)[0]
                except HostCopyError as error:
                    # The update itself is done; the copy is due at the next sleep.
                    return (f"host copies are deferred to the next sleep: {error}",)
        return ()

    def _point_at_file(self, entry: Entry, source: WeightSource) -> None:
        """Use the checkpoint file itself as the host copy when it holds exactly these bytes."""
        by_parameter = self._context.slices.by_parameter()
        parts = next((by_parameter[name] for name in entry.aliases if name in by_parameter), ())
        extents: list[FileExtent] = []
        for part in parts:
            extent = source.extent(part.name)
            if extent is None or extent.dtype != entry.dtype:
                return
            extents.append(extent)
        if entry.digest is None or sum(extent.nbytes for extent in extents) != entry.nbytes:
            return
        try:
            entry.host = CheckpointCopy(extents, entry.digest)
        except HostCopyError:
            return  # The file is gone already: a spill copy is made at the next sleep.

    def _put_back(self, entry: Entry, was_valid: bool, digest: str | None) -> None:
        """Restore one touched entry; it is invalid afterwards when its old content is lost."""
        entry.covered.clear()
        entry.valid = False
        entry.digest = digest
        if not was_valid or entry.host is None or entry.host.digest != digest:
            return
        with contextlib.suppress(TorporError):
            self._context.device.copy_in(entry.address, entry.host)
            entry.valid = self._context.device.fingerprint([entry.range]) == [digest]

    def _require_complete(self) -> None:
        missing = self._context.missing(["weights"])
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise WeightsIncompleteError(
                f"{len(missing)} weights are still missing: {shown}; update or reload them before "
                "anything runs",
                missing,
            )


def keep(context: Context, entry: Entry) -> tuple[Any, int]:
    """Make sure the store keeps the entry's present, official bytes.

    Returns:
        The host copy, and the bytes that had to be copied for it.

    Raises:
        HostFullError: no room; nothing was kept.
    """
    assert entry.digest is not None, f"{entry.name}: official content has a digest"
    existing = context.store.find(entry.digest, entry.nbytes)
    if existing is not None:
        return existing, 0
    view = context.device.host_view(entry.address, entry.nbytes)
    if view is None:
        view = memoryview(bytearray(entry.nbytes))
        context.device.copy_out(entry.address, entry.nbytes, view)
    return context.store.keep(entry.digest, view)


def _pairs(
    source: WeightSource | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, Mapping):
        return source.items()
    return source.pairs() if isinstance(source, WeightSource) else source


def _pair(item: Any) -> tuple[str, torch.Tensor]:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        raise ArgumentError(f"expected (name, tensor) pairs, got {type(item).__name__}")
    if not isinstance(item[1], torch.Tensor):
        raise ArgumentError(f"the value of {item[0]!r} is a {type(item[1]).__name__}, not a tensor")
    return item


def _check_fits(name: str, value: torch.Tensor, target: torch.Tensor, *, check_nan: bool) -> None:
    if value.shape != target.shape:
        raise WeightsMismatchError(
            f"{name!r} has shape {tuple(value.shape)}; the model needs {tuple(target.shape)}"
        )
    if value.dtype.is_floating_point != target.dtype.is_floating_point or value.is_complex():
        raise WeightsMismatchError(
            f"{name!r} is {value.dtype}, which cannot become {target.dtype}; convert it first"
        )
    if value.is_meta:
        raise WeightsMismatchError(f"{name!r} is on the meta device and has no values")
    if check_nan and value.dtype.is_floating_point and _has_nan(value):
        raise WeightsError(
            f"{name!r} contains NaN; check the training step or file it comes from, or pass "
            "check_nan=False to load it anyway"
        )


def _has_nan(value: torch.Tensor) -> bool:
    if value.element_size() == 1:  # fp8 has no reductions
        value = value.to(torch.float32)
    # A finite sum proves that no NaN is in it, at the speed of reading once; inf needs a look.
    if bool(torch.isfinite(value.sum(dtype=torch.float32))):
        return False
    return bool(torch.isnan(value).any())


def _hint(name: str, slices: Iterable[WeightSlice]) -> str:
    close = difflib.get_close_matches(name, [part.name for part in slices], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; check the names of the source"


def pairs_of(source: WeightSource, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of a source whose names are wanted."""
    wanted = frozenset(names)
    return ((name, value) for name, value in source.pairs() if name in wanted)
