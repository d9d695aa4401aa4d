"""Products with weights, by the fastest way this processor has for the dtype and number of rows.

PyTorch's own choice is slow where decoding lives, at few rows. The rules here were measured with
torch 2.13 on two cores with AVX512-BF16. They look at dtypes, sizes and what the processor can do,
never at a clock: a machine gives the same bits after every restart.

Shape letters: T rows of input, I input features, O output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional

from torpor.model.layers.ops import LinearKernel
from torpor.model.machine.cpu_features import cpu_has_bfloat16_products
from torpor.model.machine.onednn_switch import OneDnnSwitch
from torpor.model.machine.scratch import Allocate

INVARIANT_ROWS = 16
"""Rows of every product in batch-invariant mode: 8 are a third slower at 32 rows, 32 at one."""

WIDENED_BYTES = 2 << 20
"""Weights turned into float32 at a time: few enough to stay in the cache."""

_ROUNDED = ((4, 1), (32, 4), (128, 8), (512, 32))
"""Up to so many rows, to multiples of what. Decoding meets the small numbers at every step."""
_ROUNDED_BEYOND = 64

_FEW_ROWS = 4
_COLUMNS_FROM = 32

_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, I], T at least 1, and weight [O, I] to a contiguous [T, O]."""


def linear_kernel(
    dtype: torch.dtype,
    *,
    batch_invariant: bool,
    allocate: Allocate,
) -> LinearKernel:
    """The kernel for weights of a dtype.

    Off the CPU, and for other dtypes, it is ``torch.nn.functional.linear``.

    Args:
        dtype: of weights and activations.
        batch_invariant: make a row's bits independent of the other rows and of its place; slower.
            For the CPU.
        allocate: gives scratch memory, see `Allocate`; called here, if at all.
    """
    product = _products(dtype, allocate, same_at_all_rows=batch_invariant)
    if batch_invariant:
        return _Kernel(dtype, functools.partial(_in_tiles, product))
    return _Kernel(dtype, product)


class _Kernel:
    """A product with a bias and leading dimensions around it."""

    def __init__(self, dtype: torch.dtype, product: _Product) -> None:
        self._dtype = dtype
        self._product = product

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, /
    ) -> torch.Tensor:
        if weight.device.type != "cpu" or weight.dtype != self._dtype or not x.numel():
            return functional.linear(x, weight, bias)
        x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if self._dtype == torch.float32:
            out_TO = self._product(x_TI, weight)
        else:
            with OneDnnSwitch.lock:
                out_TO = self._product(x_TI, weight)
        if bias is not None:
            out_TO += bias
        return out_TO if x.dim() == 2 else out_TO.view(*x.shape[:-1], -1)


def _products(dtype: torch.dtype, allocate: Allocate, *, same_at_all_rows: bool) -> _Product:
    many = functools.partial(_rounded_up, _many_rows_float32())
    half = functools.partial(_rounded_up, functional.linear)
    if dtype == torch.float32:
        return many if same_at_all_rows else functools.partial(_float32, many)
    if dtype == torch.bfloat16 and cpu_has_bfloat16_products():
        return half if same_at_all_rows else functools.partial(_bfloat16, half)
    if dtype in (torch.bfloat16, torch.float16):
        float32 = many if same_at_all_rows else functools.partial(_float32, many)
        widened = _Widened(float32, allocate)
        if same_at_all_rows:
            return widened
        one = _one_bfloat16 if dtype == torch.bfloat16 else functional.linear
        return functools.partial(_one_by_one, one, widened)
    return functional.linear


def _many_rows_float32() -> _Product:
    """oneDNN's product where torch has it: ``functional.linear`` goes to another library."""
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return _onednn
    return functional.linear


def _onednn(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, None, "none", [], "")
    return out


def _float32(many: _Product, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    if x_TI.shape[0] <= _FEW_ROWS:
        return _as_columns(x_TI, weight_OI)
    return many(x_TI, weight_OI)


def _as_columns(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Weights from the left, rows as columns; odd numbers of few rows are made even.

    A product with one column would be handed to a matrix-vector routine, which reads weights at
    half the speed.
    """
    rows = x_TI.shape[0]
    if rows < _FEW_ROWS and rows % 2:
        x_TI = torch.cat((x_TI, x_TI[:1]))
    return torch.mm(weight_OI, x_TI.t())[:, :rows].t().contiguous()


def _bfloat16(many: _Product, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    rows = x_TI.shape[0]
    if rows >= _COLUMNS_FROM:
        return _rounded_up(_as_columns, x_TI, weight_OI)
    return _one_by_one(_one_bfloat16, many, x_TI, weight_OI)


def _rounded_up(product: _Product, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """A product of a rounded number of rows, the last ones zero.

    oneDNN compiles and keeps code for every number of rows that it meets, up to a thousand of
    them: 100 MB and some milliseconds for each. A few dozen numbers do.
    """
    rows = x_TI.shape[0]
    missing = rounded_rows(rows) - rows
    if not missing:
        return product(x_TI, weight_OI)
    return product(functional.pad(x_TI, (0, 0, 0, missing)), weight_OI)[:rows]


def rounded_rows(rows: int) -> int:
    """The number of rows that a product of at least so many is computed with."""
    for limit, step in _ROUNDED:
        if rows <= limit:
            return -(-rows // step) * step
    return -(-rows // _ROUNDED_BEYOND) * _ROUNDED_BEYOND


def _one_by_one(
    one: _Product, more: _Product, x_TI: torch.Tensor, weight_OI: torch.Tensor
) -> torch.Tensor:
    """One or two rows by a product for one, others by the other."""
    if x_TI.shape[0] == 1:
        return one(x_TI, weight_OI)
    if x_TI.shape[0] == 2:
        return torch.cat((one(x_TI[:1], weight_OI), one(x_TI[1:], weight_OI)))
    return more(x_TI, weight_OI)


def _one_bfloat16(x_1I: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """One row by torch's own matrix-vector product, which it takes only without oneDNN.

    Twice as fast as oneDNN's where weights come from memory.
    """
    with OneDnnSwitch.off():
        return functional.linear(x_1I, weight_OI)


class _Widened:
    """Half-precision weights times float32 rows, a few output features at a time.

    For processors that have no instructions for such products and emulate them slowly.
    """

    def __init__(self, float32: _Product, allocate: Allocate) -> None:
        self._float32 = float32
        elements = WIDENED_BYTES // torch.float32.itemsize
        self._scratch = allocate((elements,), torch.float32, "widened_weights")

    def __call__(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        features, width = weight_OI.shape
        step = self._scratch.numel() // width
        if not step:
            return functional.linear(x_TI, weight_OI)
        wide_TI = x_TI.float()
        out_TO = x_TI.new_empty((x_TI.shape[0], features))
        for first in range(0, features, step):
            part_PI = weight_OI[first : first + step]
            wide_PI = self._scratch[: part_PI.numel()].view(part_PI.shape)
            wide_PI.copy_(part_PI)
            out_TO[:, first : first + step] = self._float32(wide_TI, wide_PI)
        return out_TO


def _in_tiles(product: _Product, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Products of `INVARIANT_ROWS` rows each, the last filled up with zeros."""
    rows = x_TI.shape[0]
    missing = -rows % INVARIANT_ROWS
    # Zeros are added out of place, so every tile starts at an aligned row of its own memory.
    filled_TI = functional.pad(x_TI, (0, 0, 0, missing))
    parts = [product(tile, weight_OI) for tile in filled_TI.split(INVARIANT_ROWS)]
    return parts[0][:rows] if len(parts) == 1 else torch.cat(parts)[:rows]
