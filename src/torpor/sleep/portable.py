"""The portable digest: 128 bits per tensor that mean the same on every device, rank and host.

It is a sum over words, so a GPU can take it in any order and in one launch. It finds damage; it is
no defence against a forger.

Definition. All arithmetic is on unsigned 64-bit integers and wraps; ``>>`` shifts in zeros.

1. The tensor's logical bytes, row-major and without gaps, are padded with zero bytes to a multiple
   of 8 and read as little-endian words w[0] .. w[n-1].
2. There are two lanes, each with its own odd constants (P, A, B):

       lane 0:  9e3779b97f4a7c15  bf58476d1ce4e5b9  94d049bb133111eb
       lane 1:  d6e8feb86659fd93  ff51afd7ed558ccd  c4ceb9fe1a85ec53

3. mix(x), a bijection of two multiply-xorshift rounds (the finaliser of SplitMix64; Steele, Lea and
   Flood 2014):

       x ^= x >> 30;  x *= A;  x ^= x >> 27;  x *= B;  x ^= x >> 31

4. A lane's sum is S = mix(w[0] + P) + mix(w[1] + 2 P) + ... + mix(w[n-1] + n P).
5. The lane is closed with H = mix(S), then H = mix(H + P * m) for each m of: the number of bytes,
   then the words of the dtype's name in ASCII ("bfloat16"), padded and read as in step 1.
6. The digest is H of lane 0 and H of lane 1, each as 16 lower-case hex digits, lane 0 first.

One round is not enough: the difference that a flipped sign bit makes then takes few values, so two
flips often cancel (a test shows it). A kernel need only compute the two sums; ``close_lanes`` does
the rest.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from torpor.errors import ArgumentError

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

CHUNK_WORDS = 65_536
"""Words per pass: fewer pay for more calls, more gain nothing (measured)."""

_MASK = (1 << 64) - 1
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True, slots=True)
class Lane:
    """The constants of one lane."""

    position: int
    """P, which keys each word by its place."""
    first: int
    """A, the multiplier of the first round."""
    second: int
    """B, the multiplier of the second round."""


LANES = (
    Lane(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    Lane(0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)


def portable_digest(data: Bytes, dtype_name: str) -> str:
    """Digest of a tensor's bytes.

    Args:
        data: uint8 array of one dimension, contiguous, the tensor's row-major bytes; any alignment.
        dtype_name: torch's name of the dtype without the prefix, such as ``bfloat16``.

    Returns:
        32 hex digits. They differ for equal bytes of another length or dtype.

    Raises:
        ArgumentError: the array is not one contiguous run of bytes, or the name is not ASCII.
    """
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ArgumentError(
            f"the digest needs a contiguous uint8 array of one dimension, not {data.dtype} of "
            f"shape {data.shape}; pass np.ascontiguousarray(x).reshape(-1).view(np.uint8)"
        )
    return close_lanes(lane_sums(data), data.size, dtype_name)


def portable_tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's values as they are stored, whatever its strides and device.

    The tensor keeps its storage as it is: nothing is exported to numpy, so it can still be adopted.

    Raises:
        ArgumentError: the tensor is on the meta device or sparse: it has no bytes of its own.
    """
    if tensor.is_meta or tensor.layout != torch.strided:
        raise ArgumentError(
            f"a {tensor.layout} tensor on {tensor.device} has no plain bytes to digest; "
            "pass a dense tensor with content"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    nbytes = plain.numel() * plain.element_size()
    memory = memoryview((ctypes.c_ubyte * nbytes).from_address(plain.data_ptr()))
    data = np.frombuffer(memory, dtype=np.uint8)
    return portable_digest(data, str(tensor.dtype).removeprefix("torch."))


def lane_sums(data: Bytes) -> tuple[int, ...]:
    """The sum of each lane over the words of a contiguous uint8 array (steps 1 to 4)."""
    whole = data.size // 8
    words = data[: whole * 8].view("<u8")
    sums = _sums_over(words)
    if tail := data[whole * 8 :].tobytes():
        word = int.from_bytes(tail, "little")
        sums = [
            total + _mix(word + (whole + 1) * lane.position, lane)
            for total, lane in zip(sums, LANES, strict=True)
        ]
    return tuple(total & _MASK for total in sums)


def _sums_over(words: Words) -> list[int]:
    size = min(CHUNK_WORDS, words.size)
    mixed, scratch = np.empty(size, np.uint64), np.empty(size, np.uint64)
    keys = [position_keys(size, lane) for lane in LANES]
    sums = [0] * len(LANES)
    for start in range(0, words.size, CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        for index, lane in enumerate(LANES):
            part = mixed[: chunk.size]
            np.add(chunk, keys[index][: chunk.size], out=part)
            part += np.uint64(start * lane.position & _MASK)
            mix_in_place(part, lane, scratch[: chunk.size])
            sums[index] += int(part.sum(dtype=np.uint64))
    return sums


def position_keys(count: int, lane: Lane) -> Words:
    """The keys P, 2 P, ... of the first ``count`` words."""
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(lane.position)


def mix_in_place(x: Words, lane: Lane, scratch: Words) -> None:
    """Replace every x by mix(x). ``scratch`` has the shape of ``x`` and is overwritten."""
    for shift, factor in zip(_SHIFTS, (lane.first, lane.second, None), strict=True):
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        if factor is not None:
            x *= np.uint64(factor)


def close_lanes(sums: tuple[int, ...], nbytes: int, dtype_name: str) -> str:
    """The digest from the sums of the lanes, the tensor's bytes and its dtype (steps 5 and 6).

    Raises:
        ArgumentError: the dtype's name is empty or not ASCII.
    """
    if not dtype_name or not dtype_name.isascii():
        raise ArgumentError(f"dtype name {dtype_name!r}: pass torch's name, such as 'float32'")
    name = dtype_name.encode("ascii")
    words = [int.from_bytes(name[at : at + 8], "little") for at in range(0, len(name), 8)]
    closed = []
    for total, lane in zip(sums, LANES, strict=True):
        state = _mix(total, lane)
        for word in (nbytes, *words):
            state = _mix(state + lane.position * word, lane)
        closed.append(f"{state:016x}")
    return "".join(closed)


def _mix(x: int, lane: Lane) -> int:
    x &= _MASK
    x = (x ^ x >> 30) * lane.first & _MASK
    x = (x ^ x >> 27) * lane.second & _MASK
    return x ^ x >> 31
