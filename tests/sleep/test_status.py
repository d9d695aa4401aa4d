"""Questions about a sleeper, and which content level 2 may discard."""

from __future__ import annotations

import json

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import Net, TiedModel, bits
from torch import nn

from torpor.errors import AsleepError, WeightsIncompleteError
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.digest import local_digest
from torpor.sleep.portable import portable_tensor_digest
from torpor.sleep.sleeper import Sleeper
from torpor.sleep.source import SliceTable, WeightSlice


def forget_and_refill(sleeper: Sleeper, weights: dict[str, torch.Tensor]) -> tuple[str, ...]:
    sleeper.sleep(2)
    sleeper.wake_up()
    missing = sleeper.missing
    sleeper.update_weights({name: weights[name] for name in missing})
    return missing


# --- proof ---------------------------------------------------------------------------------------


def test_verify_compares_every_owned_byte_now(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    report = sleeper.verify()
    assert (report.ok, report.verified, report.total_verifiable) == (True, 6, 6)
    with torch.no_grad():
        net.second.weight[1, 2] += 1e-6
    report = sleeper.verify()
    assert (report.ok, report.differing) == (False, ("second.weight",))
    assert (report.verified, report.total_verifiable) == (5, 6)


def test_verify_proves_nothing_while_asleep(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(Net(4))
    sleeper.sleep()
    with pytest.raises(AsleepError, match="nothing is mapped that could be verified"):
        sleeper.verify()


def test_verify_does_not_call_missing_content_proven(sleeper_for: SleeperMaker) -> None:
    sleeper = sleeper_for(Net(4))
    sleeper.sleep(2)
    sleeper.wake_up()
    report = sleeper.verify()
    assert (report.ok, report.verified, report.total_verifiable) == (False, 2, 6)


def test_verify_of_a_module_without_tensors(sleeper_for: SleeperMaker) -> None:
    assert sleeper_for(nn.Identity()).verify().ok


def test_local_digests_are_of_the_bytes(sleeper_for: SleeperMaker) -> None:
    model = TiedModel()
    sleeper = sleeper_for(model)
    digests = sleeper.digests()
    assert set(digests) == {"embedding.weight", "middle.weight", "middle.bias"}
    assert digests["middle.bias"] == local_digest(bits(model.middle.bias))
    sleeper.sleep()
    assert sleeper.digests() == digests, "known while asleep"


def test_portable_digests_are_by_checkpoint_name(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    slices = [
        WeightSlice(name="top", parameter="first.weight", start=0, length=2),
        WeightSlice(name="bottom", parameter="first.weight", start=2, length=2),
        WeightSlice(name="b", parameter="first.bias"),
    ]
    sleeper = sleeper_for(net, slices=SliceTable(slices))
    digests = sleeper.digests(portable=True)
    assert digests["top"] == portable_tensor_digest(net.first.weight.detach()[:2])
    assert digests["bottom"] == portable_tensor_digest(net.first.weight.detach()[2:])
    assert digests["b"] == portable_tensor_digest(net.first.bias)
    assert digests["table"] == portable_tensor_digest(net.table)
    assert "first.weight" not in digests
    sleeper.sleep()
    with pytest.raises(AsleepError):
        sleeper.digests(portable=True)


# --- reports -------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_storage(sleeper_for: SleeperMaker) -> None:
    model = TiedModel()
    sleeper = sleeper_for(model)
    double = torch.zeros(8)
    sleeper.own(
        double, name="double", cls=OwnershipClass.DERIVED, sources=["middle.bias"],
        rebuild=lambda: model.middle.bias * 2,
    )  # fmt: skip
    rows = {row.name: row for row in sleeper.table()}
    assert rows["embedding.weight"].aliases == ("head.weight",)
    assert rows["embedding.weight"].nbytes == 20 * 8 * 4
    assert (rows["double"].cls, rows["double"].sources) == ("derived", ("middle.bias",))
    assert {row.host_copy for row in rows.values()} == {None}
    sleeper.sleep(1)
    assert {row.host_copy for row in sleeper.table()} == {"file"}
    sleeper.wake_up()
    sleeper.sleep(2)
    sleeper.wake_up()
    rows = {row.name: row for row in sleeper.table()}
    assert {name for name, row in rows.items() if not row.valid} >= {"embedding.weight"}
    assert rows["middle.weight"].host_copy is None


def test_the_status_is_json_with_units(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    sleeper = sleeper_for(net)
    sleeper.allocate((8,), torch.float32, name="kv", cls=OwnershipClass.CACHE)
    status = json.loads(json.dumps(sleeper.status()))
    assert status["state"] == "awake"
    assert status["tags"] == {"weights": "resident", "kv_cache": "resident"}
    assert status["owned_bytes"] == {"buffer": 32, "parameter": 160, "cache": 32}
    assert status["missing"] == []
    assert status["mapped_bytes"] > 0
    sleeper.sleep(2, tags=["weights"])
    status = sleeper.status()
    assert status["tags"] == {"weights": "released", "kv_cache": "resident"}
    assert status["host_file_bytes"] > 0
    sleeper.wake_up()
    status = sleeper.status()
    assert status["tags"]["weights"] == "mapped_invalid"
    assert set(status["missing"]) == {name for name, _ in net.named_parameters()}


def test_readiness_names_what_is_missing(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    sleeper = sleeper_for(net)
    sleeper.allocate((8,), torch.float32, name="kv", cls=OwnershipClass.CACHE)
    sleeper.require_ready()
    sleeper.sleep(2)
    sleeper.wake_up(["kv_cache"])
    sleeper.require_ready("kv_cache")
    with pytest.raises(AsleepError, match="weights released"):
        sleeper.require_ready()
    sleeper.wake_up()
    with pytest.raises(WeightsIncompleteError, match=r"4 tensors .*update_weights\(\)") as caught:
        sleeper.require_ready("weights", "kv_cache")
    assert set(caught.value.names) == set(sleeper.missing)
    sleeper.update_weights({name: weights[name] for name in sleeper.missing})
    sleeper.require_ready()


# --- what level 2 may discard --------------------------------------------------------------------


def test_bytes_that_no_checkpoint_name_leads_to_survive_level_2(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    """A parameter and an unregistered tail in one storage: reloading fills only the parameter."""
    flat = torch.arange(10.0)
    module = nn.Module()
    module.weight = nn.Parameter(flat[:6].view(2, 3))
    module.other = nn.Parameter(torch.ones(2))
    sleeper = sleeper_for(module, poison=pattern)
    assert forget_and_refill(sleeper, {"other": torch.ones(2)}) == ("other",)
    assert flat.tolist() == list(range(10))


def test_a_buffer_that_shares_a_storage_with_a_parameter_survives_level_2(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    flat = torch.arange(10.0)
    module = nn.Module()
    module.weight = nn.Parameter(flat[:6])
    module.register_buffer("table", flat[6:], persistent=False)
    sleeper = sleeper_for(module, poison=pattern)
    forget_and_refill(sleeper, {})
    assert flat.tolist() == list(range(10))


def test_views_that_cover_a_storage_together_are_discarded_together(
    sleeper_for: SleeperMaker,
) -> None:
    flat = torch.arange(12.0)
    module = nn.Module()
    module.a = nn.Parameter(flat[:4])
    module.b = nn.Parameter(flat[4:].view(2, 4).T)
    sleeper = sleeper_for(module)
    missing = forget_and_refill(sleeper, {"a": torch.zeros(4), "b": torch.ones(4, 2)})
    assert set(missing) == {"a", "b"}
    assert flat.tolist() == [0.0] * 4 + [1.0] * 8


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2],
        lambda t: t.view(3, 4)[:, 1:],
        lambda t: t.view(3, 4)[:, ::3],
        lambda t: t.as_strided((2, 2), (0, 3)),
        lambda t: t.as_strided((3, 4), (1, 1)),
    ],
    ids=["every-second", "columns", "outer-columns", "expanded", "overlapping"],
)
def test_the_gaps_of_a_strided_parameter_survive_level_2(
    view: object, pattern: int, sleeper_for: SleeperMaker
) -> None:
    flat = torch.arange(12.0)
    module = nn.Module()
    module.weight = nn.Parameter(view(flat))  # type: ignore[operator]
    sleeper = sleeper_for(module, poison=pattern)
    assert forget_and_refill(sleeper, {}) == ()
    assert flat.tolist() == list(range(12))


def test_rows_that_no_slice_fills_survive_level_2(sleeper_for: SleeperMaker) -> None:
    net = Net(4)
    half = WeightSlice(name="half", parameter="first.weight", start=0, length=2)
    sleeper = sleeper_for(net, slices=SliceTable([half]))
    expected = bits(net.first.weight)
    assert forget_and_refill(sleeper, {}) == ()
    assert bits(net.first.weight) == expected
    sleeper.update_weights({"half": torch.zeros(2, 4)})
    assert net.first.weight[:2].tolist() == [[0.0] * 4] * 2


def test_padding_rows_survive_level_2(sleeper_for: SleeperMaker) -> None:
    """Vocabularies are padded: the checkpoint fills the first rows only."""
    embedding = nn.Embedding(8, 4)
    part = WeightSlice(name="tokens", parameter="weight", start=0, length=6)
    sleeper = sleeper_for(embedding, slices=SliceTable([part]))
    expected = bits(embedding.weight)
    forget_and_refill(sleeper, {})
    assert bits(embedding.weight) == expected
