"""Noise as a hash of (seed, position, vocabulary index), and the draw that uses it.

There is no generator state: the noise for vocabulary index i at position p is a hash of (seed, p,
i). So nothing has to be saved across sleep, and a repeated step repeats its token. A token is drawn
by the Gumbel-max rule (Gumbel 1954): argmax over i of ``score_i + g_i`` with independent standard
Gumbel g_i is distributed as softmax(score).

Shape letters: C candidates, N any number of indices.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# The increment and multipliers of splitmix64 (Steele, Lea, Flood 2014; mixer 13 of D. Stafford).
GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

_COARSE_BITS = 23
"""With half a step added, so many bits still are exact in float32."""
_TOP_CELL = (1 << _COARSE_BITS) - 1
_MARGIN = 2.0
"""How far below the best coarse score the true winner can lie, see ``gumbel_argmax``."""


def gumbel_argmax(
    scores_C: NDArray[np.float64],
    seed: int,
    position: int,
    ids_C: NDArray[np.int64] | None = None,
) -> int:
    """The index into ``scores_C`` of the largest ``score + gumbel``; equal ones by index.

    A pure function of the arguments. Scores are taken below the largest one, so that neither size
    nor rounding of the scores hides the noise. Noise is computed coarsely for all candidates, in
    float32 from the top 23 bits of each hash, and in float64 only for those whose coarse sum lies
    within a margin of the best. Coarse Gumbel noise is at most 0.81 too high and 0.41 too low,
    except in the topmost cell, where the true value has no such bound: candidates there always go
    to the second round.

    Args:
        scores_C: logits, penalties and temperature applied; at least one above -inf.
        seed: any integer; taken modulo 2**64.
        position: index in the sequence, prompt included, that the token will take.
        ids_C: vocabulary indices of the candidates; None for 0 to C-1.
    """
    if ids_C is None:
        ids_C = np.arange(len(scores_C))
    cell_C = _hash(seed, position, ids_C)
    cell_C >>= np.uint64(64 - _COARSE_BITS)
    below_C = scores_C - scores_C.max()
    coarse_C = _coarse_gumbel(cell_C)
    with np.errstate(over="ignore"):
        coarse_C += below_C.astype(np.float32)
    close_C = coarse_C >= coarse_C.max() - _MARGIN
    if cell_C.max() == _TOP_CELL:
        close_C |= cell_C == _TOP_CELL
    indices = close_C.nonzero()[0]
    exact = [
        below + _gumbel(seed, position, token_id)
        for token_id, below in zip(ids_C[indices].tolist(), below_C[indices].tolist(), strict=True)
    ]
    return int(indices[exact.index(max(exact))])


def gumbel_noise(seed: int, position: int, ids_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise [N], a pure function of (seed, position, index)."""
    return -np.log(-np.log(uniform_noise(seed, position, ids_N)))


def uniform_noise(seed: int, position: int, ids_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform noise [N] in the open interval (0, 1), from the top 52 bits of a hash."""
    bits_N = _hash(seed, position, ids_N) >> np.uint64(12)
    # Half a step off the grid keeps 0 and 1 out; with 52 bits the sum is exact in float64.
    return (bits_N.astype(np.float64) + 0.5) * 2.0**-52


def mix(value: int) -> int:
    """The output function of splitmix64 on one integer modulo 2**64."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _key(seed: int, position: int) -> int:
    return mix(mix(seed) + (position + 1) * GAMMA)


def _gumbel(seed: int, position: int, token_id: int) -> float:
    bits = mix(_key(seed, position) + (token_id + 1) * GAMMA) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def _coarse_gumbel(cell_C: NDArray[np.uint64]) -> NDArray[np.float32]:
    noise_C = cell_C.astype(np.float32)
    noise_C += np.float32(0.5)
    noise_C *= np.float32(2.0**-_COARSE_BITS)
    for _ in range(2):
        np.log(noise_C, out=noise_C)
        np.negative(noise_C, out=noise_C)
    return noise_C


def _hash(seed: int, position: int, ids_N: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The 64-bit hash of each index [N]; the same as ``mix`` gives."""
    state_N = ids_N.astype(np.uint64)
    state_N *= np.uint64(GAMMA)
    state_N += np.uint64((_key(seed, position) + GAMMA) & _MASK)
    spare_N = np.empty_like(state_N)
    for num_bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(state_N, np.uint64(num_bits), out=spare_N)
        state_N ^= spare_N
        state_N *= np.uint64(factor)
    np.right_shift(state_N, np.uint64(31), out=spare_N)
    state_N ^= spare_N
    return state_N
