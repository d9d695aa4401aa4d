"""One sleeper's parts: adoption at construction, the lock, the guard, and what every call needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torpor.errors import ArgumentError, FaultedError, OwnershipError, StateError
from torpor.sleep import choices, status
from torpor.sleep.adopt import adopt, materialise, put_back_on_meta
from torpor.sleep.audit import undeclared
from torpor.sleep.context import Context
from torpor.sleep.cpu import CpuDevice
from torpor.sleep.declare import leave
from torpor.sleep.door import HOST_COPY_POLICIES, Door
from torpor.sleep.escape import notice_escapes
from torpor.sleep.guard import Guard
from torpor.sleep.host import HostStore
from torpor.sleep.ledger import Ledger
from torpor.sleep.poison import poison_from
from torpor.sleep.source import SliceTable, WeightSource
from torpor.sleep.states import State, TagState
from torpor.sleep.walk import module_tensors, named_modules, named_optimizers, optimizer_tensors

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torpor.sleep.building import CreationRecords
    from torpor.sleep.device import Device
    from torpor.sleep.poison import Poison
    from torpor.sleep.walk import Found, Modules


class SleeperCore:
    """State and internals of a ``Sleeper``; the public methods are there."""

    def __init__(
        self,
        modules: Modules,
        *,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        reload: WeightSource | None = None,
        slices: SliceTable | None = None,
        declare: Callable[[Self], None] | None = None,
        records: CreationRecords | None = None,
        device: Device | None = None,
        host: HostStore | None = None,
        spill_dir: Path | str | None = None,
        host_copy: str = "defer",
        on_foreign_write: str = "adopt",
        poison: int | bool | Poison | None = None,
        check_nan: bool = True,
        strict: bool = False,
    ) -> None:
        """Adopt every parameter and buffer of the modules, and the state of the optimizer.

        Args:
            modules: a module, or modules by name. Parameters may be on the meta device when
                ``reload`` is given; they get memory here, and content from ``reload_weights``.
            optimizer: optimizers whose state and gradients sleep under the tag ``optimizer``.
            reload: the checkpoint that level 2 reloads from.
            slices: which checkpoint name fills what; default: every parameter and persistent buffer
                by its own name.
            declare: called with this sleeper, to declare further owners before ``strict`` looks.
            records: what ``torpor.building()`` recorded, to name creators in the audit.
            host: where host copies are kept; default a private spill file in ``spill_dir``.
            host_copy: ``defer``, ``write_through`` or ``drop``: see ``torpor.sleep.door``.
            on_foreign_write: ``adopt``, ``restore`` or ``error``.
            poison: fill returned pages with NaN patterns; default from ``TORPOR_POISON``.
            check_nan: refuse updates that contain NaN.
            strict: a reachable tensor without an owner is an error.

        Raises:
            ArgumentError: an impossible argument.
            OwnershipError: a meta tensor that no checkpoint fills; under ``strict`` also undeclared
                tensors, by name.
            OutOfMemoryError: no memory for the arenas.

        On failure the modules are as before.
        """
        self._lock = threading.RLock()
        self._closed = False
        self._escaped: tuple[str, ...] = ()
        self._roots = named_modules(modules)
        self._optimizers = named_optimizers(optimizer)
        self._creator_of = records.creator_of if records is not None else lambda _tensor: None
        self._explicit_slices = slices
        self._owns_store = host is None
        given: object = reload  # Callers without a type checker pass anything.
        if given is not None and not isinstance(given, WeightSource):
            raise ArgumentError(
                f"reload is a {type(given).__name__}; pass a WeightSource (names, pairs, extent)"
            )
        self._context = Context(
            device=device if device is not None else CpuDevice(),
            ledger=Ledger(),
            store=host if host is not None else HostStore(spill_dir=spill_dir),
            slices=SliceTable([]) if slices is None else slices,
            reload=reload,
            poison=poison_from(poison),
            on_foreign_write=choices.one_of(
                "on_foreign_write", on_foreign_write, choices.FOREIGN_WRITE_POLICIES
            ),
            host_copy=choices.one_of("host_copy", host_copy, HOST_COPY_POLICIES),
            check_nan=check_nan,
        )
        self._door = Door(self._context)
        self._guard = Guard(
            self._roots.values(), self._optimizers.values(),
            lambda: self._require_use("weights"), lambda: self._require_use("weights", "optimizer"),
        )  # fmt: skip
        with self._lock, self._session():
            try:
                self._adopt_all()
                if declare is not None:
                    declare(self)
                self._note_undeclared(strict=strict)
                self._sync_guard()
            except BaseException:
                self._abandon()
                raise

    @contextmanager
    def _session(self, *, closing: bool = False) -> Iterator[None]:
        """What a call begins and ends with. The lock is taken beside it and not in here: only a
        ``with`` on the lock itself cannot be cut in two by an interrupt."""
        if self._closed and not closing:
            raise StateError("this sleeper is closed; make a new one")
        try:
            yield
        finally:
            if not self._closed:
                self._sync_guard()

    def refuse_while_writing(self) -> None:
        """Raise StateError when called from within the pairs of an update of this sleeper."""
        self._door.refuse_while_writing()

    def _is_inside(self) -> bool:
        """Whether this thread is in the middle of a call. Asked of the lock: a note of our own
        would be wrong for ever after an interrupt in the wrong place."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _sync_guard(self) -> None:
        """Guard the modules exactly while something of theirs cannot be used as it is."""
        states = (self._context.tag_state(tag) for tag in self._context.ledger.tags())
        if self._door.is_open or any(state is not TagState.RESIDENT for state in states):
            self._guard.install()
        else:
            self._guard.remove()

    def _require_use(self, *tags: str) -> None:
        # A rebuild inside a transition may run a module; its sources are valid by then.
        if not self._is_inside():
            self._require_ready(tag for tag in tags if tag in self._context.ledger.tags())

    def _require_ready(self, tags: Iterable[str]) -> None:
        with self._lock, self._session():
            if self._door.is_open:
                self._door.finish()
            self._require_not_faulted()
            status.require_ready(self._context, tags)

    def _require_not_faulted(self) -> None:
        if self._context.machine.state is State.FAULTED:
            raise FaultedError(
                "the last wake could not prove its content; wake_up(reload=True) reads it from the "
                "checkpoint, wake_up(reload=False) leaves filling to an update"
            )

    def _require_awake(self, what: str) -> None:
        if self._context.released:
            raise StateError(f"cannot {what} while asleep; wake_up() first")

    def _found(self) -> list[Found]:
        return list(module_tensors(self._roots))

    def _adopt_all(self) -> None:
        context = self._context
        found = self._found()
        if context.reload is not None:
            materialise(context.ledger, context.device, self._roots, found)
            found = self._found()
        meta = [item.name for item in found if item.tensor.is_meta]
        if meta:
            raise OwnershipError(
                f"{len(meta)} tensors are on the meta device and nothing fills them: "
                f"{', '.join(meta[:8])}; pass reload= with a checkpoint, or build them for real"
            )
        entries = adopt(context.ledger, context.device, found)
        self._settle_books()
        status.take_digests(context, entries)

    def _abandon(self) -> None:
        """After a failed construction: leave the modules as they were, to try again."""
        self._closed = True
        self._guard.remove()
        put_back_on_meta(self._context.ledger, self._roots)
        leave(self._context)
        if self._owns_store:
            self._context.store.close()

    def _settle_books(self) -> None:
        status.settle_books(self._context, self._found(), explicit=self._explicit_slices)

    def _rescan(self, tags: Sequence[str]) -> tuple[str, ...]:
        """Before a sleep: notice what has left, and own what an optimizer has made since."""
        context = self._context
        asleep = "optimizer" in context.released
        wanted = bool(self._optimizers) and "optimizer" in tags and not asleep
        found = list(optimizer_tensors(self._optimizers, self._roots)) if wanted else []
        self._notice(found, optimizer=wanted)
        status.take_digests(context, adopt(context.ledger, context.device, found))
        escaped, self._escaped = self._escaped, ()
        return escaped

    def _notice(self, more: Sequence[Found] = (), *, optimizer: bool = False) -> None:
        """Look for tensors that have left; the next sleep reports them."""
        found = [*self._found(), *more]
        self._escaped += notice_escapes(self._context, found, optimizer=optimizer)

    def _note_undeclared(self, *, strict: bool) -> None:
        context = self._context
        device = context.device.torch_device
        undeclared(context.ledger, self._roots, device, self._creator_of, strict=strict)
