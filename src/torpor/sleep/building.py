"""``building()``: what happens while a model is built, watched.

Two things go wrong while models are built and show only much later. A second ``nn.Module.__init__``
wipes every parameter, buffer, module and hook that the first base class registered; inside
``building()`` it is an error. And nobody knows afterwards which line made a stray tensor; inside
``building()`` that is recorded, so that the audit can name it.

Both watch the calling thread alone.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torpor.errors import DoubleInitError

# A lock holds no state of its own; it makes each change to torch's one Module.__init__ whole.
_PATCHING = threading.Lock()
_MAX_NAMES = 8
_PRUNE_FROM = 1024


@contextmanager
def building() -> Iterator[CreationRecords]:
    """Watch this thread build modules: refuse wiped state, record who makes which tensor.

    May be nested, and left in any order; ``nn.Module.__init__`` is then what it was before, and a
    patch that somebody else has put over it stays in force.

    Yields:
        The records. They stay usable afterwards and keep no tensor alive.

    Raises:
        DoubleInitError: from inside, when ``nn.Module.__init__`` runs again on an instance that
            holds parameters, buffers, modules or hooks. The instance keeps them.
    """
    records = CreationRecords()
    guard = _InitGuard()
    recorder = _Recorder(records)
    try:
        guard.install()
        recorder.start()
        yield records
    finally:
        recorder.stop()
        guard.remove()


# --- double init ---------------------------------------------------------------------------------


class _InitGuard:
    """One wrapper around ``nn.Module.__init__``; several form a chain down to torch's own."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._active = False
        self._previous: Callable[..., None] = nn.Module.__init__
        self._wrapper: Callable[..., None] | None = None

    def install(self) -> None:
        with _PATCHING:
            self._previous = nn.Module.__init__
            self._wrapper = self._make_wrapper()
            self._active = True
            _set_module_init(self._wrapper)

    def remove(self) -> None:
        """Let calls through, and take the wrappers that only do so off the top of the chain.

        Under an active wrapper or a foreign patch this one waits for the next removal.
        """
        with _PATCHING:
            self._active = False
            _set_module_init(_skip_inactive(nn.Module.__init__))

    def _make_wrapper(self) -> Callable[..., None]:
        @functools.wraps(self._previous)
        def guarded_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._active and threading.get_ident() == self._thread:
                _refuse_to_wipe(module, sys._getframe(1))
            self._previous(module, *args, **kwargs)

        vars(guarded_init)["_torpor_guard"] = self
        return guarded_init


def _set_module_init(init: Callable[..., None]) -> None:
    if nn.Module.__init__ is not init:
        nn.Module.__init__ = init  # type: ignore[method-assign]


def _guard_of(init: Callable[..., None]) -> _InitGuard | None:
    guard = getattr(init, "_torpor_guard", None)
    # functools.wraps copies attributes, so a foreign wrapper can carry ours.
    return guard if isinstance(guard, _InitGuard) and guard._wrapper is init else None


def _skip_inactive(init: Callable[..., None]) -> Callable[..., None]:
    while (guard := _guard_of(init)) is not None and not guard._active:
        init = guard._previous
    return init


def _refuse_to_wipe(module: nn.Module, caller: FrameType) -> None:
    held = _registered(module)
    if not held:
        return
    cls = type(module)
    raise DoubleInitError(
        f"nn.Module.__init__ runs a second time on one {cls.__module__}.{cls.__qualname__}, "
        f"at {' from '.join(_init_calls(module, caller))}; it would wipe {'; '.join(held)}. "
        "Initialise nn.Module once: call super().__init__() once in every class of the hierarchy, "
        "or only one of the bases by name"
    )


