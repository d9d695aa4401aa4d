"""How a command ends: one line, one code, no traceback."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable

import pytest

from torpor.errors import (
    ArgumentError,
    AsleepError,
    ConfigError,
    ForeignWriteError,
    HostFullError,
    ModelNotFoundError,
    PromptTooLongError,
    TorporError,
    VerificationError,
)
from torpor.serve import exits
from torpor.serve.exits import end, exit_code_for, message_of, mute_stdout
from torpor.serve.terminal import Terminal


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerificationError("x"), 3),
        (ForeignWriteError("x"), 3),
        (ArgumentError("x"), 2),
        (PromptTooLongError("x"), 2),
        (ConfigError("x"), 1),
        (ModelNotFoundError("x"), 2),
        (AsleepError("x"), 1),
        (HostFullError("x"), 1),
        (TorporError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_code(error: TorporError, code: int) -> None:
    assert exit_code_for(error) == code


def test_the_result_of_the_work_is_the_code() -> None:
    assert end(Terminal(json_wanted=False), lambda: 3) == 3


def test_an_error_is_one_line_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    error = AsleepError("it sleeps;\n  call wake_up()")
    error.add_note("nothing was lost")
    assert end(Terminal(json_wanted=False), raising(error)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "torpor: it sleeps; call wake_up(); nothing was lost\n"


def test_a_long_error_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    end(Terminal(json_wanted=False), raising(TorporError("word " * 60)))
    assert capsys.readouterr().err.count("\n") == 1


def test_markup_in_an_error_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    end(Terminal(json_wanted=False), raising(ArgumentError("no model '[red]x[/red]'")))
    assert "'[red]x[/red]'" in capsys.readouterr().err


def test_with_json_an_error_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(Terminal(json_wanted=True), raising(ModelNotFoundError("no such model"))) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"type": "ModelNotFoundError", "message": "no such model"}}
    assert err == ""


def test_anything_else_says_that_it_was_not_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(Terminal(json_wanted=False), raising(KeyError("lost"))) == 1
    err = capsys.readouterr().err
    assert "unexpected KeyError: 'lost'" in err
    assert "TORPOR_DEBUG=1" in err
    assert "Traceback" not in err


def test_the_debug_variable_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(exits.DEBUG_VARIABLE, "1")
    assert end(Terminal(json_wanted=False), raising(KeyError("lost"))) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(Terminal(json_wanted=False), raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_a_broken_pipe_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert end(Terminal(json_wanted=False), raising(BrokenPipeError())) == 141
    assert capfd.readouterr() == ("", "")


def test_nothing_more_reaches_a_muted_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        mute_stdout()
        stdout.write("lost")
        stdout.flush()
        monkeypatch.undo()
        assert reader.read() == b""


def test_a_stdout_without_descriptor_needs_no_muting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    mute_stdout()


def test_a_message_carries_its_notes() -> None:
    error = TorporError("first")
    assert message_of(error) == "first"
    error.add_note("second")
    assert message_of(error) == "first; second"


def test_a_stream_that_cannot_be_written_is_no_fault_of_torpor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "mute_stdout", lambda: None)
    full = OSError(28, "No space left on device")
    assert end(Terminal(json_wanted=False), raising(full)) == 1
    shown = capsys.readouterr().err
    assert "No space left on device" in shown
    assert "fault of torpor" not in shown
