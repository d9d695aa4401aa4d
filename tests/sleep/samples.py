"""Devices, modules and tensors that several tests of this room look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torpor.sleep.cpu import CpuDevice

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex32, torch.complex64, torch.complex128),
]


class ShortDevice(CpuDevice):
    """The CPU with as little memory as a test says."""

    def __init__(self, available: int | None = None) -> None:
        super().__init__()
        self.available = available

    def available_bytes(self) -> int:
        return super().available_bytes() if self.available is None else self.available


class Wrapper(torch.Tensor):
    """A tensor class without memory of its own: two inner tensors, as quantised weights have."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=scale.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner = inner
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Any], *_rest: Any) -> Wrapper:
        return Wrapper(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner, args[0].scale)
        plain = [
            item.inner.to(item.scale.dtype) * item.scale if isinstance(item, Wrapper) else item
            for item in args
        ]
        return func(*plain, **(kwargs or {}))


class Opaque(torch.Tensor):
    """A tensor class without memory that does not say what is inside."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Opaque(args[0].held)
        plain = [item.held if isinstance(item, Opaque) else item for item in args]
        return func(*plain, **(kwargs or {}))


class Net(nn.Module):
    """Two layers, a persistent buffer and one that ``state_dict`` does not hold."""

    shift: torch.Tensor
    table: torch.Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("table", torch.randn(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x) + self.shift)) * self.table


class TiedModel(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, tokens: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def values_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Distinct legal values of a dtype, made from small integers."""
    if dtype == torch.bool:
        return torch.arange(count) % 2 == 0
    if dtype.is_complex:
        return torch.complex(torch.arange(count).float(), -torch.ones(count)).to(dtype)
    if dtype.itemsize == 1:
        return torch.arange(count, dtype=torch.uint8).view(dtype)
    return torch.arange(count).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as bytes: equal bits, not equal values."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())
