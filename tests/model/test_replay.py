"""Passes computed once and repeated without Python: the same bits, or not repeated at all."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.model.native_kernels import native_library

from torpor.model.native import replay
from torpor.model.native.calls import Calls, Tape
from torpor.model.native.library import Library
from torpor.model.native.ops import NativeOps
from torpor.model.native.replay import MAX_PASSES, Replay, _Watch

WIDTH = 48


class Bench:
    """Two layers of a sort, with weights that change and passes that are counted."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        random = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(2 * WIDTH, WIDTH, generator=random) for _ in range(2)]
        self.gain = torch.randn(WIDTH, generator=random)
        self.epoch = 0
        self.computed = 0
        self.between = between
        self.taken: list[torch.Tensor] = []
        calls = Calls(native_library())
        self.replay = Replay(calls, self._allocate, epoch=lambda: self.epoch)
        self.ops = NativeOps(calls.library, torch.float32, calls=calls, replay=self.replay)
        self.plain = NativeOps(calls.library, torch.float32)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        self.taken.append(torch.full(tuple(shape), 0x7F, dtype=dtype))
        return self.taken[-1]

    def compute(self, ops: NativeOps, x: torch.Tensor) -> torch.Tensor:
        self.computed += ops is not self.plain
        stream = x
        for weight in self.weights:
            x = ops.rms_norm(x, self.gain, 1e-5)
            if self.between is not None:
                x = self.between(x)
            x = ops.gated(ops.linear(x, weight, None).view(len(x), 2 * WIDTH))
            x, stream = ops.add_rms_norm(x, stream, self.gain, 1e-5)
        return x

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.run_pass(self.compute, self.ops, x.clone()).clone()

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.plain, x.clone())


def rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_a_repeated_pass_has_the_bits_of_one_computed() -> None:
    bench = Bench()
    for seed in range(5):
        for count in (1, 7, 64):
            x = rows(count, seed)
            before = x.clone()
            assert torch.equal(bench.run(x), bench.expected(x))
            assert torch.equal(x, before)
    assert bench.computed == 3


def test_a_long_pass_is_noted_first_and_then_made_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    repeat = Library.repeat

    def counted(self: Library, calls: int, count: int) -> None:
        made.append(count)
        repeat(self, calls, count)

    monkeypatch.setattr(Library, "repeat", counted)
    x = rows(200)
    bench = Bench(lambda x: x[:, :WIDTH].view(x.shape))
    bench.run(x)
    assert made == [8]
    made.clear()
    bench = Bench(lambda x: x.exp())
    bench.run(x)
    assert made == [1, 4, 3]


