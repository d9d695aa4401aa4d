"""``-k openpangu`` finds the sleep tests in the suite, and they leave no combination out."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.openpangu.models import MODELS
from tests.openpangu.test_sleep import ORDERS, PLACED

MODULE = "tests/openpangu/test_sleep.py"
CYCLES = "test_three_cycles_of_sleep_change_no_bit"


def test_the_suite_collects_every_cycle_of_sleep(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    assert pytestconfig.getini("testpaths") == ["tests"]
    make = re.search(r"^test:.*\n\t(.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert make is not None
    assert make[1].split("-m pytest")[1].split() == ["-n", "2", "$(ARGS)"]
    ids = collected(root)
    cells = {re.sub(r".*\[(.*)\]", r"\1", line) for line in ids if CYCLES in line}
    assert cells == {
        f"{' '.join(placed)}-{level}-{order}"
        for placed, level, order in itertools.product(PLACED, (1, 2), ORDERS)
    }


def collected(root: Path) -> list[str]:
    """Ids that pytest finds by the word alone, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", "openpangu", MODULE]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if line.startswith(MODULE)]


def test_no_architecture_level_order_or_placement_is_left_out() -> None:
    placements: dict[str, set[str]] = {}
    for kind, placement in PLACED:
        architecture = MODELS[kind]["architectures"][0]
        sinks = "with sinks" if MODELS[kind].get("param_sink_number") else "without"
        placements.setdefault(f"{architecture} {sinks}", set()).add(placement)
    assert placements == {
        "PanguEmbeddedForCausalLM without": {"merged"},
        "PanguProMoEForCausalLM without": {"merged"},
        "PanguProMoEV2ForCausalLM with sinks": {"merged", "reserved"},
        "PanguUltraMoEForCausalLM without": {"merged"},
        "PanguUltraMoEForCausalLM with sinks": {"merged", "reserved"},
    }
    assert {config["architectures"][0] for config in MODELS.values()} == {
        name.split()[0] for name in placements
    }
    assert len(ORDERS) == 3
