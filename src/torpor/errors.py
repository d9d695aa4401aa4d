"""The one tree of errors.

    TorporError
    ├── ArgumentError            a call with an impossible argument; nothing has changed
    │   ├── ConfigError          a model's config cannot be used as it stands
    │   └── RequestError         one generation request is refused; others are not touched
    │       └── PromptTooLongError
    ├── GenerationError          requests failed while they ran; it carries every answer
    ├── StepError                a step failed, and every request in it
    ├── StateError               the call is not legal in this state; nothing has changed
    │   ├── AsleepError          something needs memory that sleep has released
    │   ├── CacheInUseError      live requests hold blocks of the KV cache
    │   └── FaultedError         content could not be proven; only a reload or close is legal
    ├── OwnershipError           a tensor without an owner, or with two
    │   └── DoubleInitError      a second ``Module.__init__`` would wipe registered state
    ├── ArenaError               the operating system or driver refused memory
    │   └── OutOfMemoryError     there is not enough of it; retry after freeing some
    ├── HostCopyError            a host copy cannot be written or read
    │   └── HostFullError        no room for it on disk or under the host memory limit
    ├── WeightsError             official content could not be loaded or updated
    │   ├── ModelNotFoundError   no such model or package here
    │   ├── CheckpointError      a file is damaged, truncated or not what it claims to be
    │   ├── WeightsMismatchError a name, shape or dtype does not fit the model
    │   └── WeightsIncompleteError  parameters are missing
    └── VerificationError        bytes differ from the digest taken when they became official
        └── ForeignWriteError    somebody wrote outside the door

Every message says what was found (the value) and what to do (the remedy). An error of another
library is kept as ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def shown(value: object, most: int = 450) -> str:
    """A value for a message, shortened to so many characters; Python itself refuses to spell very
    long numbers."""
    try:
        text = repr(value)
    except ValueError:
        if isinstance(value, int):
            return f"a number of {value.bit_length()} bits"
        return f"a {type(value).__name__} with a number too long to show"
    return text if len(text) <= most else f"{text[: most - 3]}..."


class TorporError(Exception):
    """Base of everything torpor raises on purpose."""


class ArgumentError(TorporError, ValueError):
    """A call with an impossible argument; nothing has changed."""


class ConfigError(ArgumentError):
    """A model's config is missing a field, or asks for something unknown."""


class RequestError(ArgumentError):
    """One generation request is refused; other requests are not touched."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room in the model's context."""


class GenerationError(TorporError, RuntimeError):
    """Requests failed while they ran; ``outputs`` holds a ``RequestOutput`` for each, failed or
    not, in the order of the prompts."""

    def __init__(self, message: str, outputs: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.outputs: tuple[Any, ...] = tuple(outputs)


class StepError(TorporError, RuntimeError):
    """A step failed for a reason that is none of its requests; all of them failed with it."""


class StateError(TorporError, RuntimeError):
    """The call is not legal in the present state; nothing has changed."""


class AsleepError(StateError):
    """The call needs memory that sleep has released, or content that is not valid yet."""


class CacheInUseError(StateError):
    """Live requests hold blocks of the KV cache that the call would have to take from them."""


class FaultedError(StateError):
    """Content could not be proven after a transition; reload the weights or close."""


class OwnershipError(TorporError):
    """A tensor has no owner, two owners, or has left its owner's memory."""


class DoubleInitError(OwnershipError, RuntimeError):
    """A second ``Module.__init__`` would have wiped what the instance already holds."""


class ArenaError(TorporError, RuntimeError):
    """The operating system or the driver refused a memory operation."""


class OutOfMemoryError(ArenaError):
    """There is not enough memory; nothing was lost and the call can be retried."""


class HostCopyError(TorporError, RuntimeError):
    """A host copy could not be written or read."""


class HostFullError(HostCopyError):
    """No room for a host copy, on disk or under the host memory limit."""


class WeightsError(TorporError):
    """Official content could not be loaded, reloaded or updated."""


class ModelNotFoundError(WeightsError, FileNotFoundError):
    """No model of that name or path, or the package that holds it is not installed."""


class CheckpointError(WeightsError):
    """A checkpoint file is damaged, truncated, or not what it claims to be."""


class WeightsMismatchError(WeightsError, ValueError):
    """A weight's name, shape or dtype does not fit the model."""


class _NamesError(TorporError):
    """Carries the names of the tensors it speaks of, in ``names``."""

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names: tuple[str, ...] = tuple(names)


class WeightsIncompleteError(_NamesError, WeightsError):
    """Parameters have no valid content; ``names`` lists them."""


class VerificationError(_NamesError):
    """Bytes differ from the digest taken when they became official; ``names`` lists them."""


class ForeignWriteError(VerificationError):
    """Owned bytes were changed outside the door; ``names`` lists them."""
