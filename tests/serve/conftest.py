"""The command line, run in this process with streams of its own."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import write_model

from torpor.serve.cli import run


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder with random weights."""
    return write_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's own terminal asks for must not show in the output."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TORPOR_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Stream(io.TextIOWrapper):
    """A standard stream; it may pretend that a person sits at it."""

    def __init__(self, data: bytes = b"", *, is_terminal: bool = False) -> None:
        """Hold ``data`` to read, or take what is written."""
        super().__init__(io.BytesIO(data), encoding="utf-8", write_through=True)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        """Whether a person sits at it."""
        return self.is_terminal

    def written(self) -> str:
        """All that was written."""
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"one line of JSON, not {self.out!r}"
        value = json.loads(lines[0])
        assert isinstance(value, dict)
        return value

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        """The objects on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Torpor = Callable[..., Outcome]


@pytest.fixture
def torpor(monkeypatch: pytest.MonkeyPatch) -> Torpor:
    """Run ``torpor`` with arguments; ``stdin`` is bytes, ``terminal`` puts a person before it."""

    def call(*arguments: object, stdin: bytes = b"", terminal: bool = False) -> Outcome:
        streams = [Stream(stdin, is_terminal=terminal), *(
            Stream(is_terminal=terminal) for _ in range(2)
        )]  # fmt: skip
        with monkeypatch.context() as patch:
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            code = run([str(argument) for argument in arguments])
        out, err = (stream.written() for stream in streams[1:])
        return Outcome(code, out, err)

    return call
