"""A rank holds its part of each tensor, and loads, sleeps, wakes and answers for that part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sleep.conftest import SleeperMaker
from tests.sleep.kit import FileSource, MemorySource
from torch import nn

from torpor.errors import ArgumentError, WeightsError, WeightsMismatchError
from torpor.sleep.portable import portable_tensor_digest
from torpor.sleep.shards import (
    FIRST_RANK_ONLY,
    REPLICATED,
    Block,
    Shard,
    ShardRule,
    TensorParallel,
)
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import SliceTable, WeightSlice

WIDTH = 3
QKV = ShardRule(blocks=(Block("head", 4, 2), Block("kv_head", 2, 2), Block("kv_head", 2, 1)))
TABLE = SliceTable(
    [
        WeightSlice(name="tokens", parameter="tokens", rule=ShardRule(blocks=(Block("token", 5),))),
        WeightSlice(name="qkv", parameter="qkv", rule=QKV),
        WeightSlice(
            name="up",
            parameter="fused",
            length=8,
            rule=ShardRule(blocks=(Block("column", 8),)),
        ),
        WeightSlice(name="latent", parameter="fused", start=8, length=2),
        WeightSlice(
            name="out", parameter="out", rule=ShardRule(dim=1, blocks=(Block("head", 4, 2),))
        ),
        WeightSlice(name="bias", parameter="bias", rule=FIRST_RANK_ONLY),
        WeightSlice(
            name="sinks", parameter="sinks", rule=ShardRule(dim=1, blocks=(Block("kv_head", 2),))
        ),
    ],
    ignored=["dropped"],
)


class Part(nn.Module):
    """What one rank holds of a model with those tensors."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        heads, kv_heads = 4 // tp.size, max(2 // tp.size, 1)
        shapes: dict[str, Sequence[int]] = {
            "tokens": (-(-5 // tp.size), WIDTH),
            "qkv": (2 * heads + 3 * kv_heads, WIDTH),
            "fused": (8 // tp.size + 2, WIDTH),
            "out": (WIDTH, 2 * heads),
            "sinks": (6, kv_heads, 2),
        }
        if tp.rank == 0:
            shapes["bias"] = (WIDTH,)
        for name, shape in shapes.items():
            empty = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            self.register_parameter(name, empty)


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "tokens": (5, WIDTH),
        "qkv": (14, WIDTH),
        "up": (8, WIDTH),
        "latent": (2, WIDTH),
        "out": (WIDTH, 8),
        "bias": (WIDTH,),
        "sinks": (6, 2, 2),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def parts_of(whole: dict[str, torch.Tensor], tp: TensorParallel) -> dict[str, torch.Tensor]:
    """What the parameters of a rank must hold; of 2 or 4 ranks, spelled out."""
    r, n = tp.rank, tp.size
    q, k, v = whole["qkv"].split([8, 4, 2])
    kv_head = slice(r, r + 1) if n == 2 else slice(r // 2, r // 2 + 1)
    qkv = [
        q.chunk(n)[r],
        k.view(2, 2, WIDTH)[kv_head].flatten(0, 1),
        v.view(2, 1, WIDTH)[kv_head].flatten(0, 1),
    ]
    per_rank = {2: 3, 4: 2}[n]
    tokens = torch.cat((whole["tokens"], torch.zeros(per_rank * n - 5, WIDTH)))
    made = {
        "tokens": tokens[r * per_rank : (r + 1) * per_rank],
        "qkv": torch.cat(qkv),
        "fused": torch.cat((whole["up"].chunk(n)[r], whole["latent"])),
        "out": whole["out"].chunk(n, dim=1)[r],
        "sinks": whole["sinks"][:, kv_head],
    }
    return made if r else {**made, "bias": whole["bias"]}


def check(module: nn.Module, whole: dict[str, torch.Tensor], tp: TensorParallel) -> None:
    want, found = parts_of(whole, tp), dict(module.named_parameters())
    assert want.keys() == found.keys()
    for name, part in want.items():
        assert torch.equal(found[name], part), name


each_rank = pytest.mark.parametrize(
    "tp", [TensorParallel(rank, size) for size in (2, 4) for rank in range(size)], ids=str
)


def loaded(
    tp: TensorParallel, source: Any, sleeper_for: SleeperMaker, **options: Any
) -> tuple[Part, Sleeper]:
    module = Part(tp)
    sleeper = sleeper_for(module, reload=source, slices=TABLE.for_rank(tp), **options)
    sleeper.reload_weights()
    return module, sleeper


@each_rank
@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_holds_its_part_and_gets_it_back(
    tmp_path: Path, sleeper_for: SleeperMaker, pattern: int, tp: TensorParallel, level: int
) -> None:
    whole = checkpoint()
    source = FileSource(tmp_path / "w.safetensors", whole)
    module, sleeper = loaded(tp, source, sleeper_for, poison=pattern)
    check(module, whole, tp)
    for _ in range(2):
        sleeper.sleep(level=level)
        sleeper.wake_up()
        if level == 2:
            sleeper.reload_weights()
        check(module, whole, tp)
    assert not sleeper.verify().differing


@each_rank
def test_an_update_brings_whole_tensors_and_a_rank_takes_its_part(
    sleeper_for: SleeperMaker, tp: TensorParallel
) -> None:
    module, sleeper = loaded(tp, MemorySource(checkpoint()), sleeper_for)
    sleeper.update_weights({**checkpoint(1), "dropped": torch.zeros(1)})
    check(module, checkpoint(1), tp)
    with pytest.raises(WeightsMismatchError, match=r"shape \(3, 4\); the model needs \(3, 8\)"):
        sleeper.update_weights({"out": torch.zeros(WIDTH, 4)})
    check(module, checkpoint(1), tp)


def test_a_rank_reads_no_more_than_its_part(sleeper_for: SleeperMaker) -> None:
    module, sleeper = loaded(TensorParallel(1, 2), MemorySource(checkpoint()), sleeper_for)
    other = checkpoint(1)
    other["up"][:4] = float("nan")  # Of rank 0, which refuses it.
    sleeper.update_weights(other)
    assert torch.equal(module.fused[:4], other["up"][4:])
    other["up"][4:] = float("nan")
    with pytest.raises(WeightsError, match="'up' contains NaN"):
        sleeper.update_weights(other)


@each_rank
def test_runs_of_rows_are_kept_in_the_checkpoint_itself(
    tmp_path: Path, sleeper_for: SleeperMaker, tp: TensorParallel
) -> None:
    source = FileSource(tmp_path / "w.safetensors", checkpoint())
    _, sleeper = loaded(tp, source, sleeper_for)
    kept = {row.name: row.host_copy for row in sleeper.table()}
    padded = tp.rank * -(-5 // tp.size) + -(-5 // tp.size) > 5
    assert kept["tokens"] == (None if padded else "checkpoint")
    assert kept["qkv"] == kept["fused"] == "checkpoint"
    # Columns lie scattered in a file.
    assert kept["out"] is kept["sinks"] is None


@each_rank
def test_a_rank_answers_for_its_part_by_a_name_that_says_which(
    sleeper_for: SleeperMaker, tp: TensorParallel
) -> None:
    whole = checkpoint()
    _, sleeper = loaded(tp, MemorySource(whole), sleeper_for)
    digests = sleeper.digests(portable=True)
    assert digests["latent"] == portable_tensor_digest(whole["latent"])
    parts = parts_of(whole, tp)
    columns = 8 // tp.size
    label = f"{columns * tp.rank}:{columns * (tp.rank + 1)}"
    assert digests[f"out[:, {label}]"] == portable_tensor_digest(parts["out"])
    assert digests[f"up[{label}]"] == portable_tensor_digest(parts["fused"][:columns])
    kv_head = tp.rank // (tp.size // 2)
    assert digests[f"sinks[:, {kv_head}:{kv_head + 1}]"] == portable_tensor_digest(parts["sinks"])
    rows = min(-(-5 // tp.size), max(0, 5 - tp.rank * -(-5 // tp.size)))
    first = 5 - rows if rows < -(-5 // tp.size) else tp.rank * rows
    tokens = f"tokens[{first}:{first + rows}]"
    assert digests[tokens] == portable_tensor_digest(parts["tokens"][:rows])
    assert ("bias" in digests) == (tp.rank == 0)


def test_a_bias_that_is_added_once_belongs_to_the_first_rank() -> None:
    assert "bias" in TABLE.for_rank(TensorParallel(0, 2))
    other = TABLE.for_rank(TensorParallel(1, 2))
    assert "bias" not in other
    assert other.ignores("bias")
    assert other.ignores("dropped")


def test_one_rank_has_the_table_as_it_is() -> None:
    assert TABLE.for_rank(TensorParallel()) is TABLE
    assert QKV.shard(TensorParallel()) is None
    assert REPLICATED.shard(TensorParallel(1, 2)) is None


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 0, "tensor_parallel_size is 0; give a whole number of at least 1"),
        (0, -1, "tensor_parallel_size is -1"),
        (0, True, "tensor_parallel_size is True"),
        (0, "2", "tensor_parallel_size is '2'"),
        (2, 2, "rank is 2; with tensor_parallel_size 2 give a whole number from 0 to 1"),
        (-1, 2, "rank is -1"),
        (0.0, 2, "rank is 0.0"),
    ],
)
def test_a_rank_that_cannot_be_is_refused(rank: Any, size: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TensorParallel(rank, size)


@pytest.mark.parametrize(
    ("block", "size"), [(Block("head", 6), 4), (Block("column", 5), 2), (Block("kv_head", 4), 6)]
)
def test_units_that_ranks_do_not_divide_are_refused(block: Block, size: int) -> None:
    with pytest.raises(ArgumentError, match=f"tensor_parallel_size is {size}, which does not"):
        ShardRule(blocks=(block,)).shard(TensorParallel(0, size))


def shards(rule: ShardRule, size: int) -> list[Shard]:
    found = [rule.shard(TensorParallel(rank, size)) for rank in range(size)]
    return [shard for shard in found if shard is not None]


def uses(rule: ShardRule, size: int) -> list[list[int]]:
    """For each element of the whole dimension the ranks that hold it."""
    total = sum(block.count * block.width for block in rule.blocks)
    found: list[list[int]] = [[] for _ in range(total)]
    for rank, shard in enumerate(shards(rule, size)):
        assert shard.size == total
        for start, length in shard.ranges:
            for at in range(start, start + length):
                found[at].append(rank)
    return found


SIZES, WIDTHS = st.integers(2, 9), st.integers(1, 5)


@given(SIZES, st.integers(1, 5), WIDTHS)
def test_heads_and_columns_are_on_one_rank_each(size: int, per_rank: int, width: int) -> None:
    rule = ShardRule(blocks=(Block("head", size * per_rank, width),))
    assert uses(rule, size) == [[at // (per_rank * width)] for at in range(size * per_rank * width)]
    assert {shard.length for shard in shards(rule, size)} == {per_rank * width}


@given(SIZES, st.integers(1, 40))
def test_tokens_are_on_one_rank_each_and_ranks_alike_with_padding(size: int, count: int) -> None:
    rule = ShardRule(blocks=(Block("token", count),))
    per_rank = -(-count // size)
    assert uses(rule, size) == [[at // per_rank] for at in range(count)]
    found = shards(rule, size)
    assert {shard.length for shard in found} == {per_rank}
    assert sum(shard.padding for shard in found) == per_rank * size - count


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.booleans(), WIDTHS, WIDTHS)
def test_query_heads_are_where_their_kv_head_is(
    few: int, factor: int, group: int, more_ranks: bool, k_dim: int, v_dim: int
) -> None:
    size, kv_heads = (few * factor, few) if more_ranks else (few, few * factor)
    heads = kv_heads * group * (factor if more_ranks else 1)
    if size == 1:
        return
    blocks = Block("head", heads, k_dim), Block("kv_head", kv_heads, k_dim)
    rule = ShardRule(blocks=(*blocks, Block("kv_head", kv_heads, v_dim)))
    found = uses(rule, size)
    q, k = found[: heads * k_dim : k_dim], found[heads * k_dim :: k_dim][:kv_heads]
    v = found[(heads + kv_heads) * k_dim :: v_dim]
    sinks = uses(ShardRule(dim=1, blocks=(Block("kv_head", kv_heads),)), size)
    assert k == v == sinks
    assert {len(ranks) for ranks in k} == {factor if more_ranks else 1}
    for head, ranks in enumerate(q):
        assert len(ranks) == 1
        assert ranks[0] in k[head // (heads // kv_heads)]
