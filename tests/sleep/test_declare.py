"""Owning by hand: every class, nested containers, and what a bad declaration leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import Net, ShortDevice, bits
from torch import nn

from torpor.errors import (
    ArgumentError,
    AsleepError,
    OutOfMemoryError,
    OwnershipError,
    StateError,
    WeightsIncompleteError,
)
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.sleeper import Sleeper

PARAMETER, BUFFER, DERIVED = (
    OwnershipClass.PARAMETER,
    OwnershipClass.BUFFER,
    OwnershipClass.DERIVED,
)
CACHE, SCRATCH = OwnershipClass.CACHE, OwnershipClass.SCRATCH
SYNC, RUNTIME = OwnershipClass.SYNC, OwnershipClass.RUNTIME


class Doubling(nn.Module):
    """A weight, and twice the weight in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.double = torch.zeros(4, 4)
        self.calls = 0

    def rebuild(self) -> torch.Tensor:
        self.calls += 1
        return self.weight * 2


def state_of(sleeper: Sleeper) -> Any:
    rows = [(row.name, row.aliases, row.cls, row.tag, row.sources) for row in sleeper.table()]
    return rows, {item.name: item.reason for item in sleeper._context.ledger.residents}


def level_2(sleeper: Sleeper, module: nn.Module) -> None:
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    sleeper.sleep(2)
    sleeper.wake_up()
    sleeper.update_weights({name: weights[name] for name in sleeper.missing})


# --- classes -------------------------------------------------------------------------------------


def test_a_declared_buffer_survives_both_levels(pattern: int, sleeper_for: SleeperMaker) -> None:
    net = Net()
    net.constant = torch.arange(10.0)
    sleeper = sleeper_for(net, poison=pattern)
    sleeper.own(net.constant, name="constant", cls=BUFFER)
    sleeper.sleep(1)
    assert sleeper._context.ledger.residents.nbytes == 0
    sleeper.wake_up()
    level_2(sleeper, net)
    assert net.constant.tolist() == list(range(10))


def test_a_declared_parameter_has_to_come_back(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Identity())
    extra = torch.ones(3)
    sleeper.own(extra, name="extra", cls=PARAMETER)
    sleeper.sleep(1)
    sleeper.wake_up()
    assert extra.tolist() == [1, 1, 1]
    sleeper.sleep(2)
    assert sleeper.wake_up().missing == ("extra",)
    sleeper.update_weights({"extra": torch.full((3,), 5.0)})
    assert extra.tolist() == [5, 5, 5]


def test_derived_content_follows_its_sources(pattern: int, sleeper_for: SleeperMaker) -> None:
    module = Doubling()
    sleeper = sleeper_for(module, poison=pattern)
    sleeper.own(
        module.double, name="double", cls=DERIVED, sources=["weight"], rebuild=module.rebuild
    )
    assert torch.equal(module.double, module.weight * 2), "declared content is there at once"
    calls = module.calls
    sleeper.sleep(1)
    sleeper.wake_up()
    assert module.calls == calls, "level 1 has a copy of it"
    level_2(sleeper, module)
    assert torch.equal(module.double, module.weight * 2)
    report = sleeper.update_weights({"weight": torch.ones(4, 4)})
    assert set(report.changed) == {"weight", "double"}
    assert module.double.tolist() == torch.full((4, 4), 2.0).tolist()


def test_derived_tensors_rebuild_in_the_order_of_their_sources(sleeper_for: SleeperMaker) -> None:
    module = Doubling()
    fourfold = torch.zeros(4, 4)
    sleeper = sleeper_for(module)
    sleeper.own(
        module.double, name="double", cls=DERIVED, sources=[module.weight], rebuild=module.rebuild
    )
    sleeper.own(
        fourfold, name="fourfold", cls=DERIVED, sources=[module.double],
        rebuild=lambda: module.double * 2,
    )  # fmt: skip
    level_2(sleeper, module)
    sleeper.update_weights({"weight": torch.full((4, 4), 3.0)})
    assert fourfold[0, 0].item() == 12


