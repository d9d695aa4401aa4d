"""A tiny random model folder, and ways to spoil a model behind the engine's back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.engine.conftest import write_model

from torpor.engine.llm import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder with random weights."""
    return write_model(tmp_path_factory.mktemp("tiny"), seed=0)


def flip_a_bit(llm: LLM, name: str = "model.norm.weight") -> None:
    """Change one bit of one weight in memory, past every door."""
    (root,) = llm.sleeper._roots.values()
    weight = root.get_parameter(name)
    with torch.no_grad():
        weight.view(torch.int32)[0] ^= 1 << 22
