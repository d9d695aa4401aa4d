"""Which tokens ``min_p``, ``top_k`` and ``top_p`` leave to draw from.

Shape letters: V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torpor.params import SamplingParams

_ROUNDING = 1e-12
"""Relative; a sum of probabilities this close below ``top_p`` has reached it."""
_BUCKETS_PER_NAT = 32.0
_NUM_BUCKETS = 2048
"""Buckets reach 64 nats below the likeliest token; all that is less likely shares the last one."""


def surviving_ids(
    scores_V: NDArray[np.float64], params: SamplingParams
) -> NDArray[np.int64] | None:
    """Ids that may be drawn, rising, [C]; None for all. The likeliest always stays.

    ``min_p`` and ``top_k`` keep what is likely enough by itself; ``top_p`` then looks at the
    probabilities of what they left. Equal scores at an edge are kept by lower id.

    Args:
        scores_V: penalties and temperature applied.
        params: of the request; greedy ones have no filters.
    """
    ids_C: NDArray[np.int64] | None = None
    scores_C = scores_V
    if 0 < params.top_k < len(scores_V):
        ids_C = top_ids(scores_V, params.top_k)
        scores_C = scores_V[ids_C]
    if params.min_p > 0.0:
        floor = float(scores_C.max()) + math.log(params.min_p)
        ids_C = _selected(ids_C, scores_C >= floor)
        scores_C = scores_V[ids_C]
    if params.top_p < 1.0:
        ids_C = _selected(ids_C, _nucleus(scores_C, params.top_p))
    return ids_C


def top_ids(scores_V: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The ``count`` ids, at most V, of the highest scores, equal ones by lower id; ids rising."""
    if count == len(scores_V):
        return np.arange(count)
    # torch selects several times faster than NumPy's partition.
    edge = float(torch.from_numpy(scores_V).topk(count, sorted=False).values.amin())
    ids: NDArray[np.int64] = (scores_V >= edge).nonzero()[0]
    if len(ids) == count:
        return ids
    is_edge = scores_V[ids] == edge
    room = count - int((~is_edge).sum())
    kept: NDArray[np.int64] = ids[~is_edge | (is_edge.cumsum() <= room)]
    return kept


def _selected(ids_C: NDArray[np.int64] | None, keep_C: NDArray[np.bool_]) -> NDArray[np.int64]:
    indices: NDArray[np.int64] = keep_C.nonzero()[0]
    return indices if ids_C is None else ids_C[indices]


def _nucleus(scores_C: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Mask [C] of the smallest set of likeliest tokens whose probabilities reach ``top_p``.

    A token stays if the sum before it is below ``top_p``. Only one bucket of similar scores needs
    sorting: whole buckets before it stay, whole buckets after it go.
    """
    gap_C = scores_C.max() - scores_C
    weights_C = np.exp(-gap_C)
    gap_C *= _BUCKETS_PER_NAT
    np.minimum(gap_C, _NUM_BUCKETS - 1, out=gap_C)
    bucket_C = gap_C.astype(np.int64)
    sums = np.bincount(bucket_C, weights_C, minlength=_NUM_BUCKETS).cumsum()
    # sums[b] is the weight up to and with bucket b: the edge is the first that reaches the bound.
    bound = top_p * sums[-1] * (1.0 - _ROUNDING)
    edge = int(np.searchsorted(sums, bound))
    keep_C: NDArray[np.bool_] = bucket_C < edge
    indices = (bucket_C == edge).nonzero()[0]
    # Stable, so that equal ones are kept by id.
    order = np.argsort(-weights_C[indices], kind="stable")
    before = np.zeros(len(indices))
    before[1:] = weights_C[indices][order].cumsum()[:-1]
    if edge > 0:
        before += sums[edge - 1]
    keep_C[indices[order[before < bound]]] = True
    return keep_C
