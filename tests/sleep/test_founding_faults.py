"""The two faults that ownership was made for, and a control that shows them happening.

(a) A constant is thrown away because it was made while the weights were.
(b) A second base ``__init__`` wipes what the first has registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.samples import bits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torpor.errors import DoubleInitError, OwnershipError
from torpor.sleep.building import building
from torpor.sleep.classes import OwnershipClass

# --- (a) the lost constant -----------------------------------------------------------------------


class Plain(nn.Module):
    """A projection whose scale is a constant kept as an ordinary attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.scale = torch.full((4,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.scale


class Registered(Plain):
    """The same, with the constant registered and kept out of ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        scale = self.__dict__.pop("scale")
        self.register_buffer("scale", scale, persistent=False)


class AllocationScope:
    """Sleep as it is often done: all that was allocated in the scope is called weights.

    Level 2 throws the bytes away, and waking promises only that the addresses are back; the
    checkpoint then fills the names that it knows.
    """

    def __init__(self) -> None:
        self._made: list[torch.UntypedStorage] = []

    @contextmanager
    def open(self) -> Iterator[None]:
        made = self._made

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    made.append(result.untyped_storage())
                return result

        with Recorder():
            yield

    def sleep_level_2_and_wake(self) -> None:
        for storage in self._made:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


X = torch.arange(8.0).view(2, 4)


@pytest.mark.parametrize("kind", [Plain, Registered])
def test_the_control_loses_the_constant(kind: type[Plain]) -> None:
    """Without this the tests below could pass on a machine where nothing is ever lost."""
    scope = AllocationScope()
    with scope.open():
        module = kind()
    checkpoint = {name: value.clone() for name, value in module.state_dict().items()}
    expected = module(X)
    scope.sleep_level_2_and_wake()
    module.load_state_dict(checkpoint)  # every name is found, nothing is reported missing
    assert torch.equal(module.proj.weight, checkpoint["proj.weight"])
    assert module.scale.isnan().all()
    assert not torch.equal(module(X), expected)


def forget_everything_that_may_be(module: Plain, sleeper: Any) -> None:
    checkpoint = {name: value.clone() for name, value in module.state_dict().items()}
    sleeper.sleep(2)
    sleeper.wake_up()
    sleeper.update_weights(checkpoint)


def test_a_plain_constant_survives_and_is_reported(pattern: int, sleeper_for: SleeperMaker) -> None:
    module = Plain()
    sleeper = sleeper_for(module, poison=pattern)
    expected = module(X)
    for _ in range(2):
        forget_everything_that_may_be(module, sleeper)
        assert torch.equal(module(X), expected)
    report = sleeper.sleep(2)
    assert [(item.name, item.nbytes, item.reason) for item in report.residents] == [
        ("scale", 16, "no owner declared it")
    ]
    assert report.resident_bytes == 16
    assert module.scale.tolist() == [0.5] * 4, "readable even now"


def test_a_registered_constant_survives_and_stays_out_of_the_state_dict(
    pattern: int, sleeper_for: SleeperMaker
) -> None:
    module = Registered()
    sleeper = sleeper_for(module, poison=pattern, strict=True)
    expected, constant = module(X), bits(module.scale)
    for _ in range(2):
        forget_everything_that_may_be(module, sleeper)
        assert torch.equal(module(X), expected)
    assert bits(module.scale) == constant
    assert set(module.state_dict()) == {"proj.weight", "proj.bias"}
    assert sleeper.sleep(2).residents == ()


def test_a_declared_constant_survives(pattern: int, sleeper_for: SleeperMaker) -> None:
    module = Plain()
    sleeper = sleeper_for(module, poison=pattern)
    sleeper.own(module.scale, name="scale", cls=OwnershipClass.BUFFER)
    expected = module(X)
    forget_everything_that_may_be(module, sleeper)
    assert torch.equal(module(X), expected)
    assert sleeper.sleep(2).residents == ()


def test_when_a_constant_was_made_does_not_matter(pattern: int, sleeper_for: SleeperMaker) -> None:
    """P2: the same tensor, made before, inside or after the module, fares the same."""
    early = torch.full((4,), 0.5)
    module = Plain()
    late = torch.full((4,), 0.5)
    for constant in (early, module.scale, late):
        module.scale = constant
        sleeper = sleeper_for(module, poison=pattern)
        forget_everything_that_may_be(module, sleeper)
        assert constant.tolist() == [0.5] * 4
        sleeper.close()


# --- (b) the wiped registration ------------------------------------------------------------------


class Sinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sink_key = nn.Parameter(torch.zeros(2, 4))
        self.register_buffer("sink_value", torch.zeros(2, 4), persistent=False)


class Projection(nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)  # by name, whatever was initialised before
        self.proj = nn.Linear(4, 4)


class Wiping(Sinks, Projection):
    def __init__(self) -> None:
        Sinks.__init__(self)
        Projection.__init__(self)


def test_the_control_wipes_what_was_registered() -> None:
    names = {name for name, _ in Wiping().named_parameters()}
    assert "sink_key" not in names, "torch itself says nothing"


def test_wiping_is_refused_with_the_names_of_what_would_be_lost() -> None:
    with building(), pytest.raises(DoubleInitError) as caught:
        Wiping()
    message = str(caught.value)
    assert all(word in message for word in ("sink_key", "sink_value", "Wiping", __file__))
    assert isinstance(caught.value, OwnershipError)


class Cooperative(Sinks):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)


def test_a_model_built_under_watch_sleeps_strictly(pattern: int, sleeper_for: SleeperMaker) -> None:
    """Both guards together, as an engine uses them: build, adopt strictly, sleep, wake."""
    with building() as records:
        module = nn.Sequential(Cooperative(), Registered())
    sleeper = sleeper_for(module, strict=True, records=records, poison=pattern)
    with torch.no_grad():
        module[0].sink_value.fill_(3)
    forget_everything_that_may_be(module, sleeper)
    assert module[0].sink_value.tolist() == [[3.0] * 4] * 2
    with (
        pytest.raises(OwnershipError, match=r"1\.scale \(16 bytes, made at .*test_founding"),
        building() as records,
    ):
        sleeper_for(nn.Sequential(Cooperative(), Plain()), strict=True, records=records)
