"""``torpor doctor``: the table, the verdict, the exit codes."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.check.conftest import flip_a_bit
from tests.serve.conftest import Stream, Torpor

from torpor.check import doctor as doctor_module
from torpor.check.doctor import Diagnosis, ResidentRow, doctor
from torpor.check.roundtrip import Failure
from torpor.engine.llm import LLM
from torpor.serve.doctor import show
from torpor.serve.terminal import Terminal
from torpor.sleep.reports import WakeReport

QUICK = ("--max-tokens", 2)


@pytest.fixture(scope="module")
def diagnosis(tiny_folder: Path) -> Diagnosis:
    return doctor(tiny_folder, max_tokens=2)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a person reads of a diagnosis, on one line."""

    def call(diagnosis: Diagnosis, *, every: bool = False) -> str:
        stream = Stream()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            show(Terminal(json_wanted=False), diagnosis, every=every)
        return " ".join(stream.written().split())

    return call


def with_resident(diagnosis: Diagnosis) -> Diagnosis:
    row = ResidentRow(
        name="model.stranger", resident_bytes=400, reason="no owner declared it", remedy="own it"
    )
    return dataclasses.replace(diagnosis, residents=(row,))


def test_a_person_reads_groups_of_layers_and_the_verdict(
    diagnosis: Diagnosis, shown: Callable[..., str]
) -> None:
    text = shown(diagnosis)
    for words in ("layers.*.", "checkpoint", "kv_cache", "0xff", "0x7f", "HEALTHY"):
        assert words in text
    assert "layers.0." not in text
    assert "nothing: every tensor of the model has an owner" in text


def test_all_lists_every_tensor(diagnosis: Diagnosis, shown: Callable[..., str]) -> None:
    text = shown(diagnosis, every=True)
    assert "layers.0." in text
    assert "layers.1." in text


def test_what_stays_is_shown_with_reason_and_remedy(
    diagnosis: Diagnosis, shown: Callable[..., str]
) -> None:
    text = shown(dataclasses.replace(with_resident(diagnosis), escaped=("lm_head.weight",)))
    assert "model.stranger 400 B: no owner declared it; own it" in text
    assert "lm_head.weight has left" in text
    assert "FINDINGS" in text


LONG_NAME = "model.layers.17.post_attention_layernorm.with_a_very_long_name.weight"


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("every", [False, True])
def test_names_stay_whole_in_a_narrow_terminal(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch, columns: int, every: bool
) -> None:
    rows = list(diagnosis.owners)
    rows[1] = dataclasses.replace(rows[1], name=LONG_NAME)
    stream = Stream()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", stream)
    show(
        Terminal(json_wanted=False), dataclasses.replace(diagnosis, owners=tuple(rows)), every=every
    )
    lines = stream.written().splitlines()
    for row in rows:
        name = row.name if every else re.sub(r"\.\d+\.", ".*.", row.name)
        assert any(line.endswith(f"B  {name}") for line in lines), name
    if columns == 80:
        others = [line for line in lines if "very_long_name" not in line]
        assert max(map(len, others)) <= 80


def test_what_is_kept_alike_stands_under_one_heading(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = diagnosis.owners[0]
    rows = [
        dataclasses.replace(first, name=name, cls=cls, nbytes=500, host_copy=host, sources=sources)
        for name, cls, host, sources in (
            ("layers.0.w", "parameter", "checkpoint", ()),
            ("inv_freq", "buffer", None, ()),
            ("layers.1.w", "parameter", "checkpoint", ()),
            ("layers.1.q", "parameter", "file", ("layers.0.w", "inv_freq")),
        )
    ]
    stream = Stream()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", stream)
    show(
        Terminal(json_wanted=False), dataclasses.replace(diagnosis, owners=tuple(rows)), every=False
    )
    assert stream.written().splitlines()[1:8] == [
        "parameter, tag weights, 2 tensors of 1.00 kB, host copy: checkpoint",
        "     2 x  1.00 kB  layers.*.w",
        "buffer, tag weights, 1 tensor of 500 B, no host copy",
        "     1 x    500 B  inv_freq",
        "parameter, tag weights, 1 tensor of 500 B, host copy: file",
        "     1 x    500 B  layers.*.q  computed from layers.*.w, inv_freq",
        "4 tensors of 2.00 kB in all",
    ]


def test_derived_tensors_show_their_sources(
    diagnosis: Diagnosis, shown: Callable[..., str]
) -> None:
    assert "computed from" not in shown(diagnosis)
    row = dataclasses.replace(diagnosis.owners[0], cls="derived", sources=("the.source",))
    text = shown(dataclasses.replace(diagnosis, owners=(row,)))
    assert "computed from" in text
    assert "the.source" in text


def test_a_failure_is_shown(diagnosis: Diagnosis, shown: Callable[..., str]) -> None:
    failure = Failure(level=1, cycle=1, type="VerificationError", message="w differs", names=())
    first, second = diagnosis.examinations
    broken = dataclasses.replace(first, trips=(), failure=failure)
    text = shown(dataclasses.replace(diagnosis, examinations=(broken, second)))
    assert "VerificationError: w differs" in text
    assert "MISMATCH The model did not come back as it was." in text


def test_json_holds_the_diagnosis(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("doctor", tiny_folder, *QUICK, "--json")
    facts = outcome.json
    assert outcome.code == 0
    assert outcome.err == ""
    assert facts["verdict"] == "healthy"
    assert {"owners", "residents", "audit", "examinations", "rig"} <= set(facts)
    assert len(facts["examinations"]) == 2


def test_a_person_sees_what_is_under_way(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("doctor", tiny_folder, *QUICK, "--json", terminal=True)
    assert outcome.json["verdict"] == "healthy"
    assert "poisoned with 0x7f" in outcome.err


def test_a_finding_fails_only_where_that_is_asked_for(
    torpor: Torpor, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "doctor", lambda *_, **__: with_resident(diagnosis))
    assert torpor("doctor", "any").code == 0
    assert torpor("doctor", "any", "--strict").code == 1
    assert torpor("doctor", "any", "--strict", "--json").json["verdict"] == "findings"


def test_a_mismatch_is_exit_code_three(
    torpor: Torpor, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_up = LLM.wake_up

    def spoiled(llm: LLM) -> WakeReport:
        report = wake_up(llm)
        flip_a_bit(llm)
        return report

    monkeypatch.setattr(LLM, "wake_up", spoiled)
    outcome = torpor("doctor", tiny_folder, *QUICK)
    assert outcome.code == 3
    assert "MISMATCH" in outcome.out
    assert "DIFFERENT" in outcome.out


def test_a_missing_model_is_exit_code_two(torpor: Torpor, tmp_path: Path) -> None:
    outcome = torpor("doctor", tmp_path / "none", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "ModelNotFoundError"
