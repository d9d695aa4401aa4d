"""Small operations on the CPU compute what torch's do, and start none of torch's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from torpor.model.layers.one_thread import cos_sin, take_rows


def test_cosines_and_sines_are_those_of_float32_angles() -> None:
    positions_T, inv_freq = torch.arange(0, 131_072, 97), 1e4 ** -(torch.arange(32) / 32)
    cos, sin = cos_sin(positions_T, inv_freq)
    angles = torch.outer(positions_T.float(), inv_freq).double()
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_those_of_an_embedding(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 24).to(dtype)
    ids_T = torch.randint(0, 50, (300,))
    taken = take_rows(weight, ids_T)
    assert taken.dtype == dtype
    assert torch.equal(taken, functional.embedding(ids_T, weight))


def test_no_ids_take_no_rows() -> None:
    assert take_rows(torch.randn(5, 8), torch.tensor([], dtype=torch.int64)).shape == (0, 8)


THREADS = """
import os
import torch
from torpor.model.layers.one_thread import cos_sin, take_rows
torch.set_num_threads(2)
weight, ids = torch.empty(4096, 256), torch.arange(2048)
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
cos_sin(ids, torch.ones(64))
take_rows(weight, ids)
assert threads() == before, "a thread of torch's has started"
torch.nn.functional.embedding(ids, weight)
assert threads() > before, "this would be seen"
"""


def test_torch_starts_no_threads_for_them() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=120)
