"""``torpor generate``: prompts from everywhere, text, JSON, and errors before the long work."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.conftest import Torpor

from torpor.engine.llm import LLM
from torpor.errors import RequestError
from torpor.params import SamplingParams
from torpor.serve.generate import read_prompt
from torpor.serve.words import printable

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> str:
    with LLM(tiny_folder) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    return output.outputs[0].text


def test_the_completion_is_all_of_stdout(torpor: Torpor, tiny_folder: Path, expected: str) -> None:
    outcome = torpor("generate", PROMPT, "--model", tiny_folder, "--max-tokens", 8)
    assert outcome.code == 0
    assert outcome.out == expected + "\n"
    assert outcome.err == ""


def test_json_holds_text_tokens_and_times(torpor: Torpor, tiny_folder: Path, expected: str) -> None:
    outcome = torpor("generate", PROMPT, "-m", tiny_folder, "--max-tokens", 8, "--json")
    facts = outcome.json
    assert facts["text"] == expected
    assert facts["prompt"] == PROMPT
    assert facts["num_tokens"] == len(facts["token_ids"])
    assert facts["finish_reason"] in ("length", "stop")
    assert facts["generate_s"] > 0
    assert facts["load_s"] > 0
    assert facts["tokens_per_s"] == pytest.approx(facts["num_tokens"] / facts["generate_s"])


@pytest.mark.parametrize("argument", [("-",), ()])
def test_the_prompt_may_come_from_stdin(
    torpor: Torpor, tiny_folder: Path, argument: tuple[str, ...]
) -> None:
    for ending in (b"\n", b"\r\n", b""):
        data = PROMPT.encode() + ending
        outcome = torpor(
            "generate", *argument, "-m", tiny_folder, "--max-tokens", 2, "--json", stdin=data
        )
        assert outcome.json["prompt"] == PROMPT


def test_a_person_sees_the_text_as_it_comes(
    torpor: Torpor, tiny_folder: Path, expected: str
) -> None:
    outcome = torpor("generate", PROMPT, "-m", tiny_folder, "--max-tokens", 8, terminal=True)
    assert outcome.out == printable(expected) + "\n"
    assert "8 tokens in" in outcome.err
    assert "tokens/s" in outcome.err


def test_sampling_options_reach_the_sampler(torpor: Torpor, tiny_folder: Path) -> None:
    def text(seed: int) -> str:
        outcome = torpor(
            "generate", PROMPT, "-m", tiny_folder, "--max-tokens", 8, "--temperature", 2,
            "--top-p", 0.99, "--top-k", 50, "--seed", seed,
        )  # fmt: skip
        assert outcome.code == 0
        return outcome.out

    assert text(1) == text(1) != text(2)


def test_a_stop_string_ends_the_text(torpor: Torpor, tiny_folder: Path, expected: str) -> None:
    stop = expected[2:4]
    outcome = torpor(
        "generate", PROMPT, "-m", tiny_folder, "--max-tokens", 8, "--stop", stop, "--json"
    )
    assert outcome.json["stop_reason"] == stop
    assert outcome.json["text"] == expected[: expected.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("-",), b"", "the prompt is empty"),
        (("-",), b"\n", "the prompt is empty"),
        (("",), b"", "the prompt is empty"),
        (("-",), b"ab\xff", "not UTF-8: byte 2 is 0xff"),
        (("x", "--top-p", 7), b"", "top_p is 7.0"),
        (("x", "--top-k", -5), b"", "top_k is -5"),
        (("x", "--stop", ""), b"", "empty string"),
        (("x", "--temperature", -1), b"", "temperature"),
        (("x", "--max-tokens", "many"), b"", "max-tokens"),
    ],
)
def test_bad_input_is_refused_before_the_work(
    torpor: Torpor, tmp_path: Path, arguments: tuple[object, ...], stdin: bytes, words: str
) -> None:
    # The model does not exist either, which would be noticed once the work began.
    outcome = torpor("generate", *arguments, "-m", tmp_path, "--json", stdin=stdin)
    assert outcome.code == 2
    assert words in outcome.json["error"]["message"]


def test_a_person_who_gives_no_prompt_is_told(torpor: Torpor) -> None:
    outcome = torpor("generate", terminal=True)
    assert outcome.code == 2
    assert "there is no prompt" in outcome.err


def test_a_prompt_that_is_too_long_is_a_usage_error(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("generate", "word " * 400, "-m", tiny_folder)
    assert outcome.code == 2
    assert "shorten it" in outcome.err


def test_a_damaged_model_is_exit_code_one(
    torpor: Torpor, tiny_folder: Path, tmp_path: Path
) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("{")
    outcome = torpor("generate", "x", "-m", tmp_path, "--json")
    assert outcome.code == 1
    assert "config.json" in outcome.json["error"]["message"]


@pytest.mark.parametrize("prompt", [None, "-"])
def test_a_closed_stdin_is_said_to_be_closed(
    monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(RequestError, match="stdin is closed"):
        read_prompt(prompt)
