"""The compiled kernels as Python sees them: C structures and functions, by ctypes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from torpor.model.native.compiler import KernelsUnavailableError, compiled

_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The dtypes that there are kernels for, and what the names of their functions end in."""

_MAX_SIZES = 4096


class Layer(ctypes.Structure):
    """One layer's attention; see ``paged.h``."""

    _fields_: ClassVar = [
        ("arena", _POINTER),
        *(
            (name, _INT)
            for name in (
                *("block_elements", "key_offset", "value_offset", "heads", "kv_heads"),
                *("k_dim", "v_dim", "block_size", "window"),
            )
        ),
        ("scale", ctypes.c_float),
    ]


class Step(ctypes.Structure):
    """The rows of one step; see ``paged.h``."""

    _fields_: ClassVar = [
        ("tables", _POINTER),
        ("table_width", _INT),
        ("starts", _POINTER),
        ("contexts", _POINTER),
        ("slots", _POINTER),
        ("tokens", _INT),
        ("items", _POINTER),
        ("num_items", _INT),
    ]


class Tokens(ctypes.Structure):
    """What a layer hands over to attention; see ``paged.h``."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("q", "k", "v")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride")),
        ("out", _POINTER),
        ("lse", _POINTER),
    ]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled function."""

    function: Callable[[Any], None]
    address: int


class Library:
    """The shared library, and its threads.

    Raises:
        KernelsUnavailableError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailableError(f"{path} cannot be loaded: {error}") from error
        self._repeat = self.function("repeat", [_POINTER, _INT])
        self._turned = {
            dtype: self.function(f"turned_{suffix}", [_POINTER, _INT, _INT], _INT)
            for dtype, suffix in SUFFIXES.items()
        }
        self._sizes: dict[tuple[torch.dtype, int, int, int], int] = {}
        self._new_team = self.function("new_team", [_INT], _POINTER)
        self._teams: dict[int, int] = {}
        self._lock = threading.Lock()

    def function(
        self, name: str, arguments: Sequence[Any], result: type[Any] | None = None
    ) -> Callable[..., Any]:
        """A function by its name."""
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = result
        return function  # type: ignore[no-any-return]

    def kernel(self, name: str, *dtypes: torch.dtype) -> Kernel:
        """A kernel for these dtypes. It takes the address of an array of int64, see
        ``kernels.cpp``; every pointer in it is to memory of the dtype unless it says else.

        Raises:
            KernelsUnavailableError: there is none for a dtype.
        """
        for dtype in dtypes:
            if dtype not in SUFFIXES:
                raise KernelsUnavailableError(f"there are no CPU kernels for {dtype}")
        full_name = "_".join((name, *(SUFFIXES[dtype] for dtype in dtypes)))
        function = self.function(full_name, [_POINTER])
        return Kernel(function, ctypes.cast(function, _POINTER).value or 0)  # type: ignore[arg-type]

    def repeat(self, calls: int, count: int) -> None:
        """Make so many calls, whose array of ``Call`` is at an address."""
        self._repeat(calls, count)

    def turned_floats(self, dtype: torch.dtype, team: int, rows: int, width: int) -> int:
        """float32 elements of scratch memory that a team needs for a product of so many rows of so
        many elements."""
        key = dtype, team, rows, width
        found = self._sizes.get(key)
        if found is None:
            found = int(self._turned[dtype](team, rows, width))
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            self._sizes[key] = found
        return found

    def scratch_floats(self, layer: Layer) -> int:
        """float32 elements that each thread needs to attend in a layer."""
        function = self.function("scratch_floats", [_POINTER], _INT)
        return int(function(ctypes.addressof(layer)))

    def tokens_of_a_tile(self, layer: Layer) -> int:
        """Queries of a row that attend together."""
        function = self.function("tokens_of_a_tile", [_POINTER], _INT)
        return int(function(ctypes.addressof(layer)))

    def team(self, threads: int) -> int:
        """Address of a team of so many threads, the caller among them. It lasts as long as the
        process; its threads sleep while nobody computes."""
        team = self._teams.get(threads)
        if team is None:
            with self._lock:
                if threads not in self._teams:
                    self._teams[threads] = self._new_team(threads)
            team = self._teams[threads]
        return team


@cache
def load_library() -> Library:
    """The kernels, compiled if need be.

    Raises:
        KernelsUnavailableError: there are none on this machine.
    """
    return Library(compiled())