def _registered(module: nn.Module) -> list[str]:
    """What the instance holds by now, such as ``buffers scale``. Empty before the first init."""
    state: Mapping[str, Any] = vars(module)
    held = [
        f"{kind} {_some(state[f'_{kind}'])}"
        for kind in ("parameters", "buffers", "modules")
        if state.get(f"_{kind}")
    ]
    hooks = [key for key, value in state.items() if key.endswith("_hooks") and value]
    return held + [f"{key.strip('_').replace('_', ' ')} ({len(state[key])})" for key in hooks]


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MAX_NAMES
    return ", ".join(listed[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _init_calls(module: nn.Module, caller: FrameType) -> Iterator[str]:
    """``file:line (function)`` of the calls that led here on this instance, innermost first."""
    frame: FrameType | None = caller
    found = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            if found and not _is_method_on(module, code, frame):
                return
            found = True
            yield f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back


def _is_method_on(module: nn.Module, code: CodeType, frame: FrameType) -> bool:
    return code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is module


# --- who made which tensor -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Creation:
    """The making of one storage."""

    creator: str
    """``file:line`` of the innermost caller outside torch, the standard library and ``sleep``."""
    shape: tuple[int, ...]
    """Shape of the first tensor on the storage."""
    dtype: torch.dtype
    device: str
    nbytes: int
    """Bytes of the whole storage."""


class CreationRecords:
    """Which line made each storage, held weakly: a storage that dies takes its record with it.

    A storage is what moves into an arena, so views and a parameter made from a tensor share the
    record of what they were made from, and adoption does not lose it. Tensors built over memory
    that something else allocated (``torch.from_numpy``, a mapped file) have none; those that a
    function compiled by ``torch.compile`` makes may have none.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[StorageWeakRef, Creation]] = {}
        self._prune_at = _PRUNE_FROM
        self._is_internal = functools.cache(_internal_file_test())

    def creator_of(self, tensor: torch.Tensor) -> str | None:
        """``file:line`` that made the tensor's storage, or None when it was not made inside."""
        storage = _storage_of(tensor)
        if storage is None:
            return None
        entry = self._made.get(storage._cdata)
        return entry[1].creator if entry is not None else None

    def alive(self) -> list[Creation]:
        """What was made inside and still exists, oldest first."""
        return [made for ref, made in list(self._made.values()) if not ref.expired()]

    def note(self, tensor: torch.Tensor, frame: FrameType | None) -> None:
        """Record the tensor's storage, unless it is known, as made by the first outside caller."""
        storage = _storage_of(tensor)
        # An entry keeps the address of its dead storage from being used again: no false match.
        if storage is None or storage._cdata in self._made:
            return
        made = Creation(
            self._creator(frame),
            tuple(tensor.shape),
            tensor.dtype,
            str(tensor.device),
            storage.nbytes(),
        )
        self._made[storage._cdata] = (StorageWeakRef(storage), made)
        if len(self._made) >= self._prune_at:
            self.prune()

    def prune(self) -> None:
        """Forget storages that no longer exist."""
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self._prune_at = max(_PRUNE_FROM, 2 * len(self._made))

    def _creator(self, frame: FrameType | None) -> str:
        nearest = frame
        while frame is not None and self._is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        outside = frame or nearest
        return f"{outside.f_code.co_filename}:{outside.f_lineno}" if outside else "unknown"


def _internal_file_test() -> Callable[[str], bool]:
    """A test for files of torch, the standard library, generated code and this room."""
    folders = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    internal = (*(os.path.join(folder, "") for folder in folders), "<")
    standard = os.path.join(sysconfig.get_paths()["stdlib"], "")

    def is_internal(filename: str) -> bool:
        if filename.startswith(internal):
            return True
        # Installed packages may lie below the standard library's folder.
        return filename.startswith(standard) and "-packages" not in filename

    return is_internal


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout != torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a wrapper subclass or a functional tensor: no storage of its own


class _RecordingDispatch:
    """Passes every operation on and notes the tensors that come back.

    Apart from the mode class, because torch wraps a ``__torch_dispatch__`` that stands in the mode
    class itself in a guard against its compiler, and the first call of that imports the compiler,
    which takes longer than building a model.
    """

    _records: CreationRecords | None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Under torch.compile this method is traced as well; taking notes cannot be.
        if self._records is not None and not torch.compiler.is_dynamo_compiling():
            frame = sys._getframe(1)
            for tensor in _tensors_in(result):
                self._records.note(tensor, frame)
        return result


class _Recorder(_RecordingDispatch, TorchDispatchMode):
    """Notes what is made on this thread between start and stop."""

    def __init__(self, records: CreationRecords) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records = None
        self._noted = records
        self._thread = threading.get_ident()

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        self._records = self._noted

    def stop(self) -> None:
        """Record no more, and leave the stack of modes as soon as nothing lies above."""
        self._records = None
        self._noted.prune()
        if threading.get_ident() != self._thread:
            return
        # Leaving is last in, first out; one left too early is taken off by those above it.
        while isinstance(top := _get_current_dispatch_mode(), _Recorder) and top._records is None:
            top.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for item in result:
            yield from _tensors_in(item)
