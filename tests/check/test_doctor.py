"""The doctor: a healthy model, a tensor that nobody owns, and a model that wakes changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.check.conftest import flip_a_bit

from torpor.check.doctor import Diagnosis, doctor
from torpor.engine import loading as loading_module
from torpor.engine.llm import LLM
from torpor.sleep.reports import WakeReport


@pytest.fixture(scope="module")
def diagnosis(tiny_folder: Path) -> Diagnosis:
    return doctor(tiny_folder, max_tokens=4)


def test_a_whole_model_is_healthy(diagnosis: Diagnosis, tiny_folder: Path) -> None:
    facts = json.loads(json.dumps(diagnosis.to_dict()))
    assert facts["model"] == str(tiny_folder)
    assert facts["verdict"] == "healthy"
    assert facts["residents"] == []
    assert facts["escaped"] == []
    assert facts["fresh_load_equal"] is True


def test_the_table_says_who_owns_what(diagnosis: Diagnosis) -> None:
    owners = {row["name"]: row for row in diagnosis.to_dict()["owners"]}
    embedding = owners["model.embed_tokens.weight"]
    assert (embedding["class"], embedding["tag"]) == ("parameter", "weights")
    assert embedding["aliases"] == ["lm_head.weight"]
    assert embedding["host_copy"] == "checkpoint"
    assert owners["kv_cache"]["class"] == "cache"
    scratch = {name for name, row in owners.items() if row["class"] == "scratch"}
    assert {"input_ids", "positions", "slots", "block_tables"} <= scratch
    assert any(name.startswith("attention") for name in scratch)
    assert {owners[name]["tag"] for name in scratch} == {"graphs"}
    assert sum(row["owned_bytes"] for row in owners.values()) == sum(diagnosis.owned_bytes.values())


def test_both_levels_run_under_both_poison_patterns(diagnosis: Diagnosis) -> None:
    runs = [
        (entry.poison, trip.nap.level) for entry in diagnosis.examinations for trip in entry.trips
    ]
    assert runs == [(0xFF, 1), (0xFF, 2), (0x7F, 1), (0x7F, 2)]
    assert all(entry.intact for entry in diagnosis.examinations)
    assert [entry["poison"] for entry in diagnosis.to_dict()["examinations"]] == ["0xff", "0x7f"]


def test_the_patterns_reach_the_memory(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    from torpor.sleep.cpu import CpuDevice

    fill = CpuDevice.fill

    def noted(device: CpuDevice, address: int, nbytes: int, byte: int) -> None:
        filled.append(byte)
        fill(device, address, nbytes, byte)

    monkeypatch.setattr(CpuDevice, "fill", noted)
    doctor(tiny_folder, max_tokens=2)
    assert {0xFF, 0x7F} <= set(filled)


def test_a_tensor_that_nobody_owns_is_a_finding(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model = loading_module.build_model

    def with_stranger(*arguments: Any, **options: Any) -> Any:
        module = build_model(*arguments, **options)
        module.model.stranger = torch.ones(100)  # a plain attribute: not registered
        return module

    monkeypatch.setattr(loading_module, "build_model", with_stranger)
    diagnosis = doctor(tiny_folder, max_tokens=2)
    assert diagnosis.verdict == "findings"
    (row,) = diagnosis.residents
    assert row.name == "model.stranger"
    assert row.resident_bytes == 400
    assert "no owner declared it" in row.reason
    assert "register it as a buffer" in row.remedy
    assert diagnosis.to_dict()["residents"][0]["name"] == "model.stranger"
    assert diagnosis.intact


def test_a_bit_that_flips_during_a_wake_is_a_mismatch(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_up = LLM.wake_up

    def spoiled(llm: LLM) -> WakeReport:
        report = wake_up(llm)
        flip_a_bit(llm)
        return report

    monkeypatch.setattr(LLM, "wake_up", spoiled)
    diagnosis = doctor(tiny_folder, max_tokens=4)
    assert diagnosis.verdict == "mismatch"
    assert [len(entry.trips) for entry in diagnosis.examinations] == [1, 1]
    assert not diagnosis.examinations[0].trips[0].verified


def test_a_write_outside_the_door_is_a_mismatch_with_its_name(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = LLM.sleep

    def spoiled(llm: LLM, level: int) -> Any:
        flip_a_bit(llm)
        return sleep(llm, level)

    monkeypatch.setattr(LLM, "sleep", spoiled)
    diagnosis = doctor(tiny_folder, max_tokens=2)
    assert diagnosis.verdict == "mismatch"
    failure = diagnosis.examinations[0].failure
    assert failure is not None
    assert failure.names == ("model.norm.weight",)


def test_two_loads_that_answer_differently_are_a_mismatch(diagnosis: Diagnosis) -> None:
    first, second = diagnosis.examinations
    (answer,) = second.reference
    other = dataclasses.replace(answer, token_ids=(1, 2, 3, 4))
    changed = dataclasses.replace(
        diagnosis, examinations=(first, dataclasses.replace(second, reference=(other,)))
    )
    assert not changed.fresh_load_equal
    assert changed.verdict == "mismatch"


def test_an_escaped_tensor_is_a_finding(diagnosis: Diagnosis) -> None:
    assert dataclasses.replace(diagnosis, escaped=("a.weight",)).verdict == "findings"


def test_a_listener_hears_of_each_round_trip(tiny_folder: Path) -> None:
    heard: list[tuple[int, int]] = []

    class Listener:
        def examining(self, poison: int, level: int) -> None:
            heard.append((poison, level))

    doctor(tiny_folder, max_tokens=1, listener=Listener())
    assert heard == [(0xFF, 1), (0xFF, 2), (0x7F, 1), (0x7F, 2)]
