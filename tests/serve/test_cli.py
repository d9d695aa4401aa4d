"""The command line as a process: quick help, usage errors, signals, pipes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.serve.conftest import Torpor

SRC = Path(__file__).resolve().parents[2] / "src"
COMMANDS = ("demo", "generate", "chat", "doctor")
MAX_HELP_S = 0.5


def start(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torpor", *map(str, arguments)],
        env=environment,
        stderr=subprocess.PIPE,
        # A shell ignores interrupts for what it runs in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options},
    )


def test_help_is_quick_and_names_every_command() -> None:
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        with start("--help") as process:
            out, err = process.communicate()
        times.append(time.perf_counter() - start_s)
        assert process.returncode == 0, err
    assert min(times) < MAX_HELP_S
    for command in COMMANDS:
        assert command in out.decode()


def test_the_command_line_alone_imports_nothing_heavy() -> None:
    code = "import torpor.serve.cli, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "numpy", "tokenizers", "safetensors", "jinja2", "psutil"}
    assert heavy & set(done.stdout.split()) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(torpor: Torpor, command: str) -> None:
    outcome = torpor(command, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out


def test_the_version_is_shown(torpor: Torpor) -> None:
    outcome = torpor("--version")
    assert outcome.code == 0
    assert re.fullmatch(r"torpor \d+\.\d+\.\d+\n", outcome.out)


def test_no_command_shows_the_help(torpor: Torpor) -> None:
    outcome = torpor()
    assert outcome.code == 2
    assert "Commands" in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dmo",), "No such command 'dmo'"),
        (("demo", "--foo"), "--foo"),
        (("demo", "--cycles", "three"), "--cycles"),
        (("generate", "a", "b"), "b"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_two(
    torpor: Torpor, arguments: tuple[str, ...], words: str
) -> None:
    outcome = torpor(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert words in outcome.err
    assert "--help'" in outcome.err
    assert outcome.err.count("\n") == 1


def test_with_json_a_usage_error_is_an_object(torpor: Torpor) -> None:
    outcome = torpor("demo", "--foo", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == "UsageError"


def test_an_unexpected_error_is_no_traceback(
    torpor: Torpor, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.engine.loading.build_model", lambda *_, **__: 1 / 0)
    outcome = torpor("generate", "x", "-m", tiny_folder, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["type"] == "ZeroDivisionError"
    assert "Traceback" not in outcome.err


def test_ctrl_c_ends_quietly(tiny_folder: Path) -> None:
    with start("chat", "-m", tiny_folder, "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"/status\n")
        process.stdin.flush()
        assert b"awake" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (out, err) == (b"", b"")


def test_a_reader_that_went_away_is_no_error(tiny_folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        with start("generate", "x", "-m", tiny_folder, stdout=write) as process:
            _, err = process.communicate(timeout=60)
    finally:
        os.close(write)
    assert process.returncode == 141
    assert err == b""
