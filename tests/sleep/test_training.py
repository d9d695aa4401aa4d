"""Training goes on after waking as if nothing had been: losses, weights and state bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sleep.conftest import FreshProcess, SleeperMaker
from tests.sleep.samples import bits
from torch import nn

from torpor.sleep.sleeper import Sleeper

MIB = 1024 * 1024


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


MODELS: dict[str, Callable[[], nn.Module]] = {"lstm": Recurrent, "transformer": Attention}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def build(model: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = MODELS[model]()
    return module, OPTIMIZERS[optimizer](module.parameters())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step))


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    between: Callable[[int, str], None] = lambda _step, _where: None,
) -> list[float]:
    """Losses of some steps; ``between`` is called before each, and before the optimizer's part."""
    losses = []
    for step in steps:
        between(step, "start")
        ids = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        between(step, "gradients")
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    state = {f"weights.{name}": bits(value) for name, value in module.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {
            f"state.{index}.{name}": bits(value)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
    return state


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_without_sleep(
    model: str, optimizer: str, pattern: int, sleeper_for: SleeperMaker
) -> None:
    """Sleeps before the first step, between steps, and between backward and step."""
    plain, plain_optimizer = build(model, optimizer)
    module, sleepy_optimizer = build(model, optimizer)
    # Both from aligned memory: an allocator's alignment alone may change the last bits.
    sleeper_for(plain)
    sleeper = sleeper_for(module, optimizer=sleepy_optimizer, poison=pattern)
    verified = []

    def nap(step: int, where: str) -> None:
        if step % 2 == (where == "gradients"):
            tags = [None, ["optimizer"], ["weights"]][step % 3]
            sleeper.sleep(1, tags)
            report = sleeper.wake_up()
            verified.append((report.verified, report.total_verifiable))

    expected = train(plain, plain_optimizer, range(8))
    assert train(module, sleepy_optimizer, range(8), nap) == expected
    assert expected[-1] < expected[0]
    assert everything(module, sleepy_optimizer) == everything(plain, plain_optimizer)
    assert all(count == total for count, total in verified)
    assert max(total for _, total in verified) > 3 * len(list(module.parameters())) - 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_level_2_sleep_with_the_weights_put_back_changes_nothing(
    optimizer: str, pattern: int, sleeper_for: SleeperMaker
) -> None:
    plain, plain_optimizer = build("lstm", optimizer)
    module, sleepy_optimizer = build("lstm", optimizer)
    sleeper_for(plain)
    sleeper = sleeper_for(module, optimizer=sleepy_optimizer, poison=pattern)

    def nap(step: int, _where: str) -> None:
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        sleeper.sleep(2)
        sleeper.wake_up()
        sleeper.update_weights({name: weights[name] for name in sleeper.missing})

    expected = train(plain, plain_optimizer, range(4))
    assert train(module, sleepy_optimizer, range(4), nap) == expected
    assert everything(module, sleepy_optimizer) == everything(plain, plain_optimizer)


def optimizer_names(sleeper: Sleeper) -> set[str]:
    return {row.name for row in sleeper.table() if row.tag == "optimizer"}


def test_state_is_adopted_once_it_exists(sleeper_for: SleeperMaker) -> None:
    module, optimizer = build("lstm", "adamw")
    sleeper = sleeper_for(module, optimizer=optimizer)
    report = sleeper.sleep()
    assert report.tags == ("weights",)
    sleeper.wake_up()
    assert optimizer_names(sleeper) == set()
    train(module, optimizer, range(1))
    addresses = {
        id(value): value.data_ptr() for value in optimizer.state[module.head.bias].values()
    }
    assert sleeper.sleep().tags == ("weights", "optimizer")
    sleeper.wake_up()
    names = optimizer_names(sleeper)
    assert {
        "optimizer.state[head.bias].exp_avg",
        "optimizer.state[head.bias].exp_avg_sq",
        "optimizer.state[head.bias].step",
        "optimizer.grad[head.bias]",
    } <= names
    assert len(names) == 4 * len(list(module.parameters()))
    for value in optimizer.state[module.head.bias].values():
        assert value.data_ptr() != addresses[id(value)], "the same objects, in the arena"


def test_the_optimizer_sleeps_alone(sleeper_for: SleeperMaker) -> None:
    module, optimizer = build("transformer", "adamw")
    sleeper = sleeper_for(module, optimizer=optimizer)
    train(module, optimizer, range(2))
    expected = everything(module, optimizer)
    logits = module(batch(0)).detach()
    for level in (1, 2):
        report = sleeper.sleep(level, tags="optimizer")
        assert report.tags == ("optimizer",)
        assert sleeper.tag_states == {"weights": "resident", "optimizer": "released"}
        assert report.released_bytes["buffer"] > 2 * sum(p.nbytes for p in module.parameters())
        with torch.no_grad():
            assert torch.equal(module(batch(0)), logits)
        assert sleeper.wake_up("optimizer").tags == ("optimizer",)
        assert everything(module, optimizer) == expected


def test_new_gradients_take_the_place_of_old_ones(sleeper_for: SleeperMaker) -> None:
    module, optimizer = build("lstm", "sgd")
    sleeper = sleeper_for(module, optimizer=optimizer)
    held = []
    for step in range(3):
        train(module, optimizer, range(step, step + 1))
        held.append((module.head.bias.grad, bits(module.head.bias.grad)))
        report = sleeper.sleep()
        assert report.escaped == ()
        assert report.residents == ()
        sleeper.wake_up()
    assert [bits(grad) for grad, _ in held] == [expected for _, expected in held]


def test_sparse_gradients_stay_resident(sleeper_for: SleeperMaker) -> None:
    module = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(module.parameters())
    sleeper = sleeper_for(module, optimizer=optimizer)
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    report = sleeper.sleep()
    assert [item.name for item in report.residents] == ["optimizer.grad[weight]"]
    sleeper.wake_up()
    assert module.weight.grad.to_dense()[1].tolist() == [1.0] * 4
    optimizer.zero_grad()
    assert sleeper.sleep().residents == ()


def test_several_optimizers(sleeper_for: SleeperMaker) -> None:
    module, _ = build("lstm", "sgd")
    first = torch.optim.SGD(module.lstm.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(module.head.parameters())
    sleeper = sleeper_for(module, optimizer={"lstm": first, "head": second})
    module(batch(0)).sum().backward()
    first.step()
    second.step()
    sleeper.sleep()
    sleeper.wake_up()
    names = optimizer_names(sleeper)
    assert "lstm.state[lstm.weight_hh_l0].momentum_buffer" in names
    assert "head.state[head.weight].exp_avg" in names


def test_loading_an_optimizer_state_replaces_what_was_owned(sleeper_for: SleeperMaker) -> None:
    module, optimizer = build("lstm", "adamw")
    sleeper = sleeper_for(module, optimizer=optimizer)
    train(module, optimizer, range(1))
    sleeper.sleep()
    sleeper.wake_up()
    count = len(sleeper.table())
    optimizer.load_state_dict(optimizer.state_dict())
    train(module, optimizer, range(1, 2))
    expected = everything(module, optimizer)
    report = sleeper.sleep()
    assert (report.escaped, report.residents) == ((), ())
    sleeper.wake_up()
    assert len(sleeper.table()) == count
    assert everything(module, optimizer) == expected


MEASURED = """
import gc
import sys
import torch
from torch import nn
from torpor.sleep.procfs import process_rss_bytes
from torpor.sleep.sleeper import Sleeper

"""
"""Start of scripts that measure what their process holds: no other test has left anything in it."""

THOUSAND = """
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(module.parameters()) if sys.argv[1] == "optimizer" else None
if optimizer is not None:
    module(torch.ones(2, 32)).sum().backward()
    optimizer.step()
sleeper = Sleeper(module, optimizer=optimizer)
expected = module(torch.ones(1, 32)).detach().clone()
for number in range(1, 1001):
    sleeper.sleep()
    sleeper.wake_up()
    if number == 200:
        gc.collect()
        at_cycle_200 = process_rss_bytes()
gc.collect()
print(process_rss_bytes() - at_cycle_200)
assert torch.equal(module(torch.ones(1, 32)), expected)
sleeper.close()
"""

WITH_TRAINING = """
torch.manual_seed(0)
module = nn.LSTM(8, 12, num_layers=2)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
sleeper = Sleeper(module, optimizer=optimizer)
seen, sizes = set(), []
for _ in range(400):
    optimizer.zero_grad()
    module(torch.randn(6, 4, 8))[0].sum().backward()
    optimizer.step()
    sleeper.sleep()
    report = sleeper.wake_up()
    seen.add((len(sleeper.table()), report.mapped_bytes))
    sizes.append(process_rss_bytes())
assert len(seen) == 1, f"as many tensors, and no byte more for the dead ones: {seen}"
print(sizes[-1] - sizes[200])
sleeper.close()
"""


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
def test_a_thousand_cycles_leave_no_residue(kind: str, fresh_process: FreshProcess) -> None:
    """The first cycles warm up: some hundreds of looks at the heap take and give back a list of
    all objects, megabytes whose place the allocator keeps at one of them."""
    done = fresh_process(MEASURED + THOUSAND, kind)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MIB // 2


def test_training_between_cycles_leaves_no_residue(fresh_process: FreshProcess) -> None:
    """Every sleep finds new gradients; the arenas of the old ones have to go."""
    done = fresh_process(MEASURED + WITH_TRAINING)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MIB // 2