def test_derived_without_a_rebuild_is_refused(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Identity())
    with pytest.raises(ArgumentError, match="'x' is derived and has no rebuild; pass rebuild="):
        sleeper.own(torch.ones(3), name="x", cls=DERIVED)


def test_scratch_comes_back_poisoned(pattern: int, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2), poison=pattern)
    work = torch.zeros(8)
    counts = torch.zeros(8, dtype=torch.int32)
    sleeper.own([work, counts], name="work", cls=SCRATCH)
    sleeper.sleep()
    sleeper.wake_up()
    assert bool((work.isnan() | (work > 1e38)).all())
    assert bool((counts.abs() > 2**30).all())


def test_sync_with_a_reset_is_released_and_reset(pattern: int, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2), poison=pattern)
    counter = torch.tensor([5, 6])

    def reset() -> None:
        counter.fill_(1)

    sleeper.own(counter, name="counter", cls=SYNC, reset=reset)
    address = counter.data_ptr()
    assert sleeper.sleep().released_bytes["sync"] == 16
    sleeper.wake_up()
    assert counter.tolist() == [1, 1]
    assert counter.data_ptr() == address


@pytest.mark.parametrize("cls", [SYNC, RUNTIME])
def test_what_is_never_released_stays_where_it_is(
    cls: OwnershipClass, sleeper_for: SleeperMaker
) -> None:
    net = Net()
    net.flag = torch.tensor([5, 6])
    address = net.flag.data_ptr()
    sleeper = sleeper_for(net)
    sleeper.own(net.flag, name="flag", cls=cls)
    report = sleeper.sleep(2)
    assert [(item.name, item.nbytes) for item in report.residents] == [("flag", 16)]
    assert report.residents[0].reason.startswith(f"declared {cls.value}")
    assert net.flag.tolist() == [5, 6]
    assert net.flag.data_ptr() == address
    sleeper.wake_up()
    assert [item.name for item in sleeper.audit().unowned] == []


def test_an_owned_buffer_can_be_declared_never_released(sleeper_for: SleeperMaker) -> None:
    net = Net()
    expected = net.table.tolist()
    sleeper = sleeper_for(net)
    sleeper.own(net.table, name="peer pointers", cls=RUNTIME)
    assert "table" not in {row.name for row in sleeper.table()}
    assert sleeper.adopt() == (), "it stays as declared"
    sleeper.sleep(2)
    assert net.table.tolist() == expected, "readable while asleep"


def test_a_cache_is_cleared(pattern: int, sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2), poison=pattern)
    cache = sleeper.allocate((4, 6), torch.bfloat16, name="kv", cls=CACHE)
    assert not cache.any()
    cache.fill_(3)
    epoch = sleeper.kv_epoch
    sleeper.sleep(tags=["kv_cache"])
    sleeper.wake_up()
    assert not cache.any()
    assert sleeper.kv_epoch > epoch


class Refilled:
    """A module and a cache whose first block is computed from the weight."""

    def __init__(self, sleeper_for: SleeperMaker, pattern: int) -> None:
        self.module = nn.Linear(3, 3, bias=False)
        self.calls: list[list[float]] = []
        self.sleeper = sleeper_for(self.module, poison=pattern)
        self.cache = self.sleeper.allocate((4, 3), torch.float32, name="kv", cls=CACHE)
        self.sleeper.own(
            self.cache, name="sinks", cls=CACHE, sources=["weight"], rebuild=self.refill
        )

    def refill(self) -> None:
        row = self.module.weight.detach()[0]
        assert not row.isnan().any(), "refilled from weights that were not there yet"
        self.calls.append(row.tolist())
        self.cache[0] = row

    def assert_filled(self) -> None:
        assert self.cache[0].tolist() == self.module.weight[0].tolist()
        assert not self.cache[1:].any()


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
@pytest.mark.parametrize("level", [1, 2])
def test_a_refill_runs_once_both_are_valid(
    order: list[str], level: int, pattern: int, sleeper_for: SleeperMaker
) -> None:
    rig = Refilled(sleeper_for, pattern)
    rig.assert_filled()
    weight = rig.module.weight.detach().clone()
    rig.cache[1:].fill_(9)
    before = len(rig.calls)
    rig.sleeper.sleep(level)
    rig.sleeper.wake_up([order[0]], reload=False)
    assert len(rig.calls) == before
    rig.sleeper.wake_up([order[1]], reload=False)
    if level == 2:
        assert len(rig.calls) == before
        rig.sleeper.update_weights({"weight": weight})
    assert len(rig.calls) == before + 1
    rig.assert_filled()


