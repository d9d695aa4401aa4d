"""A token's bits do not depend on the other rows, on padding, or on chunking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.attention_reference import KINDS, World, attention_spec

from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionSpec
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.attention.torch_attention import TorchAttention

SPECS = {
    "grouped": attention_spec(heads=9, kv_heads=3, k_dim=64, v_dim=64),
    "windowed": attention_spec(heads=4, kv_heads=2, k_dim=32, v_dim=32, window=300),
    "narrow": attention_spec(heads=4, kv_heads=2, k_dim=32, v_dim=32, window=7),
    "uneven": attention_spec(heads=10, kv_heads=2, k_dim=24, v_dim=40),
    "one KV head": attention_spec(heads=2, kv_heads=1),
    "one wide KV head": attention_spec(heads=2, kv_heads=1, k_dim=256, v_dim=256),
    "many heads": attention_spec(heads=40, kv_heads=1),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def outputs(
    spec: AttentionSpec,
    lengths: Sequence[int],
    steps: Sequence[Sequence[tuple[int, int]]],
    *,
    row: int = 0,
    **options: object,
) -> torch.Tensor:
    """Everything one row gets over all steps, results and log-sum-exps, as bits."""
    world = World([spec], lengths, batch_invariant=True, **options)  # type: ignore[arg-type]
    parts = []
    for step in steps:
        out_THD, lse_TH = world.step(step)[0]
        start = 0
        for index, new in step:
            if index == row:
                both = torch.cat((out_THD.float(), lse_TH[..., None]), dim=-1)
                parts.append(both[start : start + new])
            start += new
    return torch.cat(parts).view(torch.int32)


def chunks(length: int, sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Steps of row 0 alone, with the sizes repeated."""
    steps: list[list[tuple[int, int]]] = []
    done = 0
    while done < length:
        new = min(sizes[len(steps) % len(sizes)], length - done)
        steps.append([(0, new)])
        done += new
    return steps


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_kind
def test_any_chunking_gives_the_same_bits(
    kind: str, spec: AttentionSpec, dtype: torch.dtype
) -> None:
    length = 600
    whole = outputs(spec, [length], chunks(length, [length]), dtype=dtype, kind=kind)
    for sizes in ([256], [100, 1, 33], [299]):
        parts = outputs(spec, [length], chunks(length, sizes), dtype=dtype, kind=kind)
        assert torch.equal(parts, whole)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@each_kind
def test_decode_gives_the_bits_of_prefill(kind: str, spec: AttentionSpec) -> None:
    length = 530
    whole = outputs(spec, [length], chunks(length, [length]), kind=kind)
    steps = [[(0, 500)], *([(0, 1)] for _ in range(30))]
    assert torch.equal(outputs(spec, [length], steps, kind=kind), whole)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@each_kind
def test_company_does_not_change_bits(kind: str, spec: AttentionSpec) -> None:
    length = 290
    alone = outputs(spec, [length], chunks(length, [length]), kind=kind)
    lengths = [length, 1, 270, 40, 600, 257]
    fill = [(4, 590), (0, 250), (2, 230), (3, 10), (5, 217)]
    others = [(2, 1), (3, 1), (4, 1), (5, 1)]
    steps = [fill, [(0, 30), *others, (1, 1)]]
    for place in range(5):
        steps.append([*others[:place], (0, 1), *others[place:]])
    steps.append([(0, 5)])
    assert torch.equal(outputs(spec, lengths, steps, kind=kind), alone)
    if kind == "torch":
        small = outputs(spec, lengths, steps, workspace_bytes=1)
        assert torch.equal(small, alone)


@pytest.mark.parametrize("block_size", [1, 8, 32, 48, 512])
@each_kind
def test_bits_do_not_depend_on_chunks_at_any_block_size(kind: str, block_size: int) -> None:
    spec, length = SPECS["grouped"], 560
    whole = outputs(spec, [length], chunks(length, [length]), block_size=block_size, kind=kind)
    parts = outputs(spec, [length], chunks(length, [150, 1]), block_size=block_size, kind=kind)
    assert torch.equal(parts, whole)


@each_kind
@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(sorted(SPECS)), data=st.data())
def test_random_company_and_chunks(kind: str, name: str, data: st.DataObject) -> None:
    spec, length = SPECS[name], data.draw(st.integers(1, 400))
    lengths = [length, *data.draw(st.lists(st.integers(1, 300), max_size=4))]
    left = list(lengths)
    steps = []
    while any(left):
        step = []
        for row in range(len(left)):
            new = min(left[row], data.draw(st.sampled_from([1, 40, 100, 400])))
            if new:
                step.append((row, new))
                left[row] -= new
        steps.append(data.draw(st.permutations(step)))
    alone = outputs(spec, [length], chunks(length, [length]), kind=kind)
    assert torch.equal(outputs(spec, lengths, steps, kind=kind), alone)


@each_kind
def test_the_number_of_threads_does_not_change_bits(kind: str) -> None:
    spec, length = SPECS["one wide KV head"], 300
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(outputs(spec, [length], chunks(length, [200, 1]), kind=kind))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_kind
def test_it_is_declared(kind: str) -> None:
    world = World([SPECS["grouped"]], [1], kind=kind, batch_invariant=True)
    assert world.backend.capabilities.batch_invariant


def test_other_devices_are_refused() -> None:
    layout = KVLayout([SPECS["grouped"]], 8, torch.float32)
    kv = torch.empty(4, layout.elements_per_block, device="meta")

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with pytest.raises(ArgumentError, match="not on meta"):
        TorchAttention(kv, layout, allocate=allocate, batch_invariant=True)
