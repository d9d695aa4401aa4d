"""Content that came back different: copy it once more, read it again, rebuild it, or say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torpor.errors import TorporError, VerificationError
from torpor.sleep.keeping import distrust
from torpor.sleep.payload import find, put, wanted_pairs
from torpor.sleep.restore import copy_again, settle

if TYPE_CHECKING:
    from torpor.sleep.context import Context
    from torpor.sleep.ledger import Entry


def repair(
    context: Context,
    damaged: list[Entry],
    errors: Sequence[TorporError],
    *,
    reloading: bool,
    lenient: bool,
) -> list[str]:
    """Repair entries whose host copies did not give their official content back.

    What a reload or a rebuild will fill next is left to it.

    Args:
        errors: why copies could not be read.
        reloading: the checkpoint will be read again anyway.
        lenient: the caller said who fills, so that damaged copies may be given up.

    Returns:
        The names repaired here.

    Raises:
        VerificationError: some cannot be repaired, by name.
    """
    said: list[TorporError] = []
    still, unreadable = copy_again(context, damaged)
    for entry in still:
        # If this wake fails the books get it back, to be tried once more.
        distrust(context, entry)
    still = _not_filled_later(still, reloading=reloading)
    if still and not lenient and context.reload is not None and context.epochs.from_checkpoint:
        said = _read_again(context, still)
        settle(context, still)
        still = [entry for entry in still if not entry.valid]
    if still and not lenient:
        names = [entry.name for entry in still]
        raise VerificationError(
            f"{len(names)} tensors came back different from what went to sleep: "
            f"{', '.join(names[:8])}; wake_up(reload=True) reads them from the checkpoint, "
            "wake_up(reload=False) leaves filling them to an update",
            names,
        ) from next(iter((*said, *unreadable, *errors)), None)
    return [entry.name for entry in damaged if entry.valid]


def _not_filled_later(damaged: list[Entry], *, reloading: bool) -> list[Entry]:
    """Those that neither a reload nor a rebuild is going to fill."""
    return [
        entry
        for entry in damaged
        if (entry.rebuild is None or entry.by_hand) and not (reloading and entry.in_checkpoint)
    ]


def _read_again(context: Context, damaged: list[Entry]) -> list[TorporError]:
    """Read some tensors from the checkpoint, as far as that goes; digests tell what came of it."""
    assert context.reload is not None, "the caller looked"
    by_parameter = context.slices.by_parameter()
    names = [
        part.name
        for entry in damaged
        for alias in entry.aliases
        for part in by_parameter.get(alias, ())
    ]
    try:
        for name, value in wanted_pairs(context.reload, names):
            _entry, copies = find(context, name, value)
            put(copies)
    except TorporError as error:
        return [error]
    return []