def test_a_refill_follows_an_update(pattern: int, sleeper_for: SleeperMaker) -> None:
    rig = Refilled(sleeper_for, pattern)
    rig.sleeper.update_weights({"weight": torch.full((3, 3), 4.0)})
    rig.assert_filled()
    rig.sleeper.sleep(tags=["kv_cache"])
    before = len(rig.calls)
    rig.sleeper.update_weights({"weight": torch.full((3, 3), 6.0)})
    assert len(rig.calls) == before, "there is nothing to fill yet"
    rig.sleeper.wake_up(["kv_cache"])
    rig.assert_filled()


# --- declaring again -----------------------------------------------------------------------------


def test_a_registered_buffer_can_become_derived(pattern: int, sleeper_for: SleeperMaker) -> None:
    net = Net()
    sleeper = sleeper_for(net, poison=pattern)
    sleeper.own(
        net.table, name="table", cls=DERIVED, sources=["first.weight"],
        rebuild=lambda: net.first.weight.sum(0),
    )  # fmt: skip
    row = next(row for row in sleeper.table() if row.name == "table")
    assert (row.cls, row.tag, row.sources) == ("derived", "weights", ("first.weight",))
    assert "derived" in sleeper.sleep(2).released_bytes
    sleeper.wake_up()
    with pytest.raises(Exception, match="no valid content"):
        net(torch.ones(1, 16))


def test_a_registered_buffer_can_become_a_cache(pattern: int, sleeper_for: SleeperMaker) -> None:
    """It moves to the arena of its new tag, keeps its names, and no other tag frees it."""
    net = Net()
    expected = bits(net.shift)
    sleeper = sleeper_for(net, poison=pattern)
    sleeper.own(net.shift, name="kv", cls=CACHE)
    row = next(row for row in sleeper.table() if "shift" in (row.name, *row.aliases))
    assert (row.cls, row.tag, row.nbytes) == ("cache", "kv_cache", 64)
    assert bits(net.shift) == expected
    sleeper.sleep(2, tags=["weights"])
    assert bits(net.shift) == expected, "another tag's sleep leaves it alone"
    sleeper.sleep(tags=["kv_cache"])
    sleeper.wake_up(["kv_cache"])
    assert not net.shift.any()
    assert sleeper.sleep(tags=["kv_cache"]).escaped == ()


def test_a_source_can_be_declared_again_under_another_tag(sleeper_for: SleeperMaker) -> None:
    net = Net()
    sums = torch.zeros(())
    sleeper = sleeper_for(net)
    sleeper.own(sums, name="sums", cls=DERIVED, sources=["table"], rebuild=lambda: net.table.sum())
    sleeper.own(net.table, name="table again", cls=BUFFER, tag="kv_cache")
    sleeper.sleep()
    sleeper.wake_up()
    sleeper.update_weights({"first.bias": torch.ones(16)})
    assert sums.item() == net.table.sum().item()


# --- containers ----------------------------------------------------------------------------------


def test_every_tensor_of_a_nested_container_is_owned(sleeper_for: SleeperMaker) -> None:
    layers = [{"k": torch.ones(2), "v": (torch.ones(3), None)} for _ in range(2)]
    sleeper = sleeper_for(nn.Identity())
    sleeper.own({"layers": layers, "none": None}, name="cache", cls=CACHE)
    assert [row.name for row in sleeper.table()] == [
        *("cache.layers.0.k", "cache.layers.0.v.0"),
        *("cache.layers.1.k", "cache.layers.1.v.0"),
    ]
    assert sleeper.sleep().released_bytes == {"cache": 2 * 20}
    sleeper.wake_up()
    assert not layers[1]["v"][0].any()


