"""Identity of cached blocks: a keyed hash chain over tokens, and the index from key to block.

A block's key covers every token up to the block's end and everything else that its content
depends on: both epochs, dtype, block size, adapter, salt. So a forgotten reset cannot give a hit,
and requests with different salts never meet.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torpor.errors import ArgumentError

KEY_BYTES = 16
"""Size of a block's key."""

_SECRET_BYTES = 32
_INT32 = next(code for code in "il" if array(code).itemsize == 4)


@dataclass(frozen=True, slots=True)
class Epochs:
    """What the content of a block was computed from; either number grows and never returns."""

    weights: int
    """Grows when the weights' content changes."""
    kv: int
    """Grows when the memory of the cache is dropped."""


class PrefixHasher:
    """Keys of blocks. Equal keys mean equal content, within one hasher."""

    def __init__(
        self, *, block_size: int, dtypes: Iterable[str], secret: bytes | None = None
    ) -> None:
        """Choose a secret, so that nobody outside can make two prompts collide on purpose.

        Args:
            block_size: tokens per block.
            dtypes: the stored dtype of each layer.
            secret: 32 bytes; random when None, which is what all but tests want.

        Raises:
            ArgumentError: the secret has another length.
        """
        if secret is None:
            secret = secrets.token_bytes(_SECRET_BYTES)
        if len(secret) != _SECRET_BYTES:
            raise ArgumentError(f"the secret has {len(secret)} bytes; give {_SECRET_BYTES}")
        self._block_size = block_size
        self._shape = [("block_size", b"%d" % block_size)]
        self._shape += [("dtype", dtype.encode()) for dtype in dtypes]
        # Started once and copied per block: that leaves out the keyed first round.
        self._seed = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=b"torpor kv seed")
        self._link = hashlib.blake2b(digest_size=KEY_BYTES, key=secret, person=b"torpor kv block")

    def seed(self, epochs: Epochs, adapter: str, salt: str) -> bytes:
        """The parent of a chain's first block: ``tag | length | value`` records, hashed.

        Tags keep an adapter called X and a salt X apart; lengths keep values apart.
        """
        records = [
            ("weights_epoch", b"%d" % epochs.weights),
            ("kv_epoch", b"%d" % epochs.kv),
            *self._shape,
            # A lone surrogate in a caller's salt is a string like any other.
            ("adapter", adapter.encode("utf-8", "surrogatepass")),
            ("salt", salt.encode("utf-8", "surrogatepass")),
        ]
        state = self._seed.copy()
        for tag, value in records:
            state.update(b"%s|%d|%s" % (tag.encode(), len(value), value))
        return state.digest()

    def extend(
        self, chain: list[bytes], seed: bytes, token_ids: Sequence[int], num_blocks: int
    ) -> None:
        """Grow ``chain`` to ``num_blocks`` keys, each over its parent and its block's token ids."""
        size = self._block_size
        tokens = array(_INT32, token_ids[len(chain) * size : num_blocks * size])
        octets = memoryview(tokens).cast("B")
        parent = chain[-1] if chain else seed
        start = self._link.copy
        for begin in range(0, len(octets), 4 * size):
            state = start()
            state.update(parent)
            state.update(octets[begin : begin + 4 * size])
            parent = state.digest()
            chain.append(parent)


class PrefixChain:
    """The keys of one request's full blocks, computed once and extended as the request grows."""

    def __init__(
        self, hasher: PrefixHasher, token_ids: Sequence[int], adapter: str, salt: str
    ) -> None:
        """Keep a reference to ``token_ids``, which may grow at its end and never change before."""
        self._hasher = hasher
        self._token_ids = token_ids
        self._adapter = adapter
        self._salt = salt
        self._epochs: Epochs | None = None
        self._seed = b""
        self._keys: list[bytes] = []

    def keys(self, num_blocks: int, epochs: Epochs) -> list[bytes]:
        """At least the first ``num_blocks`` keys under ``epochs``; do not change the list."""
        if epochs != self._epochs:
            self._epochs = epochs
            self._seed = self._hasher.seed(epochs, self._adapter, self._salt)
            self._keys = []
        if len(self._keys) < num_blocks:
            self._hasher.extend(self._keys, self._seed, self._token_ids, num_blocks)
        return self._keys


class PrefixIndex:
    """Which blocks hold which content. Several blocks may have one key; each block has one at most.

    Two requests that compute the same tokens at the same time fill two blocks with one key;
    the other stays when one goes.
    """

    def __init__(self, num_blocks: int) -> None:
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._more: dict[bytes, dict[int, None]] = {}
        """Further blocks of keys that have several, in the order they were added."""

    def __contains__(self, block: int) -> bool:
        return self._key_of[block] is not None

    def __iter__(self) -> Iterator[int]:
        """Every block that has a key."""
        return (block for block, key in enumerate(self._key_of) if key is not None)

    def get(self, key: bytes) -> int | None:
        """A block with that key."""
        return self._block_of.get(key)

    def longest_hit(self, keys: Sequence[bytes], run: int | None) -> tuple[int, list[int]]:
        """Find the longest start of a chain that can be reused.

        Args:
            keys: the chain, from its first block.
            run: how many blocks in a row, up to the end of the hit or from the chain's start, must
                be there; None for all.

        Returns:
            The position of the first block found, and the blocks from there to the hit's end.
        """
        blocks: list[int] = []
        if run is None:
            for key in keys:
                if (block := self._block_of.get(key)) is None:
                    break
                blocks.append(block)
            return 0, blocks
        for position in range(len(keys) - 1, -1, -1):
            if (block := self._block_of.get(keys[position])) is None:
                blocks.clear()
                continue
            blocks.append(block)
            if len(blocks) == run:
                return position, blocks[::-1]
        return 0, blocks[::-1]

    def key_of(self, block: int) -> bytes | None:
        """The key of a block, None when its content is not to be found by anybody."""
        return self._key_of[block]

    def add(self, block: int, key: bytes) -> None:
        """Make the block's content findable. It has no key yet (I4)."""
        assert self._key_of[block] is None, f"I4: block {block} has a key already"
        self._key_of[block] = key
        if self._block_of.setdefault(key, block) != block:
            self._more.setdefault(key, {})[block] = None

    def remove(self, block: int) -> bool:
        """Take the block's key away; False when it had none."""
        key = self._key_of[block]
        if key is None:
            return False
        self._key_of[block] = None
        more = self._more.get(key)
        if more is None:
            del self._block_of[key]
            return True
        if self._block_of[key] == block:
            block = self._block_of[key] = next(iter(more))
        del more[block]
        if not more:
            del self._more[key]
        return True

    def clear(self) -> list[int]:
        """Take every key away; returns the blocks that had one."""
        blocks = list(self)
        self._key_of = [None] * len(self._key_of)
        self._block_of.clear()
        self._more.clear()
        return blocks

    def check(self) -> None:
        """Assert that keys and blocks point at each other (I5)."""
        listed = [(block, key) for key, block in self._block_of.items()]
        for key, blocks in self._more.items():
            assert blocks, "I5: an empty list of further blocks"
            listed += [(block, key) for block in blocks]
        assert dict(listed) == {block: self._key_of[block] for block in self}, "I5: index and keys"
        assert len(listed) == len(dict(listed)), "I5: a block is listed twice"
