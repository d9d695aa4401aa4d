"""Packed copies of weights: right products, never stale, never there when they are not needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from torpor.model.layers.linear_kernels import linear_kernel
from torpor.model.layers.packed_weights import MAX_ROWS, PackedWeights, can_pack

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]

pytestmark = pytest.mark.skipif(not DTYPES, reason="this torch has no packed products here")


class Bench:
    """Copies with an epoch that a test moves, and what they declared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.epoch = 1
        self.declared: list[torch.Tensor] = []
        self.packed = PackedWeights(dtype, epoch=lambda: self.epoch, declare=self._declare)
        self.kernel = linear_kernel(
            dtype, batch_invariant=False, allocate=allocate, packed=self.packed
        )

    def _declare(self, tensors: Sequence[torch.Tensor]) -> None:
        self.declared += tensors

    def step(self, x: torch.Tensor, weight: torch.Tensor, sequences: int = 8) -> torch.Tensor:
        self.packed.begin(sequences)
        out = self.kernel(x, weight, None)
        self.packed.end()
        return out


def allocate(shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 33, 128, 129])
def test_products_are_those_of_the_weights(dtype: torch.dtype, rows: int) -> None:
    bench, weight, x = Bench(dtype), some(96, 64, dtype=dtype), some(rows, 64, dtype=dtype, seed=1)
    expected = x.double() @ weight.double().t()
    for _ in range(2):
        out = bench.step(x, weight)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert out.shape == expected.shape
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_step_of_its_kind(dtype: torch.dtype) -> None:
    bench, weight, x = Bench(dtype), some(96, 64, dtype=dtype), some(8, 64, dtype=dtype, seed=1)
    first = bench.step(x, weight)
    bench.step(x[:1], weight, sequences=1)
    bench.packed.drop()
    assert torch.equal(bench.step(x, weight), first)


def test_copies_are_made_once_declared_once_and_only_for_batches() -> None:
    bench, weight = Bench(torch.float32), some(96, 64, dtype=torch.float32)
    for sequences, rows in ((1, 8), (2, 64), (8, MAX_ROWS + 1), (8, 2)):
        bench.step(some(rows, 64, dtype=torch.float32), weight, sequences)
        assert bench.packed.nbytes == 0
    for _ in range(3):
        bench.step(some(8, 64, dtype=torch.float32), weight)
    assert len(bench.declared) == 1
    assert bench.packed.nbytes >= weight.nbytes
    bench.packed.drop()
    assert bench.packed.nbytes == 0


def test_a_copy_ends_with_the_epoch_of_its_weight() -> None:
    bench, weight = Bench(torch.float32), some(96, 64, dtype=torch.float32)
    x = some(8, 64, dtype=torch.float32, seed=1)
    old = bench.step(x, weight)
    weight.copy_(some(96, 64, dtype=torch.float32, seed=2))
    bench.epoch += 1
    new = bench.step(x, weight)
    assert torch.equal(new, Bench(torch.float32).step(x, weight))
    assert not torch.equal(new, old)
