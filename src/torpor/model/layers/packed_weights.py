"""Weights in oneDNN's own layout, beside the real ones: faster where few rows decode.

oneDNN multiplies by weights in blocks of its own shape. Given plain ones it makes the blocks anew
in every call; made once and kept they cost as much memory as the weights. They are a cache and
nothing more: made from valid weights when a batch first needs them, thrown away when the weights'
epoch moves and before a sleep, never restored and never official.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torpor.model.machine.cpu_features import cpu_has_bfloat16_products

MAX_ROWS = 128
"""With more, making the blocks is no longer what takes the time."""
MIN_SEQUENCES = 3
"""Sequences in a step from which on it is a batch that decodes: a single caller's prompts are not
worth the memory."""

_ROWS_HINT = 16
"""What the blocks are shaped for; one number, so that bits depend on nothing else."""

Declare = Callable[[Sequence[torch.Tensor]], None]
"""Names tensors to whoever keeps the books of memory."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have such products for weights of a dtype."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops, "mkldnn")):
        return False
    wanted = ("_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(torch.ops.mkldnn, name) for name in wanted):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_has_bfloat16_products())


class PackedWeights:
    """The packed copies of one model's weights."""

    def __init__(self, dtype: torch.dtype, *, epoch: Callable[[], int], declare: Declare) -> None:
        """Start with none.

        Args:
            dtype: of the weights.
            epoch: of the weights as they are now; asked at each step.
            declare: called with new copies at the end of the step that made them.
        """
        self._min_rows = 3 if dtype == torch.float32 else 2
        self._current_epoch = epoch
        self._declare = declare
        self._packed: dict[tuple[int, int], torch.Tensor] = {}
        """By address and first dimension: weights never move."""
        self._new: list[torch.Tensor] = []
        self._epoch: int | None = None
        self._is_batch = False

    @property
    def nbytes(self) -> int:
        """Memory of all copies, about."""
        return sum(packed.numel() * packed.dtype.itemsize for packed in self._packed.values())

    def begin(self, num_sequences: int) -> None:
        """Prepare for a step. Whether it uses copies depends on the step alone, never on what ran
        before: the same schedule has the same bits after a sleep."""
        epoch = self._current_epoch()
        if epoch != self._epoch:
            self.drop()
            self._epoch = epoch
        self._is_batch = num_sequences >= MIN_SEQUENCES

    def end(self) -> None:
        """Declare what the step made."""
        if self._new:
            new, self._new = self._new, []
            self._declare(new)

    def drop(self) -> None:
        """Give the memory back; the next batch makes the copies anew."""
        self._packed.clear()
        self._new.clear()
        self._epoch = None

    def serves(self, num_rows: int) -> bool:
        """Whether a product of so many rows is to use a copy."""
        return self._is_batch and self._min_rows <= num_rows <= MAX_ROWS

    def product(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T`` [T, O] by the weight's copy, made now if there is none."""
        key = (weight_OI.data_ptr(), weight_OI.shape[0])
        packed = self._packed.get(key)
        if packed is None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
            self._packed[key] = packed
            self._new.append(packed)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, None, "none", [], "")
        return out
