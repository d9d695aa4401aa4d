"""The operations of a decoder layer by the compiled kernels.

Shape letters: T rows, I input features, O output features, H heads, D head size.
"""

from __future__ import annotations

import functools
import math
import struct

import torch

from torpor.model.layers.ops import Compute, TorchOps
from torpor.model.native.calls import Calls
from torpor.model.native.library import Kernel, Library
from torpor.model.native.replay import Replay


class NativeOps:
    """`LayerOps` on the CPU in one dtype.

    A row's bits depend neither on the other rows, nor on how many there are, nor on the number of
    threads.
    """

    def __init__(
        self,
        library: Library,
        dtype: torch.dtype,
        *,
        calls: Calls | None = None,
        replay: Replay | None = None,
    ) -> None:
        """Compute with these kernels.

        Args:
            library: the kernels.
            dtype: of weights and activations.
            calls: of one engine, those of attention included; None for calls of its own.
            replay: computes passes and repeats what can be; None to compute each by itself.

        Raises:
            KernelsUnavailableError: there are no kernels for the dtype.
        """
        self._dtype = dtype
        self._calls = Calls(library) if calls is None else calls
        self._replay = replay
        self._linear = library.kernel("linear", dtype, dtype)
        self._linear_to_float32 = library.kernel("linear", dtype, torch.float32)
        self._linear_gated = library.kernel("linear_gated", dtype)
        self._rms_norm, self._gated, self._rotate, self._take_rows = (
            library.kernel(name, dtype) for name in ("rms_norm", "gated", "rotate", "take_rows")
        )
        self._torch = TorchOps()

    def __deepcopy__(self, memo: object) -> NativeOps:
        # What was kept is about the weights of the original.
        return NativeOps(self._calls.library, self._dtype)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._takes(x, weight, bias):
            return self._torch.linear(x, weight, bias)
        return self._multiply(self._linear, x, weight, bias, weight.shape[0], self._dtype)

    def heads_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        heads = (self.linear(x, w, None) for x, w in zip(x_THI.unbind(1), weight_HOI, strict=True))
        return torch.stack(tuple(heads), dim=1)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._takes(hidden, weight, None):
            return self._torch.logits(hidden, weight)
        features, dtype = weight.shape[0], torch.float32
        return self._multiply(self._linear_to_float32, hidden, weight, None, features, dtype)

    def linear_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._takes(x, weight, bias):
            return self._torch.linear_gated(x, weight, bias)
        features = weight.shape[0] // 2
        return self._multiply(self._linear_gated, x, weight, bias, features, self._dtype)

    def _multiply(
        self,
        kernel: Kernel,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        features: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        x_TI = _rows(x)
        rows, width = x_TI.shape
        calls, team = self._calls, self._calls.team()
        out_TO = calls.empty((rows, features), dtype)
        floats = calls.library.turned_floats(self._dtype, team, rows, width)
        scratch = calls.empty((floats,), torch.float32)
        calls.reads(weight, bias)
        calls.call(
            kernel,
            team,
            calls.address(x_TI),
            calls.address(weight),
            calls.address(bias),
            calls.address(out_TO),
            rows,
            weight.shape[0],
            width,
            x_TI.stride(0),
            features,
            calls.address(scratch),
        )
        return out_TO if x.dim() == 2 else out_TO.view(*x.shape[:-1], features)

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._are_mine(x, gain):
            return self._torch.rms_norm(x, gain, eps)
        return self._norm(x.contiguous(), None, gain, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerOps`."""
        if not self._are_mine(x, residual, gain) or x.shape != residual.shape:
            return self._torch.add_rms_norm(x, residual, gain, eps)
        residual = residual.contiguous()
        return self._norm(x.contiguous(), residual, gain, eps), residual

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        if not self._are_mine(gate_up):
            return self._torch.gated(gate_up)
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = self._calls.empty((*gate_up.shape[:-1], width), gate_up.dtype)
        self._calls.call(
            self._gated,
            self._calls.team(),
            self._calls.address(gate_up),
            self._calls.address(out),
            out.numel() // max(width, 1),
            width,
        )
        return out

    def rotate(
        self,
        x_THD: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """See `LayerOps`; in place."""
        if interleaved or not self._are_mine(x_THD, cos_T1D, sin_T1D):
            return self._torch.rotate(x_THD, cos_T1D, sin_T1D, interleaved=interleaved)
        cos_T1D, sin_T1D = cos_T1D.contiguous(), sin_T1D.contiguous()
        rows, heads, width = x_THD.shape
        if x_THD.stride()[1:] != (width, 1):
            x_THD = x_THD.contiguous()
        self._calls.call(
            self._rotate,
            self._calls.team(),
            self._calls.address(x_THD),
            self._calls.address(cos_T1D),
            self._calls.address(sin_T1D),
            rows,
            heads,
            width,
            x_THD.stride(0),
        )
        return x_THD

    def take_rows(self, x_TX: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        plain = x_TX.is_contiguous() and rows_R.is_contiguous()
        if not (plain and self._are_mine(x_TX) and rows_R.dtype == torch.int64):
            return self._torch.take_rows(x_TX, rows_R)
        out = self._calls.empty((rows_R.shape[0], *x_TX.shape[1:]), x_TX.dtype)
        self._calls.call(
            self._take_rows,
            self._calls.address(x_TX),
            self._calls.address(rows_R),
            self._calls.address(out),
            rows_R.shape[0],
            math.prod(x_TX.shape[1:]),
        )
        return out

    def run_pass(self, compute: Compute, context: object, *inputs: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        if self._replay is None:
            return compute(context, *inputs)
        return self._replay.run(compute, context, inputs)

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, gain: torch.Tensor, eps: float
    ) -> torch.Tensor:
        gain = gain.contiguous()
        self._calls.reads(gain)
        out = self._calls.empty(x.shape, x.dtype)
        width = x.shape[-1]
        self._calls.call(
            self._rms_norm,
            self._calls.team(),
            self._calls.address(x),
            self._calls.address(residual),
            self._calls.address(gain),
            self._calls.address(out),
            x.numel() // width,
            width,
            _bits(eps),
        )
        return out

    def _are_mine(self, *tensors: torch.Tensor) -> bool:
        return all(tensor.dtype == self._dtype for tensor in tensors)

    def _takes(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        dtype = self._dtype
        return (
            x.dtype == weight.dtype == dtype
            and x.shape[-1] == weight.shape[1] > 0
            and weight.is_contiguous()
            and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
        )


@functools.cache
def _bits(x: float) -> int:
    """A float32 as an integer with the same bits."""
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    return int(bits)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [T, I] with its elements side by side."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