@pytest.mark.parametrize("leaf", [3, "x", np.ones(3), object()], ids=["int", "str", "numpy", "obj"])
def test_an_unknown_leaf_fails_at_the_declaration(leaf: Any, sleeper_for: SleeperMaker) -> None:
    tensor = torch.ones(2)
    address = tensor.data_ptr()
    sleeper = sleeper_for(nn.Linear(2, 2))
    before = state_of(sleeper)
    with pytest.raises(OwnershipError, match=r"cache\.1\.deep is a \w+, neither a tensor nor"):
        sleeper.own([tensor, {"deep": leaf}], name="cache", cls=CACHE)
    assert state_of(sleeper) == before
    assert tensor.data_ptr() == address


def test_empty_tensors_are_owned_by_doing_nothing(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Identity())
    sleeper.own([torch.empty(0), torch.ones(1)], name="cache", cls=CACHE)
    assert [row.name for row in sleeper.table()] == ["cache.1"]


def test_views_that_fill_a_storage_are_owned_together(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    whole = torch.ones(4, 6)
    sleeper = sleeper_for(nn.Identity(), poison=pattern)
    sleeper.own([whole[:1], whole[1:]], name="kv", cls=CACHE)
    assert sleeper.sleep().released_bytes == {"cache": 96}
    sleeper.wake_up()
    assert not whole.any()


@pytest.mark.parametrize("cls", [BUFFER, PARAMETER])
def test_a_part_declared_to_survive_keeps_the_whole(
    cls: OwnershipClass, pattern: int, sleeper_for: SleeperMaker
) -> None:
    whole = torch.arange(10.0)
    sleeper = sleeper_for(nn.Identity(), poison=pattern)
    sleeper.own(whole[2:5], name="part", cls=cls)
    sleeper.sleep(2)
    sleeper.wake_up()
    assert whole.tolist() == list(range(10))


# --- what a bad declaration leaves behind --------------------------------------------------------


def raising() -> torch.Tensor:
    raise ZeroDivisionError("no")


def bad_declarations(sleeper: Sleeper, net: Net) -> dict[str, tuple[type[Exception], str, Any]]:
    ours = torch.ones(3)
    exported = torch.from_numpy(np.ones(3, dtype=np.float32))
    own = sleeper.own
    return {
        "taken": (
            OwnershipError, "'first.weight' is the name of another",
            lambda: own(ours, name="first.weight", cls=CACHE),
        ),
        "taken-inside": (
            OwnershipError, "'c.0' is the name of another",
            lambda: own({"0": ours, 0: torch.ones(1)}, name="c", cls=CACHE),
        ),
        "exported": (
            OwnershipError, r"cannot own 'c\.1'.*handed out before",
            lambda: own([ours, exported], name="c", cls=CACHE),
        ),
        "exported-views": (
            OwnershipError, r"cannot own 'c\.0'.*handed out before",
            lambda: own([exported[:1], exported[1:]], name="c", cls=CACHE),
        ),
        "meta": (
            OwnershipError, "lives on meta",
            lambda: own([ours, torch.ones(3, device="meta")], name="c", cls=CACHE),
        ),
        "nothing": (
            OwnershipError, "'c' holds no tensor",
            lambda: own([None, {}], name="c", cls=CACHE),
        ),
        "source-name": (
            OwnershipError, "source 'first.weigth' of 'c' has no owner",
            lambda: own(ours, name="c", cls=DERIVED, sources=["first.weigth"], rebuild=raising),
        ),
        "source-tensor": (
            OwnershipError, r"source a \(3,\) tensor of 'c' has no owner",
            lambda: own(ours, name="c", cls=DERIVED, sources=[exported], rebuild=raising),
        ),
        "rebuild-raises": (
            OwnershipError, "the rebuild of 'c' failed: no",
            lambda: own(ours, name="c", cls=DERIVED, sources=["first.weight"], rebuild=raising),
        ),
        "rebuild-shape": (
            OwnershipError, r"returned \(4,\).*not \(3,\)",
            lambda: own(ours, name="c", cls=DERIVED, rebuild=lambda: torch.ones(4)),
        ),
        "again-raises": (
            OwnershipError, "the rebuild of 'table' failed",
            lambda: own(net.table, name="table", cls=DERIVED, rebuild=raising),
        ),
        "itself": (
            OwnershipError, "'c' would be computed from itself",
            lambda: own(
                net.table, name="c", cls=DERIVED, sources=["table"], rebuild=lambda: net.table
            ),
        ),
        "part-of-ours": (
            OwnershipError, "'c' is a part of a storage of 12 bytes",
            lambda: own(ours[:2], name="c", cls=CACHE),
        ),
        "part-of-a-buffer": (
            OwnershipError, "'c' is a part of a storage of 64 bytes",
            lambda: own(net.table[2:], name="c", cls=SCRATCH),
        ),
        "gaps": (
            OwnershipError, "'c.0' is a part of a storage",
            lambda: own([ours[:1], ours[2:]], name="c", cls=DERIVED, rebuild=lambda: None),
        ),
        "parameter": (
            OwnershipError, "'c' is the memory of a parameter",
            lambda: own(net.first.weight, name="c", cls=CACHE),
        ),
        "tag": (
            ArgumentError, "tag='kv' is none of",
            lambda: own(ours, name="c", cls=CACHE, tag="kv"),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        *("taken", "taken-inside", "exported", "exported-views", "meta", "nothing", "source-name"),
        *("source-tensor", "rebuild-raises", "rebuild-shape", "again-raises", "tag", "itself"),
        *("part-of-ours", "part-of-a-buffer", "gaps", "parameter"),
    ],
)
def test_a_bad_declaration_changes_nothing(case: str, sleeper_for: SleeperMaker) -> None:
    net = Net()
    sleeper = sleeper_for(net)
    before, expected = state_of(sleeper), {k: bits(v) for k, v in net.state_dict().items()}
    error, message, call = bad_declarations(sleeper, net)[case]
    with pytest.raises(error, match=message):
        call()
    assert state_of(sleeper) == before
    sleeper.sleep()
    sleeper.wake_up()
    assert {k: bits(v) for k, v in net.state_dict().items()} == expected


def test_declaring_while_asleep_is_refused(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2))
    sleeper.sleep()
    with pytest.raises(StateError, match="cannot declare owners while asleep"):
        sleeper.own(torch.ones(1), name="x", cls=CACHE)
    with pytest.raises(StateError, match="cannot allocate while asleep"):
        sleeper.allocate((1,), torch.float32, name="x", cls=CACHE)


