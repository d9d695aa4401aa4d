"""The demo cycle: what it measures on a whole model, and what it says of one that is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.check.conftest import flip_a_bit

from torpor.check.cycle import CycleOptions, run_cycle
from torpor.check.oracle import Answer
from torpor.check.result import CycleResult
from torpor.check.roundtrip import Failure, Nap, Rise, RoundTrip
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError, ModelNotFoundError
from torpor.sleep.reports import WakeReport

LEVELS = ("level1", "level2")
YES = dict.fromkeys(LEVELS, True)


class Notes:
    """A listener that remembers, and may do something at one point."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.failures: list[Failure] = []
        self.llm: LLM | None = None

    def loaded(self, llm: LLM, load_s: float) -> None:
        self.told.append("loaded")
        self.llm = llm

    def answered(self, answers: tuple[Answer, ...], generate_s: float) -> None:
        self.told.append("answered")

    def slept(self, nap: Nap) -> None:
        self.told.append(f"slept {nap.level}.{nap.cycle}")

    def woke(self, nap: Nap, rise: Rise) -> None:
        self.told.append("woke")

    def proved(self, trip: RoundTrip) -> None:
        self.told.append("proved")

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)


@pytest.fixture(scope="module")
def result(tiny_folder: Path) -> CycleResult:
    return run_cycle(tiny_folder, CycleOptions(cycles=3, max_tokens=6, num_threads=1))


@pytest.fixture(scope="module")
def facts(result: CycleResult) -> dict[str, Any]:
    plain = json.loads(json.dumps(result.to_dict()))
    assert isinstance(plain, dict)
    return plain


def test_a_whole_model_is_found_intact(facts: dict[str, Any], tiny_folder: Path) -> None:
    assert facts["model"] == str(tiny_folder)
    assert facts["device"] == "cpu"
    assert facts["verdict"] == "intact"
    assert facts["cycles"] == 3
    assert facts["cycles_done"] == {"level1": 3, "level2": 3}
    assert facts["tokens_equal"] == facts["logprobs_equal"] == facts["verified"] == YES
    assert facts["shortcomings"] == []
    assert facts["failure"] is None


def test_sizes_and_times_are_there(facts: dict[str, Any]) -> None:
    assert facts["weights_bytes"] == facts["owned_bytes"]["parameter"] > 0
    assert set(facts["rss_bytes"]) >= {"awake", "asleep_level1", "asleep_level2"}
    assert all(nbytes > 0 for nbytes in facts["rss_bytes"].values())
    for key in ("sleep_s", "wake_s"):
        assert set(facts[key]) == set(LEVELS)
        assert all(0 < seconds < 5 for seconds in facts[key].values())
    assert facts["rig"]["torch_threads"] == 1
    parts = facts["spent_s"]
    assert sum(seconds for name, seconds in parts.items() if name != "total") < parts["total"]


def test_the_arenas_are_empty_while_asleep(facts: dict[str, Any]) -> None:
    arenas = facts["arena_rss_bytes"]
    assert arenas["awake"] >= sum(facts["owned_bytes"].values())
    assert arenas["asleep_level1"] == arenas["asleep_level2"] == 0


def test_level_one_waits_in_files_and_copies_once(result: CycleResult) -> None:
    for trip in result.trips_at(1):
        assert set(trip.nap.host_copy_bytes) <= {"checkpoint", "file"}
        assert trip.rise.report.reloaded is False
    first, *others = result.trips_at(1)
    assert first.nap.host_copy_bytes["checkpoint"] == result.owned_bytes["parameter"]
    assert first.nap.report.copied_bytes == result.owned_bytes["buffer"]
    assert [trip.nap.report.copied_bytes for trip in others] == [0, 0]


def test_level_two_reads_the_checkpoint_again(result: CycleResult) -> None:
    for trip in result.trips_at(2):
        assert trip.rise.report.reloaded
        assert trip.nap.host_copy_bytes["none"] == result.owned_bytes["parameter"]


def test_every_owned_tensor_is_counted(result: CycleResult) -> None:
    # 2 layers of 2 norms, fused qkv, o, fused gate and up, down; embedding, norm, rope table.
    assert {trip.num_verifiable for trip in result.trips} == {2 * 6 + 3}
    assert all(trip.rise.report.verified == 15 for trip in result.trips)


