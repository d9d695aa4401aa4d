"""What only the compiled backend has: threads, its scratch memory, bits that never move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.model.attention_reference import World, attention_spec

SPECS = {
    "grouped": attention_spec(heads=9, kv_heads=3, k_dim=64, v_dim=64),
    "windowed": attention_spec(heads=4, kv_heads=2, window=70),
    "uneven": attention_spec(heads=10, kv_heads=2, k_dim=24, v_dim=40),
    "more queries than a tile": attention_spec(heads=200, kv_heads=1, k_dim=8, v_dim=12),
}
each_spec = pytest.mark.parametrize("name", SPECS)


def run(name: str, threads: int, steps: Sequence[Sequence[tuple[int, int]]]) -> list[torch.Tensor]:
    """Results and log-sum-exps of every step, as bits."""
    torch.set_num_threads(threads)
    world = World([SPECS[name]], [150, 40, 90], kind="native")
    both = [torch.cat((out, lse[..., None]), -1) for step in steps for out, lse in world.step(step)]
    return [x.view(torch.int32) for x in both]


@each_spec
def test_the_number_of_threads_does_not_change_bits(name: str) -> None:
    steps = [[(0, 149), (1, 1), (2, 70)], [(2, 20), (0, 1), (1, 39)]]
    one = run(name, 1, steps)
    for threads in (2, 3):
        for got, want in zip(run(name, threads, steps), one, strict=True):
            assert torch.equal(got, want)


@each_spec
def test_the_other_rows_change_no_bits_though_nobody_asked_for_that(name: str) -> None:
    alone = torch.cat(run(name, 1, [[(0, 100)], [(0, 49)], [(0, 1)]]))
    steps = [[(1, 20), (0, 100)], [(2, 1), (0, 49), (1, 19)], [(0, 1), (1, 1), (2, 89)]]
    parts = run(name, 1, steps)
    together = torch.cat((parts[0][20:], parts[1][1:50], parts[2][:1]))
    assert torch.equal(together, alone)


def test_threads_may_change_between_steps() -> None:
    torch.set_num_threads(2)
    world = World([SPECS["grouped"]], [150, 60], kind="native")
    steps = ([(0, 100)], [(0, 40), (1, 30)], [(0, 9), (1, 29)], [(0, 1), (1, 1)])
    for threads, step in zip((2, 4, 1, 3), steps, strict=True):
        want = world.expected(step)[0][0]
        torch.set_num_threads(threads)
        out = world.step(step)[0][0]
        torch.set_num_threads(1)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


class Guarded(World):
    """A world whose scratch memory lies between guards."""

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        elements = torch.Size(shape).numel()
        self.whole = torch.full((elements + 512,), 7.0, dtype=dtype)
        self.scratch.append(self.whole[256:-256].view(shape))
        return self.scratch[-1]


@each_spec
def test_scratch_is_allocated_once_and_nothing_beside_it_is_written(name: str) -> None:
    torch.set_num_threads(2)
    world = Guarded([SPECS[name]], [200, 30], kind="native")
    steps = ([(0, 190), (1, 3)], [(1, 20), (0, 7)], [(0, 2), (1, 6)], [(0, 1), (1, 1)])
    # More threads than there were when it was allocated must share it too.
    for threads, step in zip((2, 1, 3, 3), steps, strict=True):
        torch.set_num_threads(threads)
        world.step(step)
    assert len(world.scratch) == 1
    assert (world.whole[:256] == 7).all()
    assert (world.whole[-256:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_slots_of_new_tokens_are_written(dtype: torch.dtype) -> None:
    spec = attention_spec(k_dim=24, v_dim=10)
    world = World([spec], [40, 20], kind="native", cache_dtype=dtype)
    world.step([(0, 30), (1, 5)])
    chosen = [(0, 9), (1, 1)]
    _, keys_THD, values_THD = world.tokens(0, chosen)
    world.begin(chosen)
    world.kv.nan_to_num_(nan=3.0)
    want = world.kv.clone()
    rows = [(world.rows[index], at) for index, new in chosen for at in range(new)]
    for place, (row, index) in enumerate(rows):
        position = row.done + index
        block, at = row.blocks[position // 8], position % 8
        world.layout.keys(want, 0)[block, at] = keys_THD[place].to(dtype)
        world.layout.values(want, 0)[block, at] = values_THD[place].to(dtype)
    world.backend.attend(spec, *world.tokens(0, chosen))
    assert torch.equal(world.kv, want)


def test_elements_of_a_head_may_lie_apart() -> None:
    world = World([attention_spec(heads=4, kv_heads=2)], [12], kind="native")
    want = world.expected([(0, 12)])[0][0]
    world.begin([(0, 12)])
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in world.tokens(0, [(0, 12)])]
    out = world.backend.attend(world.specs[0], *apart)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_every_nan_stays_one_in_a_narrower_cache() -> None:
    spec = attention_spec(k_dim=24, v_dim=20)
    world = World([spec], [6], kind="native", cache_dtype=torch.bfloat16)
    # With few digits after rounding down, with a sum that overflows, as memory is poisoned.
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -0x7FFFFF, -1, -0x400000])
    nans = bits.to(torch.int32).view(torch.float32)
    assert nans.isnan().all()
    world.rows[0].k[0][:] = nans[:, None, None]
    world.rows[0].v[0][:] = nans[:, None, None]
    world.begin([(0, 6)])
    world.kv.zero_()
    world.backend.attend(spec, *world.tokens(0, [(0, 6)]))
    block = world.rows[0].blocks[0]
    assert world.layout.keys(world.kv, 0)[block, :6].isnan().all()
    assert world.layout.values(world.kv, 0)[block, :6].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_out_of_the_window_do_not_count(dtype: torch.dtype) -> None:
    spec = attention_spec(k_dim=16, v_dim=16, window=7)
    world = World([spec], [100], kind="native", cache_dtype=dtype)
    world.rows[0].v[0][:] = 3e37
    out_THD, _ = world.step([(0, 100)])[0]
    torch.testing.assert_close(out_THD / 3e37, torch.ones_like(out_THD), rtol=0, atol=1e-2)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 150, 2**30, 100])
def test_a_window_wider_than_any_row_hides_nothing(window: int) -> None:
    spec = attention_spec(heads=1, kv_heads=1, k_dim=16, v_dim=16, window=window)
    world = World([spec], [100], kind="native")
    want = world.expected([(0, 100)])[0][0]
    out_THD, _ = world.step([(0, 100)])[0]
    torch.testing.assert_close(out_THD.double(), want, rtol=0, atol=1e-5)
