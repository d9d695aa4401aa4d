"""The public face: put the tensors of any torch module to sleep and prove that they woke intact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from torpor.errors import AsleepError, StateError, WeightsIncompleteError
from torpor.sleep import choices, falling, status, waking
from torpor.sleep.audit import AuditReport, audit
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.core import SleeperCore
from torpor.sleep.declare import Declaration, allocate, declare, leave
from torpor.sleep.escape import rebuild_dependants
from torpor.sleep.states import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from torpor.sleep.ledger import Rebuild
    from torpor.sleep.reports import SleepReport, UpdateReport, VerifyReport, WakeReport
    from torpor.sleep.source import WeightSource
    from torpor.sleep.states import Transition
    from torpor.sleep.status import OwnerRow


class Sleeper(SleeperCore):
    """Owns the tensors of one or more modules and moves them in and out of memory.

    All methods may be called from any thread; they run one at a time. The caller sees to it that no
    forward runs while memory is released.
    """

    # -- owners -----------------------------------------------------------------------------------

    def own(
        self,
        tensors: Any,
        *,
        name: str,
        cls: OwnershipClass,
        tag: str | None = None,
        sources: Sequence[str | torch.Tensor] = (),
        rebuild: Rebuild | None = None,
        reset: Callable[[], None] | None = None,
    ) -> None:
        """Declare a tensor, or a nested container of tensors, and how it comes back.

        Args:
            sources: owned tensors, or their names, that it is computed from.
            rebuild: recomputes it when its sources are valid; returns the new value, or None after
                writing in place.
            reset: brings a ``SYNC`` tensor back in place.

        Raises:
            OwnershipError: an unknown leaf, a source without owner, or memory that cannot move.
            StateError: something is asleep.
        """
        with self._lock, self._session():
            self._require_awake("declare owners")
            made = Declaration(
                name=name, cls=cls, tag=tag, sources=sources, rebuild=rebuild, reset=reset
            )
            declare(self._context, tensors, made)
            self._settle_books()
            self._note_undeclared(strict=False)

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        name: str,
        cls: OwnershipClass,
        tag: str | None = None,
        sources: Sequence[str | torch.Tensor] = (),
        rebuild: Rebuild | None = None,
        reset: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """A zeroed tensor made straight in memory that sleep can release; see ``own``.

        Raises:
            OutOfMemoryError: there is no memory for it.
            StateError: something is asleep.
        """
        with self._lock, self._session():
            self._require_awake("allocate")
            made = Declaration(
                name=name, cls=cls, tag=tag, sources=sources, rebuild=rebuild, reset=reset
            )
            return allocate(self._context, shape, dtype, made)

    def adopt(self) -> tuple[str, ...]:
        """Look at the modules again and adopt what is new or has escaped; returns the new names.

        Raises:
            StateError: something is asleep.
        """
        with self._lock, self._session():
            self._require_awake("adopt")
            self._notice()
            before = {name for entry in self._context.ledger for name in entry.aliases}
            self._adopt_all()
            self._note_undeclared(strict=False)
            new = {name for entry in self._context.ledger for name in entry.aliases} - before
            if new:
                # Nobody knows whether the checkpoint holds these values.
                self._context.epochs.weights += 1
                self._context.epochs.from_checkpoint = False
                rebuild_dependants(self._context, new)
            return tuple(sorted(new))

    # -- transitions ------------------------------------------------------------------------------

    def sleep(self, level: int | str = 1, tags: Sequence[str] | str | None = None) -> SleepReport:
        """Release the memory of some tags (default: all).

        Before: awake, or partly asleep. After: the tags are released; forward, ``state_dict`` and
        optimizer steps raise. On failure: as before. Sleeping again is a no-op that says so; level
        1 to 2 drops the host copies of weights.

        Args:
            level: 1 keeps host copies of all verified content; 2 discards parameters and derived
                tensors, which then have to be reloaded or updated.

        Raises:
            ArgumentError: an unknown level or tag.
            ForeignWriteError: content was changed outside the door, under
                ``on_foreign_write='error'``.
            HostFullError: no room for a host copy.
            FaultedError: the last wake could not prove its content.
        """
        with self._lock, self._session():
            chosen = choices.level_from(level)
            wanted = choices.tags_from(tags)
            self._require_not_faulted()
            if self._door.is_open:
                self._door.finish()
            escaped = self._rescan(wanted)
            return falling.sleep(self._context, self._guard, chosen, wanted, escaped)

    def wake_up(
        self, tags: Sequence[str] | str | None = None, *, reload: bool | None = None
    ) -> WakeReport:
        """Bring the memory of some tags (default: all) back, verified.

        Before: asleep. After: mapped and digests equal; or, after level 2 without a reload, mapped
        and invalid. On failure: still asleep, nothing lost, and the call can be made again.

        Args:
            reload: True reads the weights from the checkpoint again, whatever they were since;
                False leaves filling to the caller; None (default) reloads after level 2 when no
                tags are named, as long as the checkpoint holds the current weights.

        Raises:
            ArgumentError: an unknown tag.
            StateError: the weights came from elsewhere than the checkpoint, and a plain wake would
                undo that; say which is meant.
            OutOfMemoryError: not enough memory now.
            VerificationError: content came back different and could not be repaired.
        """
        with self._lock, self._session():
            wanted = choices.tags_from(tags)
            choices.flag_or_none("reload", reload)
            self._notice()
            return waking.wake_up(self._context, self._door, wanted, reload, plain=tags is None)

    @property
    def is_sleeping(self) -> bool:
        """Whether the memory of any tag is released."""
        return bool(self._context.released)

    @property
    def state(self) -> State:
        """State of the whole sleeper."""
        return self._context.machine.state

    @property
    def tag_states(self) -> dict[str, str]:
        """``resident``, ``released`` or ``mapped_invalid`` for each tag that owns bytes."""
        return {tag: self._context.tag_state(tag).value for tag in self._context.ledger.tags()}

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The last few hundred transitions, oldest first."""
        return self._context.machine.history

    # -- the door ---------------------------------------------------------------------------------

    def update_weights(
        self,
        source: WeightSource | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: str | None = None,
    ) -> UpdateReport:
        """Replace content in place: all of a source's names, and only those.

        Before: the tag ``weights`` is mapped (valid or not). After: new digests, derived tensors
        rebuilt, ``weights_epoch`` moved if any byte changed. On failure: as before, or, where a
        touched tensor had no host copy, invalid by name.

        Raises:
            WeightsMismatchError: a name, shape or dtype does not fit.
            WeightsIncompleteError: after level 2, not everything was covered.
            StateError: the weights are asleep, or an update is open.
        """
        with self._lock, self._session():
            self._notice()
            return self._door.run(source, version)

    def begin_update(self, version: str | None = None) -> None:
        """Open an update that pairs are pushed into.

        Raises:
            StateError: one is open already, or the weights are asleep.
        """
        with self._lock, self._session():
            self._notice()
            self._door.begin(version)

    @property
    def update_is_open(self) -> bool:
        """Whether pairs were pushed that no ``finish_update`` has made official yet."""
        return self._door.is_open

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write some pairs, opening an update if none is open; returns the owned names written.

        The update ends with ``finish_update``, or by itself before the next forward or sleep.

        Raises:
            WeightsMismatchError: a name, shape or dtype does not fit; the whole update is undone.
            StateError: the weights are asleep, or an earlier pair failed.
        """
        with self._lock, self._session():
            if not self._door.is_open:
                self._notice()
            return self._door.write(pairs)

    def finish_update(self) -> UpdateReport:
        """Make an open update official.

        Raises:
            WeightsIncompleteError: not everything invalid was covered; more pairs may follow.
            StateError: no update is open.
        """
        with self._lock, self._session():
            return self._door.finish()

    def reload_weights(self) -> UpdateReport:
        """Read all weights from the checkpoint again; a bitwise no-op when they come from it.

        Raises:
            StateError: there is no checkpoint, or the weights are asleep.
            CheckpointError: it cannot be read; what was valid is restored.
        """
        with self._lock, self._session():
            if self._context.reload is None:
                raise StateError("there is no checkpoint to reload from; pass reload= to Sleeper")
            self._notice()
            return self._door.run(self._context.reload, None)

    # -- proof ------------------------------------------------------------------------------------

    def require_ready(self, *tags: str) -> None:
        """Finish an open update, and raise unless the tags (default: all) are mapped and valid.

        Raises:
            AsleepError: a tag is released.
            WeightsIncompleteError: content has to be reloaded or updated first.
            FaultedError: the last wake could not prove its content.
        """
        self._require_ready(tags or self._context.ledger.tags())

    def is_ready(self, *tags: str) -> bool:
        """Whether the tags are mapped and valid and no update is open; changes nothing.

        Raises:
            FaultedError: the last wake could not prove its content.
        """
        with self._lock:
            self._require_not_faulted()
            try:
                status.require_ready(self._context, tags)
            except (AsleepError, WeightsIncompleteError):
                return False
            return not self._door.is_open

    @property
    def poisons(self) -> bool:
        """Whether memory that comes back is filled with NaN patterns first."""
        return self._context.poison is not None

    def verify(self) -> VerifyReport:
        """Compare every owned tensor that has a digest, and memory, with its official content.

        Raises:
            StateError: nothing is mapped.
        """
        with self._lock, self._session():
            if self._door.is_open:
                self._door.finish()
            return status.verify(self._context)

    def digests(self, *, portable: bool = False) -> dict[str, str]:
        """Digests of the official content.

        Args:
            portable: by checkpoint name, comparable between processes, devices and trainers;
                computed now, from memory that must be mapped. Otherwise the local ones, by owned
                name.

        Raises:
            AsleepError: ``portable`` and some memory is released.
        """
        with self._lock, self._session():
            if not portable:
                return status.local_digests(self._context)
            status.require_ready(self._context, ["weights"])
            return status.portable_digests(self._context)

    def audit(self) -> AuditReport:
        """List live tensors of the device that no owner declared."""
        with self._lock, self._session():
            context = self._context
            device = context.device.torch_device
            return audit(context.ledger, self._roots, device, self._creator_of)

    def table(self) -> list[OwnerRow]:
        """One row for each owned storage, in placement order."""
        with self._lock, self._session():
            return status.table(self._context)

    def status(self) -> dict[str, Any]:
        """State, epochs and bytes, JSON-able."""
        with self._lock, self._session():
            return status.status(self._context)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that have to be reloaded or updated before anything runs."""
        return tuple(self._context.missing(self._context.ledger.tags()))

    @property
    def weights_epoch(self) -> int:
        """Grows when owned content changes."""
        return self._context.epochs.weights

    @property
    def kv_epoch(self) -> int:
        """Grows when the cache is dropped."""
        return self._context.epochs.kv

    @property
    def weights_version(self) -> str | None:
        """The version that the last update named."""
        return self._context.epochs.version

    # -- end --------------------------------------------------------------------------------------

    def close(self, *, discard: bool = False) -> None:
        """Move the bytes back to ordinary memory and end. Repeating it changes nothing.

        Args:
            discard: while asleep, or while content is missing, give the content up; the modules
                can never be used again, and say so. Bare tensors read as zeros.

        Raises:
            StateError: asleep or incomplete, and ``discard`` is False.
        """
        with self._lock, self._session(closing=True):
            if self._closed:
                return
            self._door.refuse_while_writing()
            if self.is_sleeping and not discard:
                raise StateError(
                    "asleep: wake_up() first, or close(discard=True) to give the content up"
                )
            if self.missing and not discard:
                raise StateError(
                    f"{len(self.missing)} tensors have no valid content, such as "
                    f"{self.missing[0]!r}: reload or update them first, or close(discard=True)"
                )
            if not self.is_sleeping and not self.missing:
                leave(self._context)
                self._guard.remove()
            else:
                for arena in self._context.ledger.arenas(self._context.ledger.tags()):
                    arena.abandon()
            self._closed = True
            if self._owns_store:
                self._context.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close(discard=True)
