"""A manager over a small pool, and requests to put through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torpor.cache.manager import Epochs, KVCacheManager
from torpor.cache.spec import KVSpec

SECRET = bytes(range(32))
BLOCK_SIZE = 4


def spec(
    *, block_size: int = BLOCK_SIZE, window: int | None = None, dtype: str = "float32"
) -> KVSpec:
    return KVSpec(
        block_size=block_size,
        num_kv_heads=2,
        k_dim=8,
        v_dim=6,
        dtype=dtype,
        itemsize=4,
        window=window,
    )


class Rig:
    """A manager whose epochs a test moves by hand, and what ``on_free`` was told."""

    def __init__(
        self,
        num_blocks: int = 9,
        *,
        block_size: int = BLOCK_SIZE,
        window: int | None = None,
        enable_prefix_caching: bool = True,
        clear_fresh: bool = False,
        on_free: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.epochs = Epochs(weights=1, kv=1)
        self.dead: list[int] = []
        self.manager = KVCacheManager(
            [spec(block_size=block_size, window=window)] * 3,
            num_blocks,
            epochs=lambda: self.epochs,
            enable_prefix_caching=enable_prefix_caching,
            clear_fresh=clear_fresh,
            on_free=on_free or self.dead.extend,
            secret=SECRET,
        )

    def start(
        self, name: str, token_ids: list[int], *, adapter: str = "", salt: str = ""
    ) -> list[int]:
        """Add a request, give it what is cached and blocks for the rest; returns its table."""
        self.manager.add(name, token_ids, adapter=adapter, salt=salt)
        return self.admit(name, len(token_ids))

    def admit(self, name: str, num_tokens: int) -> list[int]:
        match = self.manager.match_prefix(name)
        assert self.manager.allocate(name, num_tokens, match)
        return self.manager.table(name)

    def run(
        self, name: str, token_ids: list[int], *, adapter: str = "", salt: str = ""
    ) -> list[int]:
        """Put a request through to its end; returns the table it had."""
        table = self.start(name, token_ids, adapter=adapter, salt=salt)
        self.manager.register(name, len(token_ids))
        self.manager.remove(name)
        return table

    def hit(self, token_ids: list[int], *, adapter: str = "", salt: str = "") -> int:
        """How many tokens a new request would find in the cache."""
        self.manager.add("probe", token_ids, adapter=adapter, salt=salt)
        match = self.manager.match_prefix("probe")
        self.manager.remove("probe")
        return match.num_tokens
