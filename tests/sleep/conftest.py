"""What the tests of this room share: sleepers that are closed, both poisons, fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sleep.kit import Rig

from torpor.sleep.poison import PATTERNS
from torpor.sleep.sleeper import Sleeper

SRC = Path(__file__).resolve().parents[2] / "src"

SleeperMaker = Callable[..., Sleeper]
FreshProcess = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def sleeper_for(tmp_path: Path) -> Iterator[SleeperMaker]:
    """Makes sleepers that spill into a private folder and are closed at the end."""
    made: list[Sleeper] = []

    def make(modules: Any, **options: Any) -> Sleeper:
        options.setdefault("spill_dir", tmp_path)
        made.append(Sleeper(modules, **options))
        return made[-1]

    yield make
    for sleeper in made:
        sleeper.close(discard=True)


@pytest.fixture
def rig_for(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs that spill into a private folder; their sleepers are closed at the end."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        options.setdefault("spill_dir", tmp_path)
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.device.disarm()
        rig.sleeper.close(discard=True)


@pytest.fixture(params=PATTERNS, ids=lambda pattern: f"poison-{pattern:#x}")
def pattern(request: pytest.FixtureRequest) -> int:
    """Both poison patterns, one after the other."""
    return int(request.param)


@pytest.fixture
def fresh_process(tmp_path: Path) -> FreshProcess:
    """Runs a script in a new interpreter, never in a fork; returns what it did."""

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(SRC), "TORPOR_SPILL_DIR": str(tmp_path)}
        command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, env=environment, check=False
        )

    return run
