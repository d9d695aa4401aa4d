"""``torpor chat``: a conversation that goes on after sleep, for programs and for people."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.check.conftest import flip_a_bit
from tests.serve.conftest import Outcome, Torpor

from torpor.engine.llm import LLM
from torpor.engine.text.tokenizer import Tokenizer

OPTIONS = ("--max-tokens", 4, "--temperature", 0)


@pytest.fixture
def talk(torpor: Torpor, tiny_folder: Path) -> Any:
    def call(*lines: str, terminal: bool = False, options: tuple[object, ...] = ()) -> Outcome:
        data = "".join(line + "\n" for line in lines).encode()
        face = () if terminal else ("--json",)
        return torpor(
            "chat", "-m", tiny_folder, *OPTIONS, *options, *face, stdin=data, terminal=terminal
        )

    return call


def test_each_line_is_answered_by_one_object(talk: Any) -> None:
    outcome = talk("hello", "", "and you?")
    first, second = outcome.json_lines
    assert outcome.code == 0
    assert first["role"] == second["role"] == "assistant"
    assert first["num_tokens"] == 4
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"], "it remembers"


def test_sleep_and_wake_do_not_change_the_conversation(talk: Any) -> None:
    awake = talk("hello", "and you?").json_lines
    for level in (1, 2):
        first, sleep, wake, second = talk(
            "hello", f"/sleep {level}", "/wake", "and you?"
        ).json_lines
        assert [first["text"], second["text"]] == [answer["text"] for answer in awake]
        assert sleep["command"] == "sleep"
        assert sleep["report"]["level"] == level
        assert sleep["report"]["arena_rss_after_bytes"] == 0
        assert wake["report"]["verified"] == wake["report"]["total_verifiable"] == 15
        assert set(wake["rss_bytes"]) == {"before", "after"}


def test_a_message_to_a_sleeper_is_an_error_and_not_remembered(talk: Any) -> None:
    outcome = talk("/sleep", "hello", "/wake", "hello")
    assert outcome.code == 1
    _, error, _, answer = outcome.json_lines
    assert error["error"]["type"] == "AsleepError"
    assert answer["num_prompt_tokens"] == talk("hello").json_lines[0]["num_prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "words"),
    [((), ""), (("--thinking", "on"), "True"), (("--thinking", "auto"), "auto")],
    ids=str,
)
def test_the_template_learns_whether_to_think(
    torpor: Torpor, tiny_folder: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ enable_thinking or 'x' }}")
    outcome = torpor("chat", "-m", folder, *OPTIONS, *options, "--json", stdin=b"hello\n")
    tokenizer = Tokenizer(folder / "tokenizer.json")
    (answer,) = outcome.json_lines
    assert answer["num_prompt_tokens"] == len(tokenizer.encode(words or "x"))


def test_reset_forgets(talk: Any) -> None:
    first, reset, again = talk("hello", "/reset", "hello").json_lines
    assert reset == {"command": "reset"}
    assert (again["text"], again["num_prompt_tokens"]) == (
        first["text"], first["num_prompt_tokens"],
    )  # fmt: skip


def test_a_system_message_survives_reset(talk: Any) -> None:
    options = ("--system", "be brief")
    first, _, again = talk("hello", "/reset", "hello", options=options).json_lines
    assert first["num_prompt_tokens"] == again["num_prompt_tokens"]
    assert first["num_prompt_tokens"] > talk("hello").json_lines[0]["num_prompt_tokens"]


def test_status_and_help_are_objects(talk: Any) -> None:
    status, help_ = talk("/status", "/help").json_lines
    assert status["state"] == "awake"
    assert status["num_messages"] == 0
    assert "/sleep [1|2]" in help_["commands"]


def test_exit_ends_before_the_input_does(talk: Any) -> None:
    assert len(talk("hello", "/exit", "hello").json_lines) == 1


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [
        ("/dance", "there is no command '/dance'", 2),
        ("/", "there is no command '/'", 2),
        ("/sleep 7", "'7'", 2),
        ("/sleep 1 2", "takes one word", 2),
        ("/wake now", "takes no words", 2),
        ("word " * 200, "shorten it", 2),
    ],
)
def test_a_bad_line_is_an_object_and_the_chat_goes_on(
    talk: Any, line: str, words: str, code: int
) -> None:
    outcome = talk(line, "hello")
    error, answer = outcome.json_lines
    assert words in error["error"]["message"]
    assert answer["role"] == "assistant"
    assert outcome.code == code


def test_a_line_that_is_not_utf8_is_refused(torpor: Torpor, tiny_folder: Path) -> None:
    outcome = torpor("chat", "-m", tiny_folder, *OPTIONS, "--json", stdin=b"a\xff\nhello\n")
    error, answer = outcome.json_lines
    assert "byte 1 is 0xff" in error["error"]["message"]
    assert answer["role"] == "assistant"


def test_a_changed_weight_is_exit_code_three(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = LLM.sleep

    def spoiled(llm: LLM, level: str) -> Any:
        flip_a_bit(llm)
        return sleep(llm, level)

    monkeypatch.setattr(LLM, "sleep", spoiled)
    outcome = talk("/sleep", "hello")
    assert outcome.json_lines[0]["error"]["type"] == "ForeignWriteError"
    assert outcome.code == 3


def test_a_model_without_a_template_says_so(
    torpor: Torpor, tiny_folder: Path, tmp_path: Path
) -> None:
    for path in tiny_folder.iterdir():
        if path.name != "tokenizer_config.json":
            (tmp_path / path.name).symlink_to(path)
    outcome = torpor("chat", "-m", tmp_path, "--json", stdin=b"hello\n")
    assert outcome.code == 2
    assert "no chat template" in outcome.json["error"]["message"]


def test_a_person_sees_answers_bars_and_hints(talk: Any) -> None:
    outcome = talk("hello", "/sleep", "still there?", "/wake", "/status", "/help", terminal=True)
    assert outcome.code == 0, "a person has seen the error"
    assert "4 tokens in" in outcome.out
    assert "(asleep) > " in outcome.out
    assert "released" in outcome.out
    assert "15 of 15 digests equal" in outcome.out
    assert "/wake brings the model back" in outcome.err
    assert "forget the conversation" in outcome.out


def test_repeating_sleep_and_wake_says_so(talk: Any) -> None:
    outcome = talk("/wake", "/sleep", "/sleep", "/sleep 2", "/wake", terminal=True)
    assert outcome.code == 0
    assert "nothing to wake" in outcome.out
    assert "asleep already" in outcome.out
    assert "host copies of" in outcome.out


def test_a_pause_is_a_sleep_too(talk: Any) -> None:
    outcome = talk("/sleep 0", "hello", "/wake", "hello", terminal=True)
    assert "paused" in outcome.out + outcome.err
    assert "4 tokens in" in outcome.out


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream_chat = LLM.stream_chat
    calls = iter(range(10))

    def interrupted(llm: LLM, *arguments: Any, **options: Any) -> Iterator[str]:
        steps = stream_chat(llm, *arguments, **options)
        if next(calls) == 0:
            next(steps)
            raise KeyboardInterrupt
        return (yield from steps)

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    outcome = talk("hello", "/status", "hello", terminal=True)
    assert outcome.code == 0
    assert "stopped; this answer is not remembered" in outcome.out
    assert outcome.out.count("tokens in") == 1


def test_a_program_that_interrupts_ends_it_all(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(llm: LLM, *arguments: Any, **options: Any) -> Iterator[str]:
        raise KeyboardInterrupt
        yield ""

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    outcome = talk("hello", "hello")
    assert outcome.code == 130
    assert outcome.out == ""
