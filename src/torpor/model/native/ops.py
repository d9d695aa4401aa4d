"""The operations of a decoder layer by the compiled kernels.

Shape letters: T rows, I input features, O output features, H heads, D head size.
"""

from __future__ import annotations

from typing import Self

import torch

from torpor.model.layers.ops import TorchOps
from torpor.model.native.library import Kernels


class NativeOps:
    """`LayerOps` on the CPU in one dtype.

    A row's bits depend neither on the other rows nor on the number of threads, but for products of
    128 rows and more in float32, whose bits depend on that.
    """

    def __init__(self, kernels: Kernels, *, batch_invariant: bool = False) -> None:
        """Compute with these kernels.

        Args:
            kernels: for the dtype of weights and activations.
            batch_invariant: without that exception; products of many rows are slower then.
        """
        self._kernels = kernels
        self._batch_invariant = batch_invariant
        self._torch = TorchOps()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._takes(x, weight, bias):
            return self._torch.linear(x, weight, bias)
        x_TI = _rows(x)
        rows, features = x_TI.shape[0], weight.shape[0]
        out_TO = x.new_empty((rows, features))
        self._kernels.linear(
            self._team(),
            x_TI.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out_TO.data_ptr(),
            rows,
            features,
            weight.shape[1],
            x_TI.stride(0),
            features,
            self._batch_invariant,
        )
        return out_TO if x.dim() == 2 else out_TO.view(*x.shape[:-1], features)

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps`."""
        return self._norm(x.contiguous(), None, gain, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerOps`."""
        residual = residual.contiguous()
        return self._norm(x.contiguous(), residual, gain, eps), residual

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], width))
        self._kernels.gated(
            self._team(), gate_up.data_ptr(), out.data_ptr(), out.numel() // max(width, 1), width
        )
        return out

    def rotate(
        self, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> torch.Tensor:
        """See `LayerOps`; in place."""
        rows, heads, width = x_THD.shape
        if x_THD.stride()[1:] != (width, 1):
            x_THD = x_THD.contiguous()
        self._kernels.rotate(
            self._team(),
            x_THD.data_ptr(),
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
            rows,
            heads,
            width,
            x_THD.stride(0),
        )
        return x_THD

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.rms_norm(
            self._team(),
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            gain.data_ptr(),
            out.data_ptr(),
            x.numel() // width,
            width,
            eps,
        )
        return out

    def _takes(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        dtype = self._kernels.dtype
        return (
            x.dtype == weight.dtype == dtype
            and x.shape[-1] == weight.shape[1] > 0
            and weight.is_contiguous()
            and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
        )

    def _team(self) -> int:
        return self._kernels.library.team(torch.get_num_threads())


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [T, I] with its elements side by side."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
