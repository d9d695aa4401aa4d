"""The loading bar: one stage after another, and nothing where nobody watches."""

from __future__ import annotations

import io
import re
import sys

import pytest
from tests.serve.conftest import Stream

from torpor.serve.loading import loading
from torpor.serve.terminal import Terminal


def terminal_for(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> tuple[Terminal, Stream]:
    stream = Stream(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    terminal = Terminal(json_wanted=False)
    monkeypatch.undo()
    return terminal, stream


def test_nobody_watches_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = terminal_for(monkeypatch, is_terminal=False)
    with loading(terminal) as bar:
        assert bar is None
    assert stream.written() == ""


def test_each_stage_is_shown_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, stream = terminal_for(monkeypatch, is_terminal=True)
    with loading(terminal) as bar:
        assert bar is not None
        bar("convert", 0, 2_000_000)
        bar("convert", 1_000_000, 2_000_000)
        bar.refresh()
        bar("convert", 2_000_000, 2_000_000)
        bar("load", 5, 10)
        bar.refresh()
        bar.say("dreaming")
        bar.refresh()
    written = re.sub(r"\x1b\[[0-9;]*m", "", stream.written())
    assert "converting, this once" in written
    assert "1.00 MB of 2.00 MB" in written
    assert "loading the weights" in written
    assert "dreaming" in written


def test_stdout_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, _ = terminal_for(monkeypatch, is_terminal=True)
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    with loading(terminal):
        assert sys.stdout is stdout
