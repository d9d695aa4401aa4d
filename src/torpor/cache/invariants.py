"""What holds between tables and pool between any two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torpor.cache.pool import NULL_BLOCK, BlockPool
from torpor.cache.table import BlockTable


def check_tables(tables: Mapping[str, BlockTable], pool: BlockPool, block_size: int) -> None:
    """Assert I3, I4, I6 and I8; ``BlockPool.check`` does the others."""
    uses = Counter(block for table in tables.values() for block in table.held())
    for block in range(pool.num_blocks):
        found, counted = uses[block], pool.ref_count(block)
        assert found == counted, f"I3: block {block} is in {found} tables but counts {counted}"
    for request_id, table in tables.items():
        _check_entries(request_id, table)
        _check_keys(request_id, table, pool, block_size)


def _check_entries(request_id: str, table: BlockTable) -> None:
    skipped = table.block_ids[: table.num_skipped]
    held = table.held()
    assert set(skipped) <= {NULL_BLOCK}, f"I6: {request_id} skips blocks that it holds"
    assert NULL_BLOCK not in held, f"I6: {request_id} has a null block behind the skipped ones"
    assert len(set(held)) == len(held), f"I6: {request_id} has a block at two positions"
    assert table.num_registered <= len(table.block_ids), f"I6: {request_id} registers blocks twice"


def _check_keys(request_id: str, table: BlockTable, pool: BlockPool, block_size: int) -> None:
    registered = 0 if table.epochs is None else table.num_registered
    assert registered * block_size <= len(table.token_ids), f"I8: {request_id} has fewer tokens"
    keys = table.chain.keys(registered, table.epochs) if table.epochs is not None else []
    for position, block in enumerate(table.block_ids):
        key = pool.index.key_of(block)
        expected = keys[position] if position < registered else None
        # A block may have lost its key, never have another.
        assert key in (None, expected), f"I4: {request_id} has a wrong block at {position}"
