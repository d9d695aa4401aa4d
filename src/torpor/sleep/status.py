"""Questions about a sleeper, and the books kept when content becomes official."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.errors import AsleepError, WeightsIncompleteError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.coverage import reaches_all
from torpor.sleep.ledger import is_weak
from torpor.sleep.portable import portable_tensor_digest
from torpor.sleep.reports import VerifyReport
from torpor.sleep.source import SliceTable
from torpor.sleep.states import TagState

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry
    from torpor.sleep.walk import Found


@dataclass(frozen=True, slots=True)
class OwnerRow:
    """One line of the ownership table."""

    name: str
    aliases: tuple[str, ...]
    cls: str
    tag: str
    nbytes: int
    sources: tuple[str, ...]
    host_copy: str | None
    """Kind of the current host copy, or None."""
    valid: bool
    digest: str | None


def require_ready(context: Context, tags: Iterable[str]) -> None:
    """Raise unless the tags are mapped and valid.

    Raises:
        AsleepError: a tag is released.
        WeightsIncompleteError: content is missing, by name.
    """
    states = {tag: context.tag_state(tag) for tag in tags}
    released = [tag for tag, state in states.items() if state is TagState.RELEASED]
    if released:
        raise AsleepError(f"asleep: {', '.join(released)} released; call wake_up() first")
    invalid = [tag for tag, state in states.items() if state is TagState.MAPPED_INVALID]
    if invalid:
        missing = context.missing(invalid)
        if not missing:
            waiting = context.waiting(invalid)
            raise WeightsIncompleteError(
                f"{', '.join(waiting[:8])} is computed from tensors that are asleep or invalid; "
                "wake them up, or update them",
                waiting,
            )
        raise WeightsIncompleteError(
            f"{len(missing)} tensors have no valid content: {', '.join(missing[:8])}"
            f"{', ...' if len(missing) > 8 else ''}; call reload_weights(), or update_weights() "
            "with all of them",
            missing,
        )


def verify(context: Context) -> VerifyReport:
    """Compare the bytes that are mapped with their official digests.

    Raises:
        AsleepError: none are mapped, so nothing can be proven.
    """
    start_s = time.perf_counter()
    owned = [entry for entry in context.ledger if entry.policy.verified]
    verifiable = [entry for entry in owned if entry.arena.is_mapped]
    if owned and not verifiable:
        raise AsleepError("asleep: nothing is mapped that could be verified; wake_up() first")
    known = [entry for entry in verifiable if entry.valid and entry.digest is not None]
    digests = context.device.fingerprint([entry.range for entry in known])
    differing = [
        entry.name for entry, digest in zip(known, digests, strict=True) if entry.digest != digest
    ]
    return VerifyReport(
        verified=len(known) - len(differing),
        total_verifiable=len(verifiable),
        differing=tuple(differing),
        total_s=time.perf_counter() - start_s,
    )


def local_digests(context: Context) -> dict[str, str]:
    """The official local digest of every owned name that has one."""
    return {entry.name: entry.digest for entry in context.ledger if entry.digest is not None}


def portable_digests(context: Context) -> dict[str, str]:
    """Portable digests by checkpoint name, and by owned name for what no checkpoint holds.

    A rank that holds a part of a tensor answers for that part, under the name with its index, such
    as ``o_proj.weight[:, 8:16]``.
    """
    digests: dict[str, str] = {}
    by_parameter = context.slices.by_parameter()
    for entry in context.ledger:
        if not entry.policy.verified or not entry.arena.is_mapped:
            continue
        for alias in entry.aliases:
            tensor = entry.tensor(alias)
            if tensor is None:
                continue
            parts = by_parameter.get(alias, ())
            for part in parts:
                name, rows = part.portable(tensor)
                digests[name] = portable_tensor_digest(rows)
            if not parts:
                digests[alias] = portable_tensor_digest(tensor)
    return digests


def table(context: Context) -> list[OwnerRow]:
    """One row for each owned storage, in placement order."""
    return [
        OwnerRow(
            name=entry.name,
            aliases=tuple(name for name in entry.aliases if name != entry.name),
            cls=entry.cls.value,
            tag=entry.tag,
            nbytes=entry.nbytes,
            sources=entry.sources,
            host_copy=entry.host.kind if entry.host is not None and not entry.is_dirty else None,
            valid=entry.valid,
            digest=entry.digest,
        )
        for entry in context.ledger
    ]


def status(context: Context) -> dict[str, Any]:
    """State, epochs and bytes, JSON-able."""
    ledger = context.ledger
    return {
        "state": context.machine.state.value,
        "tags": {tag: context.tag_state(tag).value for tag in ledger.tags()},
        "owned_bytes": ledger.bytes_by_class(ledger),
        "resident_bytes": ledger.residents.nbytes,
        "mapped_bytes": sum(arena.mapped_bytes for arena in ledger.arenas(ledger.tags())),
        "host_file_bytes": context.store.file_bytes,
        "host_memory_bytes": context.store.memory_bytes,
        "missing": context.missing(ledger.tags()),
        "weights_epoch": context.epochs.weights,
        "kv_epoch": context.epochs.kv,
        "weights_version": context.epochs.version,
    }


def settle_books(context: Context, found: Sequence[Found], *, explicit: SliceTable | None) -> None:
    """After adoption: the slice table, and which buffers the checkpoint holds."""
    if explicit is None:
        context.slices = SliceTable.identity(_loadable(found, context))
    held: Collection[str] = context.reload.names() if context.reload is not None else ()
    by_parameter = context.slices.by_parameter()
    for entry in context.ledger:
        names = {part.name for alias in entry.aliases for part in by_parameter.get(alias, ())}
        # Restoring an old copy of such a buffer beside new weights would mix versions.
        loaded = entry.cls is OwnershipClass.BUFFER and bool(names.intersection(held))
        entry.in_checkpoint = (entry.cls is OwnershipClass.PARAMETER or loaded) and reaches_all(
            context.slices, entry
        )


def take_digests(context: Context, entries: Iterable[Entry]) -> None:
    """Make the present content of some entries official."""
    verified = [entry for entry in entries if entry.policy.verified and entry.valid]
    digests = context.device.fingerprint([entry.range for entry in verified])
    for entry, digest in zip(verified, digests, strict=True):
        entry.digest = digest


def _loadable(found: Iterable[Found], context: Context) -> list[str]:
    declared = (
        name
        for entry in context.ledger
        if entry.cls is OwnershipClass.PARAMETER
        for name, way in entry.aliases.items()
        if not is_weak(way)
    )
    return list(dict.fromkeys([*(item.name for item in found if item.persistent), *declared]))
