"""The operations that layers are made of, behind one interface: by torch, or by kernels of our own.

Every implementation is right; some are faster. Shape letters: T rows, I input features, O output
features, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

Compute = Callable[..., torch.Tensor]


class LayerOps(Protocol):
    """What a decoder layer computes with."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., I], weight [O, I], bias [O] or None; [..., O]."""
        ...

    def heads_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """Each head by a weight of its own: [T, H, I] and [H, O, I] to [T, H, O]."""
        ...

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``hidden @ weight.T`` in float32: [..., D] and weight [V, D] to [..., V]."""
        ...

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * gain`` along the last dimension, computed in float32; rounded to x's
        dtype before the gain, as checkpoints are trained (Zhang and Sennrich 2019, equation 4).
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of ``x + residual``, and that sum; `residual` may be overwritten by it."""
        ...

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of [..., 2 * I], gate first: [..., I] (SwiGLU, Shazeer 2020)."""
        ...

    def linear_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``gated(linear(x, weight, bias))``, in one go where that is faster."""
        ...

    def take_rows(self, x_TX: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Rows of [T, ...] by their int64 numbers [R], each from 0 to T - 1: [R, ...]."""
        ...

    def run_pass(self, compute: Compute, context: object, *inputs: torch.Tensor) -> torch.Tensor:
        """``compute(context, *inputs)``; the result holds until the next call, or sleep.

        Its Python need not run again for inputs of sizes that were there before: hooks on modules
        within see the first such pass only.

        Args:
            compute: depends on context, inputs and weights, and on nothing else.
            context: what attention knows of the step, say.
            inputs: [T, ...] each, T the number of tokens; they may be overwritten.
        """
        ...

    def rotate(
        self,
        x_THD: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Rotate every pair (i, i + D/2), or (2i, 2i + 1), of each head by its position's angle;
        `x_THD` may be overwritten. Sines are signed, see `RotaryEmbedding`."""
        ...


LinearKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Gating = Callable[[torch.Tensor], torch.Tensor]


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """See `LayerOps.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gated_by_rows(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gated`, with bits that do not depend on how many rows there are.

    torch's silu rounds differently where a vector register is not filled, so an element's bits
    depend on where it lies; its exponential does not.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype).mul_(up)


@dataclass(frozen=True, slots=True)
class TorchOps:
    """`LayerOps` on any device; how products and gates are computed can be chosen."""

    linear: LinearKernel = functional.linear
    gated: Gating = gated

    def heads_linear(self, x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        if self.linear is functional.linear:
            return torch.einsum("thi,hoi->tho", x_THI, weight_HOI)
        heads = (self.linear(x, w, None) for x, w in zip(x_THI.unbind(1), weight_HOI, strict=True))
        return torch.stack(tuple(heads), dim=1)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        return self.linear(hidden, weight, None).float()

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        """See `LayerOps`."""
        if x.dtype == torch.float32:
            return functional.rms_norm(x, gain.shape, gain, eps)
        return normalise(x, eps).mul_(gain)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerOps`."""
        residual = residual + x
        return self.rms_norm(residual, gain, eps), residual

    def linear_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `LayerOps`."""
        return self.gated(self.linear(x, weight, bias))

    def take_rows(self, x_TX: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        return x_TX.index_select(0, rows_R)

    def run_pass(self, compute: Compute, context: object, *inputs: torch.Tensor) -> torch.Tensor:
        """See `LayerOps`."""
        return compute(context, *inputs)

    def rotate(
        self,
        x_THD: torch.Tensor,
        cos_T1D: torch.Tensor,
        sin_T1D: torch.Tensor,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """See `LayerOps`."""
        if interleaved:
            partners = x_THD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            lower, upper = x_THD.chunk(2, dim=-1)
            partners = torch.cat((upper, lower), dim=-1)
        return (x_THD * cos_T1D).add_(partners.mul_(sin_T1D))


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x)`` along the last dimension: computed in float32, a new tensor of x's dtype."""
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class OpsModule(nn.Module):
    """A module that computes with operations that can be replaced, see `use_ops`."""

    ops: LayerOps

    def __init__(self) -> None:
        super().__init__()
        self.ops = TorchOps()


def use_ops(module: nn.Module, ops: LayerOps) -> None:
    """Let everything within a module compute with these operations."""
    for part in module.modules():
        if isinstance(part, OpsModule):
            part.ops = ops
