"""Small operations on the CPU by the calling thread alone.

torch shares even a few hundred elements among threads of its own. Those spin for milliseconds after
it, on the processors that the threads of the compiled kernels need: where there are as many threads
as processors, each such operation costs a step more than all else that is not a product.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: numpy does not know every dtype that weights have, and copying needs no more."""


def cos_sin(positions_T: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 angles, as checkpoints are trained.

    Args:
        positions_T: int64 positions [T].
        inv_freq: float32 frequencies [F].

    Returns:
        float32 [T, F] each; on the CPU rounded from float64.
    """
    if positions_T.device.type != "cpu":
        angles = torch.outer(positions_T.float(), inv_freq)
        return angles.cos(), angles.sin()
    exact = np.outer(positions_T.numpy().astype(np.float32), inv_freq.numpy()).astype(np.float64)
    cos, sin = (function(exact).astype(np.float32) for function in (np.cos, np.sin))
    return torch.from_numpy(cos), torch.from_numpy(sin)


def take_rows(weight: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Rows [T, D] of a matrix [N, D] by int64 ids [T], each from 0 to N - 1."""
    if weight.device.type != "cpu" or weight.numel() == 0:
        return functional.embedding(ids_T, weight)
    whole = weight.detach().view(_INTEGERS[weight.itemsize]).numpy()
    return torch.from_numpy(whole.take(ids_T.numpy(), axis=0)).view(weight.dtype)