def test_declaring_under_inference_mode_is_refused(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2))
    with torch.inference_mode():
        with pytest.raises(OwnershipError, match="inference mode is on"):
            sleeper.own(torch.ones(1), name="x", cls=CACHE)
        with pytest.raises(OwnershipError, match="inference mode is on"):
            sleeper.allocate((1,), torch.float32, name="x", cls=CACHE)


# --- allocating ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_allocated_tensors_are_zero_and_contiguous(
    shape: tuple[int, ...], dtype: torch.dtype, sleeper_for: SleeperMaker
) -> None:
    sleeper = sleeper_for(nn.Identity())
    tensor = sleeper.allocate(shape, dtype, name="x", cls=BUFFER)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert not tensor.any()
    tensor.fill_(1)
    sleeper.sleep(2)
    sleeper.wake_up()
    assert tensor.all()


def test_an_allocation_lives_as_long_as_its_sleeper_and_is_released_with_it(
    sleeper_for: SleeperMaker,
) -> None:
    sleeper = sleeper_for(nn.Identity())
    sleeper.allocate((1000,), torch.float32, name="kv", cls=CACHE)
    assert sleeper.sleep().released_bytes == {"cache": 4000}


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "error", "message"),
    [
        ((-1, 2), torch.float32, {}, ArgumentError, r"cannot allocate shape \(-1, 2\)"),
        (("a",), torch.float32, {}, ArgumentError, "cannot allocate shape"),
        ((2,), "float32", {}, ArgumentError, "of 'float32'"),
        ((2,), torch.float32, {"cls": RUNTIME}, ArgumentError, "runtime memory is not released"),
        ((2,), torch.float32, {"cls": SYNC}, ArgumentError, "sync memory is not released"),
        ((2,), torch.float32, {"cls": DERIVED}, ArgumentError, "has no rebuild"),
        ((2,), torch.float32, {"name": "weight"}, OwnershipError, "'weight' is owned already"),
        ((2,), torch.float32, {"sources": ["x"]}, OwnershipError, "source 'x' of 'kv'"),
        ((2,), torch.float32, {"rebuild": raising}, OwnershipError, "the rebuild of 'kv' failed"),
    ],
)
def test_a_bad_allocation_changes_nothing(
    shape: Any,
    dtype: Any,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    sleeper_for: SleeperMaker,
) -> None:
    sleeper = sleeper_for(nn.Linear(2, 2))
    before = state_of(sleeper)
    with pytest.raises(error, match=message):
        sleeper.allocate(shape, dtype, **({"name": "kv", "cls": CACHE} | options))
    assert state_of(sleeper) == before