def test_the_timeline_shows_memory_going_and_coming(result: CycleResult) -> None:
    timeline = result.timeline
    kinds = [span.kind for span in timeline.spans]
    assert kinds[:2] == ["load", "answer"]
    assert kinds[2:] == ["sleep", "asleep", "wake", "answer", "verify"] * 6
    sums = [sum(point.class_bytes.values()) for point in timeline.class_points]
    whole = sum(result.owned_bytes.values())
    assert sums == [0, whole, *([whole, 0, 0, whole] * 6), whole]
    assert all(span.phases for span in timeline.spans if span.kind in ("sleep", "wake"))


def test_a_listener_hears_each_step_in_order(tiny_folder: Path) -> None:
    notes = Notes()
    run_cycle(tiny_folder, CycleOptions(cycles=1, max_tokens=2), listener=notes)
    trip = ["woke", "proved"]
    assert notes.told == ["loaded", "answered", "slept 1.1", *trip, "slept 2.1", *trip]


def test_a_bit_that_flips_during_a_wake_is_found(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_up = LLM.wake_up

    def spoiled(llm: LLM) -> WakeReport:
        report = wake_up(llm)
        flip_a_bit(llm)
        return report

    monkeypatch.setattr(LLM, "wake_up", spoiled)
    result = run_cycle(tiny_folder, CycleOptions(cycles=2, max_tokens=4))
    assert result.verdict == "differs"
    assert len(result.trips) == 1, "it ends at the first round trip that is not intact"
    facts = result.to_dict()
    no = {"level1": False, "level2": False}
    assert facts["verified"] == facts["logprobs_equal"] == no
    assert facts["wake_s"]["level2"] is None


def test_a_write_between_cycles_ends_the_cycle_with_its_name(tiny_folder: Path) -> None:
    class Saboteur(Notes):
        def proved(self, trip: RoundTrip) -> None:
            assert self.llm is not None
            flip_a_bit(self.llm)

    saboteur = Saboteur()
    result = run_cycle(tiny_folder, CycleOptions(cycles=2, max_tokens=2), listener=saboteur)
    assert result.verdict == "differs"
    assert result.failure is not None
    assert saboteur.failures == [result.failure]
    assert result.failure.type == "ForeignWriteError"
    assert result.failure.names == ("model.norm.weight",)
    assert (result.failure.level, result.failure.cycle) == (1, 2)
    assert result.to_dict()["failure"]["names"] == ["model.norm.weight"]


def test_changed_tokens_alone_are_a_difference(result: CycleResult) -> None:
    first, *others = result.trips
    comparison = dataclasses.replace(first.comparison, tokens_equal=False)
    changed = dataclasses.replace(
        result, trips=(dataclasses.replace(first, comparison=comparison), *others)
    )
    assert changed.to_dict()["tokens_equal"] == {"level1": False, "level2": True}
    assert changed.verdict == "differs"


def test_a_tensor_that_was_not_compared_is_not_verified(result: CycleResult) -> None:
    trip = result.trips[0]
    assert trip.verified
    assert not dataclasses.replace(trip, num_verifiable=trip.num_verifiable + 1).verified
    report = dataclasses.replace(trip.rise.report, verified=trip.num_verifiable - 1)
    rise = dataclasses.replace(trip.rise, report=report)
    assert not dataclasses.replace(trip, rise=rise).verified


def test_memory_that_does_not_go_is_a_shortcoming(result: CycleResult) -> None:
    first, *others = result.trips
    before = first.nap.report.arena_rss_before_bytes
    report = dataclasses.replace(first.nap.report, arena_rss_after_bytes=before // 10)
    nap = dataclasses.replace(first.nap, report=report, host_copy_bytes={"memory": 5})
    changed = dataclasses.replace(result, trips=(dataclasses.replace(first, nap=nap), *others))
    assert changed.verdict == "incomplete"
    released, copies = changed.shortcomings
    assert "released 90.0 %" in released
    assert "memory" in copies


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cycles": 0}, "cycles is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"prompts": ()}, "at least one"),
        ({"prompts": ("a", "")}, "none of it empty"),
        ({"nap_s": -1.0}, "nap_s is -1.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CycleOptions(**options)


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        run_cycle(tmp_path / "none")
