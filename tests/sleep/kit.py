"""A small model with every ownership class, its checkpoint, and devices and files that fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torpor.errors import CheckpointError, OutOfMemoryError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.cpu import CpuDevice
from torpor.sleep.ledger import Entry
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import FileExtent, SliceTable, WeightSlice

WIDTH = 8
Weights = dict[str, torch.Tensor]


class Model(nn.Module):
    """Every ownership class at once.

    ``normed`` is derived from ``embed`` and ``doubled`` from ``normed`` and a buffer; ``sinks`` is
    a part of the cache that is refilled from ``doubled``. ``qk`` is filled by two checkpoint names.
    """

    correction: torch.Tensor
    rope: torch.Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        # Registered before what it is computed from, as happens with parents and children.
        self.doubled = torch.zeros(width, width)
        self.normed = torch.zeros(width, width)
        self.embed = nn.Parameter(torch.zeros(width, width))
        self.qk = nn.Parameter(torch.zeros(2 * width, width))
        self.low = nn.Parameter(torch.zeros(width, dtype=torch.bfloat16))
        self.register_buffer("correction", torch.zeros(width))
        self.register_buffer("rope", torch.arange(float(width)), persistent=False)
        self.width = width
        self.kv = self.sinks = self.work = self.count = torch.zeros(0)

    def declare(self, sleeper: Sleeper) -> None:
        """Own everything that is neither a parameter nor a registered buffer."""
        width = self.width
        sleeper.own(
            self.normed,
            name="normed",
            cls=OwnershipClass.DERIVED,
            sources=["embed"],
            rebuild=lambda: self.embed.detach() / 2,
        )
        sleeper.own(
            self.doubled,
            name="doubled",
            cls=OwnershipClass.DERIVED,
            sources=["normed", "rope"],
            rebuild=self._double,
        )
        cache = OwnershipClass.CACHE
        self.kv = sleeper.allocate((4, width), torch.float32, name="kv", cls=cache)
        self.sinks = sleeper.allocate(
            (2, width),
            torch.float32,
            name="sinks",
            cls=cache,
            sources=["doubled"],
            rebuild=lambda: self.doubled[:2].clone(),
        )
        self.work = sleeper.allocate(
            (3, width), torch.float32, name="work", cls=OwnershipClass.SCRATCH
        )
        self.count = sleeper.allocate(
            (1,), torch.int64, name="count", cls=OwnershipClass.SYNC, reset=self._reset
        )

    def _reset(self) -> None:
        self.count.fill_(100)

    def _double(self) -> None:
        # In two steps, so that an interrupt in between leaves half of it.
        self.doubled.copy_(self.normed * 2)
        self.doubled.add_(self.rope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.work.copy_(x @ (self.embed + self.doubled))
        self.kv[:3].copy_(self.work @ self.qk[self.width :].T)
        out = self.work @ self.qk[: self.width].T + self.kv[:3] + self.sinks.sum(0)
        return out + self.correction * self.rope + self.low.float()


SLICES = SliceTable(
    [
        WeightSlice(name="embed", parameter="embed"),
        WeightSlice(name="q", parameter="qk", start=0, length=WIDTH),
        WeightSlice(name="k", parameter="qk", start=WIDTH, length=WIDTH),
        WeightSlice(name="low", parameter="low"),
        WeightSlice(name="correction", parameter="correction"),
    ],
    ignored=["tied.head"],
)


def weights_of(seed: int) -> Weights:
    """A whole checkpoint."""
    made = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(WIDTH, WIDTH, generator=made),
        "q": torch.randn(WIDTH, WIDTH, generator=made),
        "k": torch.randn(WIDTH, WIDTH, generator=made),
        "low": torch.randn(WIDTH, generator=made).to(torch.bfloat16),
        "correction": torch.randn(WIDTH, generator=made),
    }


def probe() -> torch.Tensor:
    """The input that outputs are compared for."""
    return torch.arange(3.0 * WIDTH).reshape(3, WIDTH) / 10 - 1


def expected(weights: Weights) -> torch.Tensor:
    """What a model with these weights answers, worked out beside any sleeper."""
    model = Model()
    with torch.no_grad():
        model.embed.copy_(weights["embed"])
        model.qk.copy_(torch.cat([weights["q"], weights["k"]]))
        model.low.copy_(weights["low"])
        model.correction.copy_(weights["correction"])
        model.normed.copy_(model.embed / 2)
        model.doubled.copy_(model.normed * 2 + model.rope)
        model.kv, model.work = torch.zeros(4, WIDTH), torch.zeros(3, WIDTH)
        model.sinks = model.doubled[:2].clone()
        return model(probe())


class MemorySource:
    """A checkpoint that no file holds."""

    def __init__(self, weights: Weights) -> None:
        self.weights = dict(weights)
        self.read = 0

    def names(self) -> Collection[str]:
        return self.weights.keys()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.read += 1
        yield from self.weights.items()

    def extent(self, name: str) -> FileExtent | None:
        return None


class FileSource:
    """A safetensors file, read anew each time."""

    def __init__(self, path: Path, weights: Weights | None = None) -> None:
        self.path = path
        if weights is not None:
            save_file(weights, path)
        self.read = 0

    def names(self) -> Collection[str]:
        return [name for name in self._header() if name != "__metadata__"]

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.read += 1
        try:
            loaded = load_file(self.path)
        except Exception as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error
        yield from loaded.items()

    def extent(self, name: str) -> FileExtent | None:
        header = self._header()
        if name not in header:
            return None
        start, stop = header[name]["data_offsets"]
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[header[name]["dtype"]]
        return FileExtent(
            path=self.path, offset=self._data_start() + start, nbytes=stop - start, dtype=dtype
        )

    def flip_bit(self, name: str) -> None:
        """Damage one tensor in place without changing size or modification time."""
        extent = self.extent(name)
        assert extent is not None
        before = self.path.stat()
        with self.path.open("r+b") as file:
            file.seek(extent.offset)
            byte = file.read(1)[0]
            file.seek(extent.offset)
            file.write(bytes([byte ^ 1]))
        os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def replace(self, weights: Weights) -> None:
        """Another file under the same name, as a download that finishes does."""
        beside = self.path.with_suffix(".new")
        save_file(weights, beside)
        beside.replace(self.path)

    def _data_start(self) -> int:
        with self.path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")

    def _header(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return header


class RoomyDevice(CpuDevice):
    """The CPU, without asking the system each time how much memory is left."""

    def available_bytes(self) -> int:
        return 1 << 40


class FaultyDevice:
    """The CPU, with an error at a chosen call."""

    FALLIBLE = frozenset(
        {
            *("map", "unmap", "fill", "move", "copy_in", "copy_out", "host_view", "fingerprint"),
            *("resident_bytes", "synchronize", "trim"),
        }
    )

    def __init__(self) -> None:
        self.inner = RoomyDevice()
        self.calls: list[str] = []
        self.raised = False
        self._countdown: int | None = None
        self._error: Callable[[], BaseException] = OutOfMemoryError
        self._after = self._lasting = False

    def arm(
        self,
        call: int,
        error: Callable[[], BaseException],
        *,
        after: bool = False,
        lasting: bool = False,
    ) -> None:
        """Raise at the given call from now (0 is the next): before or after doing what it does,
        once or from then on."""
        self._countdown, self._error, self.raised = call, error, False
        self._after, self._lasting = after, lasting

    def disarm(self) -> None:
        """Work from now on."""
        self._countdown = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in self.FALLIBLE:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            due = self._is_due()
            if due and not self._after:
                raise self._error()
            result = value(*args, **kwargs)
            if due:
                raise self._error()
            return result

        return call

    def _is_due(self) -> bool:
        if self._countdown is None:
            return False
        if self._countdown > 0:
            self._countdown -= 1
            return False
        self.raised = True
        if not self._lasting:
            self._countdown = None
        return True


class Rig:
    """A model, its sleeper, and the weights it ought to hold."""

    def __init__(self, seed: int = 1, *, weights: Weights | None = None, **options: Any) -> None:
        self.weights = weights_of(seed) if weights is None else weights
        self.model = Model()
        self.device = options.setdefault("device", FaultyDevice())
        self.sleeper = Sleeper(self.model, slices=SLICES, declare=self.model.declare, **options)
        reload = options.get("reload")
        if reload is not None:
            self.sleeper.reload_weights()
        else:
            self.sleeper.update_weights(self.weights)
        self.addresses = self._addresses()

    def output(self) -> torch.Tensor:
        """The model's answer, if the sleeper lets it answer."""
        self.sleeper.require_ready()
        with torch.no_grad():
            return self.model(probe())

    def is_right(self, weights: Weights | None = None) -> bool:
        """Whether the answer is bit for bit that of the weights (default: the last official)."""
        return torch.equal(self.output(), expected(self.weights if weights is None else weights))

    def entry(self, name: str) -> Entry:
        return self.sleeper._context.ledger[name]

    def check_books(self) -> None:
        """What the sleeper says of itself must be what is."""
        context = self.sleeper._context
        assert context.machine.state.value in {"awake", "asleep", "faulted"}
        assert (context.machine.state.value == "awake") == (not context.released)
        assert self._addresses() == self.addresses, "an address has changed"
        for entry in context.ledger:
            released = entry.tag in context.released
            assert entry.arena.is_mapped != released, f"{entry.name}: the books are wrong"
            assert is_readable([entry.range]) != released, f"{entry.name}: memory and books differ"
        for name, state in self.sleeper.tag_states.items():
            assert (state == "released") == (name in context.released)

    def _addresses(self) -> dict[str, int]:
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        extra = ("normed", "doubled", "kv", "sinks", "work", "count")
        named |= {name: getattr(self.model, name) for name in extra}
        return {name: tensor.data_ptr() for name, tensor in named.items()}


def is_readable(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether the first and the last byte of every range can be read; never touches the memory.

    The kernel reads on our behalf and answers EFAULT where a direct read would end the process.
    """
    import ctypes

    reader, writer = os.pipe()
    try:
        for address, nbytes in ranges:
            for place in {address, address + nbytes - 1}:
                try:
                    os.write(writer, (ctypes.c_ubyte * 1).from_address(place))
                except OSError:
                    return False
        return True
    finally:
        os.close(reader)
        os.close(writer)