def test_an_allocation_without_memory_for_it_is_typed(sleeper_for: SleeperMaker) -> None:
    device = ShortDevice()
    sleeper = sleeper_for(nn.Linear(2, 2), device=device)
    before = state_of(sleeper)
    device.available = 4096
    with pytest.raises(OutOfMemoryError, match="4096 are available"):
        sleeper.allocate((4096,), torch.float32, name="kv", cls=CACHE)
    assert state_of(sleeper) == before


# --- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "rebind"])
def test_closing_moves_the_bytes_back(
    swaps: bool, monkeypatch: pytest.MonkeyPatch, sleeper_for: SleeperMaker
) -> None:
    if not swaps:
        for module in ("storage", "adopt"):
            monkeypatch.setattr(f"torpor.sleep.{module}.swap_available", lambda: False)
    net = Net()
    state = {name: bits(value) for name, value in net.state_dict().items()}
    view = net.first.weight.detach()[2:]
    sleeper = sleeper_for(net)
    arenas = sleeper._context.ledger.arenas(["weights"])
    sleeper.close()
    sleeper.close()
    assert {name: bits(value) for name, value in net.state_dict().items()} == state
    assert not any(arena.contains(net.first.weight.data_ptr()) for arena in arenas)
    assert view.data_ptr() == net.first.weight[2:].data_ptr()
    with pytest.raises(StateError, match="closed"):
        sleeper.sleep()


def test_closing_while_asleep_asks_first(sleeper_for: SleeperMaker) -> None:
    layer = nn.Linear(2, 2)
    sleeper = sleeper_for(layer)
    sleeper.sleep()
    with pytest.raises(StateError, match="wake_up\\(\\) first, or close\\(discard=True\\)"):
        sleeper.close()
    sleeper.close(discard=True)
    with pytest.raises((AsleepError, StateError)):
        layer(torch.ones(1, 2))


def test_closing_before_the_weights_are_back_asks_first(sleeper_for: SleeperMaker) -> None:
    """Otherwise the check would go, and the model would answer from nothing."""
    layer = nn.Linear(2, 2)
    sleeper = sleeper_for(layer)
    sleeper.sleep(2)
    sleeper.wake_up()
    with pytest.raises(StateError, match=r"2 tensors have no valid content, such as 'weight'"):
        sleeper.close()
    with pytest.raises(WeightsIncompleteError):
        layer(torch.ones(1, 2))
    sleeper.close(discard=True)
    with pytest.raises(StateError, match="closed"):
        layer(torch.ones(1, 2))
