"""Nothing that Python can intercept touches memory that is not there."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sleep.conftest import FreshProcess, SleeperMaker
from tests.sleep.samples import Net
from torch import nn

from torpor.errors import AsleepError, WeightsIncompleteError
from torpor.sleep.guard import Guard
from torpor.sleep.sleeper import Sleeper

X = torch.ones(2, 16)


class Deep(nn.Module):
    """Modules in modules, one of them with a hook that reads its weight before ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.LayerNorm(16)])
        self.layers[0].register_forward_pre_hook(_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.net(x)


def _scale(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0] * module.weight.mean(),)


USES: dict[str, Callable[[Deep], Any]] = {
    "call": lambda m: m(X),
    "forward": lambda m: m.forward(X),
    "call of a submodule": lambda m: m.layers[1](X),
    "forward of a submodule": lambda m: m.net.first.forward(X),
    "a pre-hook that reads the weight": lambda m: m.layers[0](X),
    "a bound method from a parent that is not ours": lambda m: nn.Sequential(m.net)(X),
    "state_dict": lambda m: m.state_dict(),
    "state_dict of a submodule": lambda m: m.layers[0].state_dict(),
    "state_dict of a parent": lambda m: nn.Sequential(m.net).state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({}, strict=False),
    "load_state_dict of a parent": lambda m: nn.Sequential(m.net).load_state_dict({}, strict=False),
    "to": lambda m: m.to(torch.float64),
    "float": lambda m: m.float(),
    "half of a submodule": lambda m: m.net.half(),
    "share_memory": lambda m: m.share_memory(),
    "deepcopy": lambda m: copy.deepcopy(m),
    "deepcopy of a leaf": lambda m: copy.deepcopy(m.layers[1]),
    "deepcopy of a parent": lambda m: copy.deepcopy({"model": m.net}),
    "pickle": lambda m: pickle.dumps(m),
    "pickle of a leaf": lambda m: pickle.dumps(m.net.second),
    "pickle in a container": lambda m: pickle.dumps([1, {"m": m.layers[1]}]),
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "torch.save of a leaf": lambda m: torch.save(m.layers[1], io.BytesIO()),
    "functional_call": lambda m: torch.func.functional_call(m, {}, (X,)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("level", [1, 2])
def test_use_while_asleep_raises(use: str, level: int, sleeper_for: SleeperMaker) -> None:
    module = Deep()
    sleeper = sleeper_for(module)
    sleeper.sleep(level)
    for _ in range(2):
        with pytest.raises(AsleepError, match=r"asleep: weights released; call wake_up\(\)"):
            USES[use](module)


@pytest.mark.parametrize("use", USES)
def test_use_before_the_weights_are_back_names_them(use: str, sleeper_for: SleeperMaker) -> None:
    module = Deep()
    sleeper = sleeper_for(module)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    sleeper.sleep(2)
    sleeper.wake_up()
    with pytest.raises(WeightsIncompleteError, match=r"reload_weights\(\)") as caught:
        USES[use](module)
    assert set(caught.value.names) == {name for name, _ in module.named_parameters()}
    sleeper.update_weights({name: weights[name] for name in sleeper.missing})
    USES[use](module)


@pytest.mark.parametrize("use", USES)
def test_use_after_the_wake_works(use: str, sleeper_for: SleeperMaker) -> None:
    module = Deep()
    sleeper = sleeper_for(module)
    sleeper.sleep()
    sleeper.wake_up()
    USES[use](module)


def dictionaries(module: nn.Module) -> list[dict[str, Any]]:
    """The instance dictionary of every submodule, hooks and all, by identity of the values."""
    return [
        {name: (id(item), list(item) if isinstance(item, dict) else None)
         for name, item in vars(part).items()}
        for part in module.modules()
    ]  # fmt: skip


def test_everything_is_taken_away_again(sleeper_for: SleeperMaker) -> None:
    module = Deep()
    before = dictionaries(module)
    sleeper = sleeper_for(module)
    assert dictionaries(module) == before, "while awake there is nothing in place"
    for level in (1, 2):
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        sleeper.sleep(level)
        assert dictionaries(module) != before
        sleeper.wake_up()
        if level == 2:
            sleeper.update_weights({name: weights[name] for name in sleeper.missing})
        assert dictionaries(module) == before


def test_methods_replaced_on_the_instance_are_put_back(sleeper_for: SleeperMaker) -> None:
    net = Net()

    def forward(x: torch.Tensor) -> str:
        return f"overridden {x.shape}"

    net.forward = forward
    sleeper = sleeper_for(net)
    sleeper.sleep()
    with pytest.raises(AsleepError):
        net(X)
    sleeper.wake_up()
    assert net.forward is forward
    assert net(X) == "overridden torch.Size([2, 16])"


def test_a_method_replaced_while_asleep_is_left_alone(sleeper_for: SleeperMaker) -> None:
    net = Net()
    sleeper = sleeper_for(net)
    sleeper.sleep()
    net.forward = lambda x: "mine"
    sleeper.wake_up()
    assert net(X) == "mine"


def test_the_signature_of_forward_stays_visible(sleeper_for: SleeperMaker) -> None:
    net = Net()
    expected = inspect.signature(net.forward)
    sleeper = sleeper_for(net)
    sleeper.sleep()
    assert inspect.signature(net.forward) == expected


def test_two_sleepers_over_one_module_take_their_own_away(sleeper_for: SleeperMaker) -> None:
    net = Net()
    before = dictionaries(net)
    first = sleeper_for(net)
    second = sleeper_for({"outer": nn.Sequential(net), "own": nn.Linear(2, 2)})
    for order in ([first, second], [second, first]):
        first.sleep()
        second.sleep()
        order[0].wake_up()
        with pytest.raises(AsleepError):
            net(X)
        order[1].wake_up()
        assert dictionaries(net) == before
        net(X)


def test_a_check_left_behind_is_harmless() -> None:
    """An interrupt can leave checks in place; they ask, and the answer is that all is well."""
    net, asked = Net(), 0

    def require() -> None:
        nonlocal asked
        asked += 1

    guard = Guard([net], [], require, require)
    guard.install()
    guard.install()
    assert guard.is_installed
    expected = net(X)
    copied = copy.deepcopy(net)
    assert torch.equal(copied(X), expected)
    assert net.state_dict().keys() == copied.state_dict().keys()
    assert asked > 4
    guard.remove()
    guard.remove()
    assert not guard.is_installed


def test_waking_one_of_two_tags_keeps_the_check(sleeper_for: SleeperMaker) -> None:
    net = Net()
    optimizer = _stepped(net)
    sleeper = sleeper_for(net, optimizer=optimizer)
    sleeper.sleep()
    sleeper.wake_up(["weights"])
    with torch.no_grad():
        net(X)
    with pytest.raises(AsleepError, match="asleep: optimizer released"):
        optimizer.step()
    sleeper.wake_up()
    optimizer.step()


# --- optimizers ----------------------------------------------------------------------------------


def _stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(X).sum().backward()
    optimizer.step()
    return optimizer


OPTIMIZER_USES: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "step": lambda _, o: o.step(),
    "step with a closure": lambda net, o: o.step(lambda: net(X).sum()),
    "zero_grad in place": lambda _, o: o.zero_grad(set_to_none=False),
    "zero_grad of the module": lambda net, _: net.zero_grad(set_to_none=False),
    "state_dict": lambda _, o: o.state_dict(),
    "load_state_dict": lambda _, o: o.load_state_dict({"state": {}, "param_groups": []}),
    "deepcopy": lambda _, o: copy.deepcopy(o),
    "pickle": lambda _, o: pickle.dumps(o),
    "torch.save": lambda _, o: torch.save({"o": o}, io.BytesIO()),
}


@pytest.mark.parametrize("use", OPTIMIZER_USES)
@pytest.mark.parametrize("tags", [None, ["optimizer"]], ids=["all", "optimizer"])
def test_use_of_a_sleeping_optimizer_raises(
    use: str, tags: list[str] | None, sleeper_for: SleeperMaker
) -> None:
    net = Net()
    optimizer = _stepped(net)
    before = {name: id(item) for name, item in vars(optimizer).items()}
    sleeper = sleeper_for(net, optimizer=optimizer)
    sleeper.sleep(tags=tags)
    with pytest.raises(AsleepError):
        OPTIMIZER_USES[use](net, optimizer)
    sleeper.wake_up()
    assert {name: id(item) for name, item in vars(optimizer).items()} == before
    optimizer.step()


def test_gradients_can_be_let_go_while_asleep(sleeper_for: SleeperMaker) -> None:
    net = Net()
    optimizer = _stepped(net)
    sleeper = sleeper_for(net, optimizer=optimizer)
    sleeper.sleep()
    optimizer.zero_grad()
    assert net.first.weight.grad is None
    sleeper.wake_up()
    net(X).sum().backward()
    optimizer.step()


def test_backward_into_a_sleeping_gradient_raises(sleeper_for: SleeperMaker) -> None:
    net = Net()
    optimizer = _stepped(net)
    sleeper = sleeper_for(net, optimizer=optimizer)
    loss = net(X).sum()
    expected = net.second.bias.grad.clone() + torch.autograd.grad(net(X).sum(), net.second.bias)[0]
    sleeper.sleep(tags=["optimizer"])
    with pytest.raises(AsleepError, match="optimizer released"):
        loss.backward()
    sleeper.wake_up()
    net(X).sum().backward()
    assert torch.equal(net.second.bias.grad, expected), "the hooks are gone, the gradients intact"
    assert not net.second.bias._backward_hooks


def test_backward_into_new_gradients_is_allowed(sleeper_for: SleeperMaker) -> None:
    net = Net()
    optimizer = _stepped(net)
    sleeper = sleeper_for(net, optimizer=optimizer)
    sleeper.sleep(tags=["optimizer"])
    optimizer.zero_grad()
    net(X).sum().backward()
    expected = net.first.weight.grad.clone()
    sleeper.wake_up()
    assert torch.equal(net.first.weight.grad, expected)


CRASHES = """
import faulthandler, io, pickle, sys
import torch
from torch import nn
from torpor.errors import AsleepError
from torpor.sleep.sleeper import Sleeper

faulthandler.disable()
layer = nn.Linear(64, 64)
layer.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
sleeper = Sleeper(layer)
sleeper.sleep()
sleeper._guard.remove()
{"call": lambda: layer(torch.ones(1, 64)), "pickle": lambda: pickle.dumps(layer)}[sys.argv[1]]()
"""


@pytest.mark.parametrize("use", ["call", "pickle"])
def test_without_the_guard_the_process_dies(use: str, fresh_process: FreshProcess) -> None:
    """What these tests would miss if the memory were still there."""
    assert fresh_process(CRASHES, use).returncode < 0


def test_guarding_costs_nothing_while_awake(sleeper_for: SleeperMaker) -> None:
    sleeper: Sleeper = sleeper_for(Net())
    assert not sleeper._guard.is_installed
    sleeper.sleep()
    assert sleeper._guard.is_installed
    sleeper.wake_up()
    assert not sleeper._guard.is_installed
