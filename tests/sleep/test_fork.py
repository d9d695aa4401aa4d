"""A forked child has its parent's copies to read, and must not spoil them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.sleep.conftest import FreshProcess

CHILD = """
    import os, sys
    import torch
    from torch import nn
    from torpor.sleep.sleeper import Sleeper

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 5))
    sleeper = Sleeper(model, spill_dir={folder!r})
    given = torch.randn(2, 300)
    expected = model(given)
    sleeper.sleep(1)
    child = os.fork()
    if child == 0:
        {act}
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    report = sleeper.wake_up()
    assert report.verified == report.total_verifiable == 4
    assert torch.equal(model(given), expected)
    print("intact")
"""
ACTS = {
    "drops the copies": "sleeper.sleep(2)",
    "trains": (
        "sleeper.wake_up(); assert torch.equal(model(given), expected); "
        "sleeper.update_weights([(n, torch.ones_like(p)) for n, p in model.named_parameters()]); "
        "sleeper.sleep(1); sleeper.wake_up(); assert not torch.equal(model(given), expected)"
    ),
    "closes": "sleeper.close(discard=True)",
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_a_forked_child_leaves_its_parents_copies_alone(
    tmp_path: Path, fresh_process: FreshProcess, act: str
) -> None:
    done = fresh_process(textwrap.dedent(CHILD).format(folder=str(tmp_path), act=act))
    assert done.stdout.strip() == "intact", done.stderr