@pytest.mark.parametrize("interrupted", [False, True])
def test_memory_that_only_a_noted_call_reads_outlives_it(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a signal handler has all calls made between its address and its call."""
    bench = Bench()
    x = rows(200)
    note = Tape.note

    def handled(tape: Tape, *call: Any) -> None:
        tape.make()
        note(tape, *call)

    if interrupted:
        monkeypatch.setattr(Tape, "note", handled)
    seen: list[weakref.ref[torch.Tensor]] = []

    def compute(ops: NativeOps, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # else it would have the calls made
            other = x * 2
        normed = ops.rms_norm(other, bench.gain, 1e-5)
        seen.append(weakref.ref(other))
        del other
        if ops is bench.ops:
            assert seen[0]() is not None
        return ops.linear(normed, bench.weights[0], None)

    got = bench.ops.run_pass(compute, bench.ops, x.clone())
    assert seen[0]() is None
    assert torch.equal(got, compute(bench.plain, x))


def test_calls_are_made_once_when_a_signal_handler_computes_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "ROOM_BYTES", 8 << 10)  # calls are made on the way then
    repeat = Library.repeat

    def interrupted(self: Library, calls: int, count: int) -> None:
        repeat(self, calls, count)
        torch.zeros(1)

    monkeypatch.setattr(Library, "repeat", interrupted)
    bench = Bench()
    x = rows(200)
    assert torch.equal(bench.run(x), bench.expected(x))


@pytest.mark.parametrize("count", [4, 200])
def test_an_interrupt_where_the_watch_ends_leaves_no_calls_behind(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    x = rows(count)
    leave = _Watch.__exit__

    def interrupted(self: Any, *reason: Any) -> None:
        raise KeyboardInterrupt

    def made(*_: Any) -> None:
        raise AssertionError("a call of a pass that was interrupted")

    monkeypatch.setattr(_Watch, "__exit__", interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(Library, "repeat", made)
        with pytest.raises(KeyboardInterrupt):
            bench.run(x)
        torch.zeros(1)  # the watch, which is there still, sees it
    torch.overrides._pop_mode()
    monkeypatch.setattr(_Watch, "__exit__", leave)
    for _ in range(2):
        assert torch.equal(bench.run(x), bench.expected(x))


def test_a_pass_of_many_calls_on_several_threads(threads: None) -> None:
    torch.set_num_threads(3)
    bench = Bench()
    bench.weights *= 10
    for count in (5, 200):
        for seed in range(3):
            x = rows(count, seed)
            assert torch.equal(bench.run(x), bench.expected(x))


def test_the_passes_used_last_are_kept() -> None:
    bench = Bench()
    for count in (1, 300, *range(2, MAX_PASSES + 1)):
        bench.run(rows(count))
        bench.run(rows(1))
    assert bench.computed == MAX_PASSES + 1
    for count, computed in ((1, 0), (2, 0), (300, 1), (3, 1), (2, 0)):
        x, before = rows(count), bench.computed
        assert torch.equal(bench.run(x), bench.expected(x))
        assert bench.computed == before + computed


def test_weights_of_another_epoch_are_looked_up_anew() -> None:
    bench = Bench()
    x = rows(3)
    bench.run(x)
    bench.weights = [weight + 1 for weight in bench.weights]
    bench.epoch += 1
    assert torch.equal(bench.run(x), bench.expected(x))
    bench.weights[0].mul_(2)  # in place: the same address
    assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 2


def test_weights_that_got_other_memory_are_read_there() -> None:
    bench = Bench()
    x = rows(3)
    bench.run(x)
    bench.weights[1].data = bench.weights[1] * 3
    assert torch.equal(bench.run(x), bench.expected(x))
    bench.gain.data = bench.gain - 1
    assert torch.equal(bench.run(x), bench.expected(x))
    assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 3


def test_another_context_is_another_pass() -> None:
    bench, other = Bench(), Bench()
    other.weights = [weight + 1 for weight in other.weights]
    x = rows(3)

    def compute(bench: Bench, x: torch.Tensor) -> torch.Tensor:
        return bench.compute(ops, x)

    ops = bench.ops
    for one in (bench, other, bench, bench):
        got = ops.run_pass(compute, one, x.clone()).clone()
        assert torch.equal(got, one.expected(x))
    assert (bench.computed, other.computed) == (2, 1)


def test_a_copy_of_the_operations_does_not_repeat_what_the_original_kept() -> None:
    bench = Bench()
    x = rows(3)
    bench.run(x)
    twin = copy.deepcopy(bench.ops)
    bench.weights = [weight * 3 for weight in bench.weights]
    got = twin.run_pass(bench.compute, twin, x.clone())
    assert torch.equal(got, bench.expected(x))


def test_another_number_of_threads_is_another_pass(threads: None) -> None:
    bench = Bench()
    x = rows(3)
    want = bench.expected(x)
    for count, computed in ((1, 1), (2, 2), (1, 2)):
        torch.set_num_threads(count)
        assert torch.equal(bench.run(x), want)
        assert bench.computed == computed


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: torch.nn.functional.silu(x),
        lambda x: x.clone(),
        lambda x: x * float(x[0, 0] > 0) if x.tolist() else x,
        lambda x: torch.add(x, 1, out=torch.empty_like(x)),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: torch.clamp(x, min=0, out=x),
        lambda x: _assign(x),
        lambda x: _add_in_place(x),
        lambda x: x if x.sum().item() > 0 else x.view(x.shape),
        lambda x: torch.cat([part.exp() for part in x.split(1)]),
    ],
)
@pytest.mark.parametrize("count", [4, 200])
def test_what_torch_computes_on_the_way_is_never_left_out(
    between: Callable[[torch.Tensor], torch.Tensor], count: int
) -> None:
    bench = Bench(between)
    for seed in range(3):
        x = rows(count, seed)
        assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 3


def _assign(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1.0
    return x


def _add_in_place(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x


def test_views_on_the_way_are_fine() -> None:
    bench = Bench(lambda x: x[:, :WIDTH].view(-1, 2, WIDTH // 2).flatten(1).unsqueeze(0)[0])
    for seed in range(3):
        x = rows(4, seed)
        assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 1


def test_a_pass_that_fails_is_forgotten() -> None:
    fail = True

    def between(x: torch.Tensor) -> torch.Tensor:
        if fail:
            raise KeyboardInterrupt
        return x

    bench = Bench(between)
    x = rows(2)
    with pytest.raises(KeyboardInterrupt):
        bench.run(x)
    fail = False
    for _ in range(2):
        assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 2


def test_results_that_find_no_room_are_computed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ROOM_BYTES", 8 << 10)
    bench = Bench()
    for count, computed in ((1, 1), (1, 1), (32, 2), (32, 3), (200, 4), (200, 5)):
        x = rows(count)
        assert torch.equal(bench.run(x), bench.expected(x))
        assert bench.computed == computed


def test_scratch_memory_may_hold_anything_before_a_pass() -> None:
    bench = Bench()
    x = rows(5)
    for fill in (0xFF, 0x00, 0x7F):
        assert torch.equal(bench.run(x), bench.expected(x))
        bench.taken[0].fill_(fill)


def test_long_passes_find_their_memory_in_the_room() -> None:
    for between, computed in ((None, 1), (torch.exp, 2)):
        bench = Bench(between)
        x = rows(200)
        memory = bench.taken[0]
        for _ in range(2):
            result = bench.ops.run_pass(bench.compute, bench.ops, x.clone())
            assert torch.equal(result, bench.expected(x))
            assert 0 <= result.data_ptr() - memory.data_ptr() < memory.numel()
        assert bench.computed == computed


def test_rows_wanted_of_a_pass_are_a_size_of_it() -> None:
    bench = Bench()

    def some(ops: NativeOps, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return ops.take_rows(bench.compute(ops, x), wanted)

    for seed in range(3):
        x = rows(100, seed)
        for wanted in ([99], [98 - seed], [], [0, 50 + seed], [7, 7, 99]):
            index = torch.tensor(wanted, dtype=torch.int64)
            got = bench.ops.run_pass(some, bench.ops, x.clone(), index)
            assert torch.equal(got, bench.expected(x)[index])
        assert torch.equal(bench.run(x), bench.expected(x))
    assert bench.computed == 5
