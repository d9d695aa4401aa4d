"""``torpor demo``: the JSON that was promised, the story, the report, the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.check.conftest import flip_a_bit
from tests.serve.conftest import Torpor

from torpor.check import result as result_module
from torpor.engine.llm import LLM
from torpor.sleep.reports import WakeReport

QUICK = ("--cycles", 2, "--max-tokens", 4, "--nap", 0)
YES = {"level1": True, "level2": True}


@pytest.fixture
def spoiled_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit flips in a weight during every wake."""
    wake_up = LLM.wake_up

    def spoiled(llm: LLM) -> WakeReport:
        report = wake_up(llm)
        flip_a_bit(llm)
        return report

    monkeypatch.setattr(LLM, "wake_up", spoiled)


def test_json_holds_what_was_promised(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("demo", "--model", tiny_folder, *QUICK, "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    facts = outcome.json
    assert facts["model"] == str(tiny_folder)
    assert facts["device"] == "cpu"
    assert facts["weights_bytes"] > 0
    assert facts["cycles"] == 2
    assert facts["tokens_equal"] == facts["logprobs_equal"] == facts["verified"] == YES
    assert {"awake", "asleep_level1", "asleep_level2"} <= set(facts["rss_bytes"])
    assert set(facts["sleep_s"]) == set(facts["wake_s"]) == set(YES)


def test_json_is_the_only_output_before_a_person_too(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("demo", "--model", tiny_folder, *QUICK, "--json", terminal=True)
    assert outcome.json["verdict"] == "intact"


def test_the_story_shows_memory_answers_and_proof(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("demo", "--model", tiny_folder, *QUICK, "--prompt", "who sleeps?")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "who sleeps?" in outcome.out
    for words in ("Level 1", "Level 2", "digests equal", "same tokens", "INTACT"):
        assert words in outcome.out
    assert outcome.out.count("█") > 100
    assert "\x1b" not in outcome.out, "no colours where nobody looks"


def test_a_person_sees_colours_unless_they_refuse(
    torpor: Torpor, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def colours() -> int:
        outcome = torpor("demo", "--model", tiny_folder, *QUICK, terminal=True)
        assert "INTACT" in outcome.out
        return outcome.out.count("\x1b[1;32m") + outcome.out.count("\x1b[32m")

    assert colours() > 0
    monkeypatch.setenv("NO_COLOR", "1")
    assert colours() == 0


def test_a_flipped_bit_is_exit_code_three(
    torpor: Torpor, tiny_folder: Path, spoiled_wake: None
) -> None:
    outcome = torpor("demo", "--model", tiny_folder, *QUICK, "--json")
    assert outcome.code == 3
    assert outcome.json["verdict"] == "differs"
    assert outcome.json["verified"]["level1"] is False
    story = torpor("demo", "--model", tiny_folder, *QUICK)
    assert story.code == 3
    assert "DIFFERENT" in story.out
    assert "DIFFERS" in story.out


def test_memory_that_stays_is_exit_code_one(
    torpor: Torpor, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_module, "MIN_RELEASED_FRACTION", 1.5)
    outcome = torpor("demo", "--model", tiny_folder, *QUICK)
    assert outcome.code == 1
    assert "INTACT, BUT" in outcome.out
    assert "less than 150 %" in " ".join(outcome.out.split())


def test_the_report_is_written(torpor: Torpor, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    outcome = torpor("demo", "--model", tiny_folder, *QUICK, "--report", path)
    assert outcome.code == 0
    assert str(path) in outcome.out
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    facts = torpor("demo", "--model", tiny_folder, *QUICK, "--report", path, "--json").json
    assert facts["report_file"] == str(path)


def test_a_bad_report_path_is_refused_before_the_work(torpor: Torpor, tmp_path: Path) -> None:
    # The model does not exist either, which would be noticed once the work began.
    outcome = torpor("demo", "--model", tmp_path, "--report", tmp_path / "no/r.html", "--json")
    assert outcome.code == 2
    assert "there is no folder" in outcome.json["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [("--cycles", 0), ("--max-tokens", 0), ("--threads", 0), ("--nap", -1), ("--prompt", "")],
)
def test_impossible_options_are_usage_errors(torpor: Torpor, arguments: tuple[object, ...]) -> None:
    outcome = torpor("demo", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("torpor: ")
    assert outcome.err.count("\n") == 1


def test_a_missing_model_is_one_line_and_a_usage_error(torpor: Torpor, tmp_path: Path) -> None:
    outcome = torpor("demo", "--model", tmp_path / "none")
    assert outcome.code == 2
    assert outcome.out == ""
    assert "does not exist" in outcome.err
    assert outcome.err.count("\n") == 1
