"""A forward pass: noted by Python, then computed in one go, kept and repeated.

What torch itself computes on the way would come too early, and be missing in a repetition. So
torch's functions are watched while calls are noted: before it does more than look at memory, all
calls so far are made, and such a pass is never repeated. Weights that were given other memory
since, and another context, are noticed before each repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from torpor.model.layers.ops import Compute
from torpor.model.machine.scratch import Allocate
from torpor.model.native.calls import Calls, Tape
from torpor.model.native.room import Room

MAX_PASSES = 128
"""What is kept: decoding has a number of tokens for each number of rows, and prompts have lengths
of their own, but those that are split all have the same one."""
MANY_TOKENS = 65
"""From so many on, a pass that cannot be repeated is noted first, since its calls are long."""
ROOM_BYTES = 64 << 20
"""For the results of a pass that live at a time. Where a pass needs more, products take so long
that its memory no longer counts."""


class Replay:
    """Computes passes; those over inputs of the same sizes are repeated."""

    def __init__(self, calls: Calls, allocate: Allocate, *, epoch: Callable[[], int]) -> None:
        """Start with none.

        Args:
            calls: of all kernels that a pass uses.
            allocate: gives scratch memory, see `Allocate`; called only here.
            epoch: of the weights; what was kept before it moves is forgotten.
        """
        self._calls = calls
        self._memory = allocate((ROOM_BYTES,), torch.uint8, "results")
        self._current_epoch = epoch
        self._epoch: int | None = None
        self._passes: dict[tuple[int, ...], _Pass] = {}
        """By number of threads and sizes of the inputs; those used last are at the end."""

    def run(
        self,
        compute: Compute,
        context: object,
        inputs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """``compute(context, *inputs)``; the result holds until the next call, or sleep.

        Args:
            compute: of context, inputs and weights alone, by the kernels of `calls`.
            context: another one is another pass. Not kept alive.
            inputs: of any first dimensions, from which all other sizes follow; may be overwritten.
        """
        epoch = self._current_epoch()
        if epoch != self._epoch:
            self._passes.clear()
            self._epoch = epoch
        key = torch.get_num_threads(), *(each.shape[0] for each in inputs)
        kept = self._passes.pop(key, None)
        if kept is None or not kept.is_of(compute, context):
            kept, result = self._record(compute, context, inputs)
            self._keep(key, kept)
            return result
        self._keep(key, kept)
        if not kept.repeats:
            return self._once(compute, context, inputs)
        return kept.repeat(inputs)

    def _keep(self, key: tuple[int, ...], kept: _Pass) -> None:
        self._passes[key] = kept
        if len(self._passes) > MAX_PASSES:
            del self._passes[next(iter(self._passes))]

    def _record(
        self, compute: Compute, context: object, inputs: Sequence[torch.Tensor]
    ) -> tuple[_Pass, torch.Tensor]:
        room = Room(self._memory)
        places = [room.empty(each.shape, each.dtype) for each in inputs]
        given = [
            each if place is None else place.copy_(each)
            for place, each in zip(places, inputs, strict=True)
        ]
        result, tape, computed = self._note(compute, context, given, room)
        kept = _Pass(compute, context)
        if None not in places and not computed and not tape.overflowed:
            tape.finish()
            # The room is every pass's: the next one may write where this result lies.
            result = kept.keep(tape, room, given, result)
        return kept, result

    def _note(
        self, compute: Compute, context: object, inputs: Sequence[torch.Tensor], room: Room
    ) -> tuple[torch.Tensor, Tape, bool]:
        """The result, its calls, and whether torch computed on the way."""
        calls, tape = self._calls, Tape(self._calls.library)
        # An interrupt may come anywhere, even where the watch ends: calls that it leaves unmade
        # must never be made, and nobody else's calls be noted with them.
        try:
            calls.room, calls.tape = room, tape
            with _Watch(tape) as watch:
                result = compute(context, *inputs)
            tape.make()
        finally:
            calls.room = calls.tape = None
            tape.drop()
        return result, tape, watch.computed

    def _once(
        self, compute: Compute, context: object, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if inputs[0].shape[0] < MANY_TOKENS:
            return self._compute(compute, context, inputs)
        return self._note(compute, context, inputs, Room(self._memory))[0]

    def _compute(
        self, compute: Compute, context: object, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        try:
            self._calls.room = Room(self._memory)
            return compute(context, *inputs)
        finally:
            self._calls.room = None


class _Pass:
    """One pass, and its tape if it can be repeated."""

    def __init__(self, compute: Compute, context: object) -> None:
        # The context holds tensors of its last step, which are nobody's once it has ended.
        self._compute, self._context = compute, ref(context)
        self._tape: Tape | None = None
        self._places: list[torch.Tensor] = []
        self._result: torch.Tensor | None = None

    @property
    def repeats(self) -> bool:
        """Whether it can be repeated; else it is computed each time."""
        return self._tape is not None

    def keep(
        self, tape: Tape, room: Room, places: Sequence[torch.Tensor], result: torch.Tensor
    ) -> torch.Tensor:
        """Repeat these calls from now on; the result at its place."""
        self._tape = tape
        self._places = [room.at_the_place_of(place) for place in places]
        self._result = room.at_the_place_of(result)
        return self._result

    def is_of(self, compute: Compute, context: object) -> bool:
        """Whether it is the same pass still, over the same memory."""
        same = self._compute == compute and self._context() is context
        return same and (self._tape is None or self._tape.reads_the_same())

    def repeat(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result for other inputs."""
        assert self._tape is not None, "a pass without a tape"
        assert self._result is not None, "a tape without a result"
        for place, each in zip(self._places, inputs, strict=True):
            place.copy_(each)
        self._tape.repeat()
        return self._result


class _Watch(TorchFunctionMode):
    """Makes noted calls before torch computes, reads, or gets memory for anything; looking at
    memory is harmless."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.computed = False
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS or name in _VIEWS or _gives_a_view(name, args):
            return func(*args, **(kwargs or {}))
        self._tape.make()
        result = func(*args, **(kwargs or {}))
        if name not in _PERHAPS_VIEWS or not args or not _looks_at(args[0], result):
            self.computed = True
        return result


_QUESTIONS = frozenset(
    {
        *("__get__", "__len__", "dim", "size", "stride", "numel", "storage_offset"),
        *("data_ptr", "is_contiguous", "untyped_storage", "element_size"),
    }
)
"""What can be asked of a tensor without a look at its content."""

_VIEWS = frozenset(
    {
        *("view", "unflatten", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand"),
        *("split", "chunk", "narrow", "select", "unbind", "detach"),
    }
)
"""What gives a view, or raises."""

_PERHAPS_VIEWS = frozenset({"__getitem__", "reshape", "flatten", "contiguous"})
"""What gives a view of some tensors and a copy of others."""


def _gives_a_view(name: str, args: Sequence[Any]) -> bool:
    """Whether one of `_PERHAPS_VIEWS` is known to give a view of its first argument."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        # A bool is an int, and makes a copy.
        return all(each is None or each is ... or type(each) in (int, slice) for each in index)
    return name in _PERHAPS_VIEWS and len(args) > 0 and bool(args[0].is_contiguous())


def _looks_at(source: Any, result: Any) -> bool:
    """Whether a result is the memory of its source, as a view is."""
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return source.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
