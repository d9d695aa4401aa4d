"""The parent's side of a worker: start it, ask it, and keep it still while another one computes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from venvs import Unavailable

FOLDER = Path(__file__).resolve().parent
START_TIMEOUT_S = 900.0
"""vLLM compiles for minutes."""
ANSWER_TIMEOUT_S = 1800.0
REASON_CHARS = 1500
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


class Failed(Exception):
    """A worker answered with an error, or not at all."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        """``is_final``: nothing more is to be expected of it."""
        super().__init__(message)
        self.is_final = is_final


class Worker:
    """One engine in a process group of its own, stopped except while it is asked something."""

    def __init__(
        self,
        name: str,
        python: Path,
        script: str,
        arguments: list[str],
        environment: Mapping[str, str],
    ) -> None:
        """Start it and wait until it has loaded; then it is still.

        Raises:
            Unavailable: it does not come up.
        """
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``close``
        self._process = subprocess.Popen(
            [str(python), str(FOLDER / script), *arguments],
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._rest = b""
        try:
            self.facts = self._answer(START_TIMEOUT_S)
        except Failed as error:
            self.close()
            raise Unavailable(f"{name} did not start: {error}") from error
        self._signal(signal.SIGSTOP)

    @property
    def pids(self) -> list[int]:
        """The worker's processes."""
        found = [self._process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found.extend(map(int, (task / "children").read_text().split()))
        return found

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Let it run until it has answered.

        Raises:
            Failed: it answered with an error, or not at all.
        """
        with self._running():
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise Failed(f"it ended: {self._tail()}", is_final=True) from error
            return self._answer(ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline_s - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(left_s, 0.0))
            if not ready:
                raise Failed(f"no answer within {timeout_s:.0f} s", is_final=True)
            chunk = os.read(self._process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise Failed(f"it ended: {self._tail()}", is_final=True)
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"][-REASON_CHARS:])
        return answer

    def _tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - REASON_CHARS))
        return self._log.read().decode(errors="replace")


def _die_with_parent() -> None:
    """Runs in the new process: a stopped worker must not stay behind when the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
