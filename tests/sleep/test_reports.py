"""Reports are plain facts: JSON-able, with units in their keys, times that add up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from torpor.sleep.reports import SleepReport, Stopwatch, UpdateReport, VerifyReport, WakeReport
from torpor.sleep.residents import Resident

REPORTS: list[Any] = [
    SleepReport(
        level=1,
        tags=("weights",),
        changed=True,
        released_bytes={"parameter": 8},
        residents=(Resident("constant", 4, "no owner declared it"),),
    ),
    WakeReport(tags=("weights",), changed=True, missing=("q",)),
    UpdateReport(version=None, weights_epoch=3, updated=1, updated_bytes=4, changed=("q",)),
    VerifyReport(verified=1, total_verifiable=2, differing=("q",)),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_becomes_json_with_every_field(report: Any) -> None:
    plain = json.loads(json.dumps(report.to_dict()))
    assert set(plain) == {field.name for field in dataclasses.fields(report)}
    assert plain["total_s"] == 0.0


def test_residents_are_listed_with_size_and_reason() -> None:
    assert REPORTS[0].to_dict()["residents"] == [
        {"name": "constant", "resident_bytes": 4, "reason": "no owner declared it"}
    ]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_a_report_cannot_be_changed(report: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.total_s = 1.0


@pytest.mark.parametrize(
    ("verified", "total", "differing", "ok"),
    [(2, 2, (), True), (1, 2, ("q",), False), (1, 2, (), False), (0, 0, (), True)],
)
def test_verified_means_all_of_it(
    verified: int, total: int, differing: tuple[str, ...], ok: bool
) -> None:
    report = VerifyReport(verified=verified, total_verifiable=total, differing=differing)
    assert report.ok is ok


def test_a_stopwatch_adds_up_phases_and_keeps_them_on_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 1.0, 2.0, 5.0, 7.0, 10.0, 10.5, 20.0])
    monkeypatch.setattr("torpor.sleep.reports.time.perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    with stopwatch.phase("copy"):
        pass
    with stopwatch.phase("copy"):
        pass
    with pytest.raises(KeyError), stopwatch.phase("map"):
        raise KeyError
    assert stopwatch.seconds == {"copy": 3.0, "map": 0.5}
    assert stopwatch.total_s == 20.0
