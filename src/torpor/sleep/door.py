"""The door: the only calls that change official content.

An update begins, takes (name, tensor) pairs, and finishes. Finishing checks that nothing is
missing, rebuilds what is derived, takes digests, moves the epoch, and treats host copies by policy.
An update that fails puts back what it touched from the host copies; where there is none, the
tensors become invalid and are named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from torpor.errors import (
    AsleepError,
    OwnershipError,
    StateError,
    WeightsIncompleteError,
)
from torpor.sleep.adopt import refuse_inference_mode
from torpor.sleep.books import Page
from torpor.sleep.choices import version_from
from torpor.sleep.coverage import gaps
from torpor.sleep.derive import follow, rebuild_stale
from torpor.sleep.keeping import distrust, point_at_files, settle_copies
from torpor.sleep.payload import Payload, admitted, checked_pair, find, pairs_of, put
from torpor.sleep.reports import Stopwatch, UpdateReport
from torpor.sleep.restore import recover_copies
from torpor.sleep.source import WeightSource

if TYPE_CHECKING:
    from torpor.sleep.context import Context, Epochs
    from torpor.sleep.ledger import Entry

HOST_COPY_POLICIES = ("defer", "write_through", "drop")
"""What finishing does with host copies of changed tensors: copy them at the next sleep, copy them
now, or let the old copies go now and copy at the next sleep."""


class _Update:
    """One open update, and what it would take to undo it."""

    def __init__(self, version: str | None, epochs: Epochs) -> None:
        self.version = version
        self.epochs_before = dataclasses.replace(epochs)
        self.before: dict[int, Page] = {}
        self.intact = True
        """False while content is being changed: an update found so was interrupted."""
        self.updated = 0
        self.updated_bytes = 0
        self.stopwatch = Stopwatch()

    @property
    def touched(self) -> list[Entry]:
        """Entries whose bytes may have changed, in the order of their first change."""
        return [page.entry for page in self.before.values()]

    def touch(self, entry: Entry) -> None:
        """Note an entry before its bytes change for the first time."""
        self.before.setdefault(id(entry), Page(entry))


class Door:
    """Begin, write and finish updates of one sleeper. Callers hold the sleeper's lock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._open: _Update | None = None
        self._aborted: BaseException | None = None
        # Held while pairs are asked for and written. A lock, since it knows by itself who holds
        # it: a note of ours would be wrong for ever after an interrupt in the wrong place.
        self._writing = threading.RLock()

    @property
    def is_writing(self) -> bool:
        """Whether this thread is in the middle of writing pairs, as their generator is."""
        return bool(self._writing._is_owned())  # type: ignore[attr-defined]

    def refuse_while_writing(self) -> None:
        """Raise StateError from within the pairs of an update; the update goes on untouched."""
        if self.is_writing:
            raise StateError(
                "the pairs of an update are being written; what gives them may ask for the status, "
                "everything else has to wait until the update has returned"
            )

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not finished."""
        return self._open is not None

    def begin(self, version: str | None = None) -> None:
        """Open an update.

        Raises:
            ArgumentError: the version is no string.
            StateError: one is open already.
            AsleepError: the weights are asleep.
            OwnershipError: inference mode is on.
        """
        version = version_from(version)
        self._undo_interrupted()
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
            ArgumentError: nothing that holds pairs; nothing has changed.
            WeightsMismatchError: a name, shape or dtype does not fit.
            WeightsError: a value is NaN.
            StateError: an earlier pair failed and nobody began anew, or these pairs are asked for
                by another write.

        On any failure the whole update is undone.
        """
        pairs = pairs_of(pairs)
        self._undo_interrupted()
        if self._open is None:
            if self._aborted is not None:
                raise StateError(
                    f"the update was undone after: {self._aborted!r}; begin_update() to send it "
                    "again"
                )
            self.begin()
        update = self._open
        assert update is not None
        update.intact = False
        try:
            with self._writing:
                written = {self._write_one(update, *checked_pair(item)) for item in pairs}
            update.intact = True
            return written - {""}
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
        self._undo_interrupted()
        update = self._open
        if update is None:
            why = f": it was undone after {self._aborted!r}" if self._aborted is not None else ""
            raise StateError(f"no update is open{why}; begin_update() or load_weights() first")
        context = self._context
        update.intact = False
        try:
            covered = [entry for entry in update.touched if self._accept(entry)]
            changed = self._make_official(update, covered, source)
            self._open = None
        except BaseException as error:
            self.abort(error)
            raise
        update.before.clear()  # Its old host copies are of no use any more; give their room back.
        if source is not None:
            point_at_files(context, covered, source)
        notices = settle_copies(context, changed)
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
        self, payload: Payload, version: str | None, *, skip: Collection[str] = ()
    ) -> UpdateReport:
        """A whole update from one source, less the names to skip.

        Raises:
            ArgumentError: the payload holds something else than pairs, or the version is no string.
            WeightsMismatchError, WeightsError, WeightsIncompleteError: see ``write``, ``finish``.
        """
        version = version_from(version)
        pairs = pairs_of(payload)
        if skip:
            pairs = (pair for pair in pairs if checked_pair(pair)[0] not in skip)
        self._undo_interrupted()
        if self._open is not None:
            raise StateError("an update is open already; finish_update() before the next one")
        try:
            self.begin(version)
            self.write(pairs)
            return self.finish(payload if isinstance(payload, WeightSource) else None)
        except BaseException as error:
            self.abort(error)
            # The caller has heard of it, and whatever comes next is another update.
            self._aborted = None
            raise

    def abort(self, cause: BaseException) -> None:
        """Undo the open update, if any: restore what it touched, or mark it invalid by name."""
        update = self._open
        if update is None:
            return
        update.intact = False
        self._aborted = cause
        for page in update.before.values():
            self._put_back(page)
        # Caches and derived tensors without a host copy come back from their restored sources.
        with contextlib.suppress(OwnershipError):
            rebuild_stale(self._context)
        before = update.epochs_before
        self._context.epochs.version = before.version
        self._context.epochs.from_checkpoint = before.from_checkpoint
        lost = [page.entry.name for page in update.before.values() if page.valid > page.entry.valid]
        self._open = None
        cause.add_note(
            f"the update was undone, but {len(lost)} tensors had no host copy and are invalid "
            f"until updated or reloaded: {', '.join(lost[:8])}"
            if lost
            else "the update was undone; the weights are as before"
        )

    def forget(self) -> None:
        """Drop an open update whose tensors have lost their memory and their entry in the books."""
        self._open = None

    def _undo_interrupted(self) -> None:
        """Undo an update that an interrupt left open half-way.

        Raises:
            StateError: this thread is writing one.
        """
        self.refuse_while_writing()
        if self._open is not None and not self._open.intact:
            self.abort(self._aborted or StateError("it was interrupted"))

    def _require_mapped(self) -> None:
        if not all(arena.is_mapped for arena in self._context.ledger.arenas(["weights"])):
            raise AsleepError(
                "the weights are asleep; wake_up(['weights'], reload=False) before updating them"
            )

    def _write_one(self, update: _Update, name: str, value: torch.Tensor) -> str:
        if self._context.slices.ignores(name):
            return ""
        value = admitted(self._context.slices, name, value)
        entry, copies = find(self._context, name, value)
        update.touch(entry)
        put(copies)
        entry.covered.add(name)
        update.updated += 1
        update.updated_bytes += sum(rows.numel() * rows.element_size() for rows, _ in copies)
        return self._context.slices[name].parameter

    def _accept(self, entry: Entry) -> bool:
        """Whether a touched entry's content is complete; invalid ones must be covered in full."""
        if not entry.valid and not gaps(self._context.slices, entry):
            distrust(self._context, entry)  # It could not make the tensor valid.
            entry.valid = True
        return entry.valid

    def _make_official(
        self, update: _Update, covered: list[Entry], source: WeightSource | None
    ) -> list[Entry]:
        """Rebuild what follows, take digests, move the epoch; returns the entries that changed."""
        context = self._context
        news = self._news_of(covered)
        news += self._news_of(follow(context, [entry for entry, _ in news], before=update.touch))
        epochs = context.epochs
        epochs.weights += bool(news)
        if any(entry.in_checkpoint for entry in update.touched):
            # A caller's pairs part ways with the checkpoint even when the bytes happen to be equal.
            # What no checkpoint holds has its host copy at every level, and parts with nothing.
            epochs.from_checkpoint = (
                source is not None
                and source is context.reload
                and (epochs.from_checkpoint or self._touches_all(update))
            )
        if update.version is not None or news:
            # Content that nobody named has no name, least of all that of what it replaced.
            epochs.version = update.version
        for entry, digest in news:
            entry.digest = digest
        for entry in covered:
            entry.covered.clear()
        return [entry for entry, _ in news]

    def _news_of(self, entries: list[Entry]) -> list[tuple[Entry, str]]:
        """Those whose bytes are not the official ones, with their digests."""
        verified = [entry for entry in entries if entry.policy.verified]
        digests = self._context.device.fingerprint([entry.range for entry in verified])
        return [
            (entry, digest)
            for entry, digest in zip(verified, digests, strict=True)
            if entry.digest != digest
        ]

    def _touches_all(self, update: _Update) -> bool:
        """Whether nothing that a checkpoint should hold is left from before the update."""
        return all(
            id(entry) in update.before for entry in self._context.ledger if entry.in_checkpoint
        )

    def _put_back(self, page: Page) -> None:
        """Restore one touched entry; it is invalid afterwards when its old content is lost."""
        entry = page.entry
        page.put_back()
        if not entry.arena.is_mapped:
            return
        entry.valid = False
        entry.covered.clear()
        if page.valid:
            # Without a host copy too: what was sent may have been what was there.
            recover_copies(self._context, [entry])
        entry.by_hand = entry.by_hand and entry.valid

    def _require_complete(self) -> None:
        missing = self._context.missing(["weights"])
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise WeightsIncompleteError(
                f"{len(missing)} weights are still missing: {shown}; update or reload them before "
                "anything runs",
                missing,
            )
