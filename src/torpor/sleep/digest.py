"""The local digest: xxh3-128 over raw bytes, taken at every sleep and compared at every wake.

It only has to agree with itself on this machine; the digest that travels is in ``portable``. One
thread is enough: it reads at the speed of memory, and a second thread gains a sixth at most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


def local_digest(buffer: Buffer) -> str:
    """Digest of a C-contiguous buffer's bytes: 128 bits as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(buffer)


def local_digests(ranges: Iterable[tuple[int, int]]) -> list[str]:
    """Digest of each (address, nbytes) range, in order. The memory must be readable."""
    return [
        local_digest((ctypes.c_ubyte * nbytes).from_address(address)) for address, nbytes in ranges
    ]


def local_digest_of_parts(parts: Iterable[Buffer]) -> str:
    """The same digest for bytes that come in several buffers, one after the other."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()
