"""A forward pass of few tokens, computed once in Python and repeated without it.

What torch itself computes on the way would be missing in a repetition. So torch's functions are
watched while calls are kept: a pass in which it does more than look at memory is never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torpor.model.layers.ops import Compute
from torpor.model.machine.scratch import Allocate
from torpor.model.native.calls import Calls, Tape

MAX_TOKENS = 64
"""With more, what Python takes no longer counts."""
ROOM_BYTES = 16 << 20


class Replay:
    """Repeats passes over the same number of tokens."""

    def __init__(self, calls: Calls, allocate: Allocate, *, epoch: Callable[[], int]) -> None:
        """Start with none.

        Args:
            calls: of all kernels that a pass uses.
            allocate: gives scratch memory, see `Allocate`; called only here.
            epoch: of the weights; what was kept before it moves is forgotten.
        """
        self._calls = calls
        self._room = allocate((ROOM_BYTES,), torch.uint8, "replay")
        self._current_epoch = epoch
        self._epoch: int | None = None
        self._passes: dict[tuple[int, int], _Pass | None] = {}
        """By number of tokens and threads; None for one that cannot be repeated."""

    def run(self, compute: Compute, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """``compute(*inputs)``; the result holds until the next call.

        Args:
            compute: the same function of inputs, weights and attention in every call.
            inputs: [T, ...] each, the same sizes whenever T is the same; may be overwritten.
        """
        tokens = inputs[0].shape[0]
        if tokens > MAX_TOKENS:
            return compute(*inputs)
        epoch = self._current_epoch()
        if epoch != self._epoch:
            self._passes.clear()
            self._epoch = epoch
        key = tokens, torch.get_num_threads()
        if key not in self._passes:
            self._passes[key], result = self._record(compute, inputs)
            return result
        kept = self._passes[key]
        return compute(*inputs) if kept is None else kept.repeat(self._calls, inputs)

    def _record(
        self, compute: Compute, inputs: Sequence[torch.Tensor]
    ) -> tuple[_Pass | None, torch.Tensor]:
        tape = Tape(self._room)
        places = [tape.empty(each.shape, each.dtype) for each in inputs]
        for place, each in zip(places, inputs, strict=True):
            place.copy_(each)
        self._calls.tape = tape
        try:
            with _Watch() as watch:
                result = compute(*places)
        finally:
            self._calls.tape = None
        if watch.computed or tape.overflow:
            return None, result
        tape.finish()
        kept = _Pass(
            tape,
            [tape.at_the_place_of(place) for place in places],
            tape.at_the_place_of(result),
        )
        # The room is every pass's: the next one may write where this result lies.
        return kept, kept.result


class _Pass:
    def __init__(self, tape: Tape, places: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        self._tape, self._places, self.result = tape, places, result

    def repeat(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        for place, each in zip(self._places, inputs, strict=True):
            place.copy_(each)
        self._tape.repeat(calls.library)
        return self.result


class _Watch(TorchFunctionMode):
    """Notices what torch computes, reads, or gets memory for; looking at memory is harmless."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in _QUESTIONS:
            results = result if isinstance(result, list | tuple) else [result]
            # add_, and __iadd__
            writes = name.rstrip("_") + "_" == name or name.startswith("__i")
            if writes or not all(_looks_at(args[0] if args else None, each) for each in results):
                self.computed = True
        return result


_QUESTIONS = frozenset(
    {
        *("__get__", "__len__", "dim", "size", "stride", "numel", "storage_offset"),
        *("data_ptr", "is_contiguous", "untyped_storage", "element_size"),
    }
)
"""What can be asked of a tensor without a look at its content."""


def _looks_at(source: Any, result: Any) -> bool:
    """Whether a result is the memory of its source, as a view is."""
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return source.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
