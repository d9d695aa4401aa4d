"""Failure at every step of sleep, wake and update: nothing is lost, nothing is wrong, all goes on.

Two injectors: a device that fails at its k-th call, and an interrupt at the k-th line of our own
code. After each, the sleeper has to be consistent, and either still answers right, or does so after
the call is made again, or names what has to be sent again.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tests.sleep.conftest import SleeperMaker
from tests.sleep.kit import MemorySource, Rig, expected, is_readable, weights_of

import torpor.sleep
from torpor.errors import (
    ArenaError,
    HostCopyError,
    OutOfMemoryError,
    StateError,
    TorporError,
    WeightsIncompleteError,
    WeightsMismatchError,
)

OLD, NEW = weights_of(1), weights_of(2)
OLD_ANSWER, NEW_ANSWER = expected(OLD), expected(NEW)
RigMaker = Callable[..., Rig]


@dataclass(frozen=True)
class Case:
    """One transition to disturb."""

    name: str
    before: Callable[[Rig], Any]
    """From awake and right to where the transition starts."""
    act: Callable[[Rig], Any]
    has_checkpoint: bool = False
    may_lose: bool = False
    """Whether an interrupted one may leave weights invalid by name: nobody has a copy of them."""
    on_foreign_write: str = "adopt"

    def options(self) -> dict[str, Any]:
        """What a rig for this case is made with."""
        return {
            "weights": OLD,
            "reload": MemorySource(OLD) if self.has_checkpoint else None,
            "on_foreign_write": self.on_foreign_write,
        }


def _without_copies(rig: Rig) -> None:
    """Awake and right, with host copies of other weights."""
    rig.sleeper.update_weights(NEW)
    _official(rig)


def _official(rig: Rig) -> None:
    if rig.sleeper._context.reload is not None:
        rig.sleeper.reload_weights()
    else:
        rig.sleeper.update_weights(OLD)


def _with_copies(rig: Rig) -> None:
    rig.sleeper.sleep(1)
    rig.sleeper.wake_up()


def _with_copies_of_old(rig: Rig) -> None:
    _official(rig)
    _with_copies(rig)


def _written_outside(rig: Rig) -> None:
    """Awake, with copies of NEW, and somebody has written OLD over it outside the door."""
    rig.sleeper.update_weights(NEW)
    _with_copies(rig)
    with torch.no_grad():
        rig.model.embed.copy_(OLD["embed"])
        rig.model.qk.copy_(torch.cat([OLD["q"], OLD["k"]]))
        rig.model.low.copy_(OLD["low"])
        rig.model.correction.copy_(OLD["correction"])
        rig.model.normed.copy_(rig.model.embed / 2)
        rig.model._double()
        rig.model.sinks.copy_(rig.model.doubled[:2])


def _spoilt(rig: Rig) -> None:
    """Awake, with copies of OLD, and somebody has written something else over it."""
    _with_copies_of_old(rig)
    with torch.no_grad():
        rig.model.embed.add_(1)
        rig.model.rope.mul_(2)
        rig.model.normed.zero_()


def _update_badly(rig: Rig) -> None:
    pairs = [*NEW.items(), ("q", torch.zeros(3))]
    with contextlib.suppress(WeightsMismatchError):
        rig.sleeper.update_weights(pairs)


CASES = [
    Case("sleep-1", _without_copies, lambda rig: rig.sleeper.sleep(1)),
    Case("sleep-1-clean", _with_copies, lambda rig: rig.sleeper.sleep(1)),
    Case("sleep-1-foreign", _written_outside, lambda rig: rig.sleeper.sleep(1)),
    Case("sleep-2", _without_copies, lambda rig: rig.sleeper.sleep(2), may_lose=True),
    Case("sleep-2-reload", _without_copies, lambda rig: rig.sleeper.sleep(2), has_checkpoint=True),
    Case("sleep-weights", _with_copies, lambda rig: rig.sleeper.sleep(1, ["weights"])),
    Case("deepen", lambda rig: rig.sleeper.sleep(1, ["weights"]),
         lambda rig: rig.sleeper.sleep(2), has_checkpoint=True),
    Case("wake-1", lambda rig: rig.sleeper.sleep(1), lambda rig: rig.sleeper.wake_up()),
    Case("wake-weights", lambda rig: rig.sleeper.sleep(1),
         lambda rig: rig.sleeper.wake_up(["weights"])),
    Case("wake-2-reload", lambda rig: rig.sleeper.sleep(2), lambda rig: rig.sleeper.wake_up(),
         has_checkpoint=True),
    Case("update", _with_copies_of_old, lambda rig: rig.sleeper.update_weights(NEW)),
    Case("update-dirty", _without_copies, lambda rig: rig.sleeper.update_weights(NEW),
         may_lose=True),
    Case("sleep-1-restore", _spoilt, lambda rig: rig.sleeper.sleep(1), on_foreign_write="restore"),
    Case("failed update", _with_copies_of_old, _update_badly),
]  # fmt: skip
IDS = [case.name for case in CASES]


def examine(case: Case, rig: Rig, *, may_lose: bool) -> None:
    """After a disturbed transition: consistent, and right now or after doing it again."""
    assert not rig.sleeper._is_inside(), "the lock is held for ever"
    rig.check_books()
    if case.act is _update_badly and rig.sleeper.update_is_open:
        # Interrupted while it was undoing the update: the next call goes on with it, and says so.
        with pytest.raises(StateError, match="undone after"):
            rig.output()
    if case.before is _spoilt and not rig.sleeper.is_sleeping and not rig.sleeper.verify().ok:
        rig.sleeper.sleep(1)  # What was written is still there, and the next sleep restores.
    if rig.sleeper.is_sleeping:
        rig.sleeper.wake_up()
        rig.check_books()
    missing = rig.sleeper.missing
    if missing:
        assert may_lose or case.has_checkpoint, f"lost: {missing}"
        assert set(missing) <= {"embed", "q", "k", "low", "correction"}
        with pytest.raises(WeightsIncompleteError) as caught:
            rig.output()
        assert caught.value.names == missing
        if case.has_checkpoint:
            rig.sleeper.reload_weights()
        else:
            rig.sleeper.update_weights(OLD)
    answer = rig.output()
    right = torch.equal(answer, OLD_ANSWER)
    right |= case.name.startswith("update") and torch.equal(answer, NEW_ANSWER)
    assert right, "a wrong answer"
    rig.check_books()
    if case.before is not _written_outside:
        assert rig.sleeper.verify().ok


ERRORS: list[Callable[[], BaseException]] = [
    lambda: ArenaError("injected"),
    lambda: HostCopyError("injected"),
    lambda: OutOfMemoryError("injected"),
    KeyboardInterrupt,
]


@pytest.mark.parametrize(
    ("when", "pattern"), [("before", 0xFF), ("after", 0x7F), ("lasting", 0xFF)]
)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_device_that_fails_at_any_call_loses_nothing(
    case: Case, when: str, pattern: int, rig_for: RigMaker
) -> None:
    rig = rig_for(poison=pattern, **case.options())
    for call in range(200):
        case.before(rig)
        error = ERRORS[call % len(ERRORS)]
        if when == "lasting" and error is KeyboardInterrupt:
            error = ERRORS[0]
        rig.device.arm(call, error, after=when == "after", lasting=when == "lasting")
        with contextlib.suppress(TorporError, KeyboardInterrupt):
            case.act(rig)
        rig.device.disarm()
        if when == "lasting" and rig.sleeper.is_sleeping:
            rig.sleeper.wake_up()  # Memory that could not be given back is there: that is no harm.
        # While the device fails, not even a host copy can be read back after a failed update.
        examine(case, rig, may_lose=case.may_lose or when == "lasting")
        if not rig.device.raised:
            break
    else:
        pytest.fail("the transition never ran through")
    assert call > 1, "nothing was disturbed"


ROOM = str(Path(torpor.sleep.__file__).parent)
FINALISERS = frozenset({"__del__", "free", "_forget"})


class LineInterrupt:
    """Raises KeyboardInterrupt at one line event of ``torpor.sleep`` in this thread, or counts."""

    def __init__(self, at: int | None = None) -> None:
        self.lines: list[tuple[str, int]] = []
        self.raised = False
        self._at = at

    def __enter__(self) -> LineInterrupt:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        inside = frame.f_code.co_filename.startswith(ROOM) and not _is_finaliser(frame)
        return self._on_line if inside else None

    def _on_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and not self.raised and not _is_artefact(frame):
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) - 1 == self._at:
                self.raised = True
                raise KeyboardInterrupt
        return self._on_line


def _is_finaliser(frame: FrameType) -> bool:
    # Python swallows what is raised in a finaliser: a real interrupt is lost there too.
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(ROOM):
        if at.f_code.co_name in FINALISERS:
            return True
        at = at.f_back
    return False


def _is_artefact(frame: FrameType) -> bool:
    # Places where a trace function is called but the interpreter never looks for interrupts, and
    # which no handler covers: the line of a ``with`` again when its block ends or raises, and a
    # bare ``try``.
    return frame.f_lasti in _artefacts(frame.f_code)


@functools.cache
def _artefacts(code: CodeType) -> frozenset[int]:
    steps = list(dis.get_instructions(code))
    names = [step.opname for step in steps]
    found = {index for index, name in enumerate(names) if name == "NOP"}
    if sys.version_info >= (3, 12):
        # The next turn of a comprehension, which has no frame of its own there any more.
        found |= {index for index, name in enumerate(names) if name == "FOR_ITER"}
    for index in range(len(steps)):
        if all(name == "LOAD_CONST" for name in names[index : index + 3]) and not any(
            step.argval is not None for step in steps[index : index + 3]
        ):
            found |= {index, index - 1} if names[index - 1] == "SWAP" else {index}
        if names[index : index + 2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            found.add(index)
    return frozenset(steps[index].offset for index in found)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_interrupt_at_any_line_loses_nothing(case: Case, rig_for: RigMaker) -> None:
    rig = rig_for(**case.options())
    case.before(rig)
    with LineInterrupt() as dry:
        case.act(rig)
    examine(case, rig, may_lose=case.may_lose)
    # Every line that runs, at its first time; in the plainest cases at its last time too.
    points = {line: index for index, line in reversed(list(enumerate(dry.lines)))}
    assert len(points) > 100
    chosen = set(points.values())
    if case.name in {"sleep-1", "wake-1", "wake-2-reload", "update"}:
        chosen.update({line: index for index, line in enumerate(dry.lines)}.values())
    kept: list[BaseException] = []  # As an interactive session keeps the last one.
    for at in sorted(chosen):
        case.before(rig)
        try:
            with LineInterrupt(at):
                case.act(rig)
        except KeyboardInterrupt as error:
            kept = [error]
        try:
            examine(case, rig, may_lose=case.may_lose)
        except BaseException as error:
            error.add_note(f"after an interrupt at {dry.lines[at]}")
            raise
    assert kept


def test_an_interrupt_while_a_pushed_pair_fails_never_makes_half_of_it_official(
    rig_for: RigMaker,
) -> None:
    rig = rig_for(weights=OLD)
    pushed = expected({**OLD, "embed": NEW["embed"]})

    def push() -> None:
        with contextlib.suppress(WeightsMismatchError):
            rig.sleeper.load_weights([("k", NEW["k"]), ("q", torch.zeros(3))])

    at, dry = 0, LineInterrupt()
    while at == 0 or at < len(dry.lines):
        _with_copies_of_old(rig)
        rig.sleeper.begin_update()
        rig.sleeper.load_weights([("embed", NEW["embed"])])
        interrupt = LineInterrupt(at) if dry.lines else dry
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            push()
        with contextlib.suppress(StateError):
            rig.sleeper.require_ready()  # An update that was left half undone is undone here.
        answer = rig.output()
        came_before = interrupt.raised and torch.equal(answer, pushed)
        assert came_before or torch.equal(answer, OLD_ANSWER), f"{dry.lines[at]}"
        at += interrupt is not dry


def test_an_interrupt_while_the_guard_is_put_up_does_not_leave_half_of_it(
    sleeper_for: SleeperMaker,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    sleeper = sleeper_for(model)
    dry = LineInterrupt()
    with dry:
        sleeper.begin_update()  # An open update is guarded, so that a forward finishes it.
    sleeper.finish_update()
    points = [index for index, (path, _) in enumerate(dry.lines) if path.endswith("guard.py")]
    assert len(points) > 20
    for at in points:
        with contextlib.suppress(KeyboardInterrupt), LineInterrupt(at):
            sleeper.begin_update()
        sleeper.sleep(1)  # Nothing in between that would tidy up.
        unguarded = [module for module in model.modules() if "forward" not in vars(module)]
        assert not unguarded, f"after an interrupt at {dry.lines[at]}"
        sleeper.wake_up()


ADOPTING = frozenset({"adopt.py", "arena.py", "storage.py", "walk.py", "escape.py", "ledger.py"})


def test_an_interrupt_while_optimizer_state_is_adopted_loses_nothing(
    sleeper_for: SleeperMaker,
) -> None:
    undisturbed = _training_losses(sleeper_for, None)
    dry = LineInterrupt()
    assert _training_losses(sleeper_for, dry) == undisturbed
    points = {line: index for index, line in reversed(list(enumerate(dry.lines)))}
    chosen = [index for (path, _), index in points.items() if Path(path).name in ADOPTING]
    assert len(chosen) > 50
    for at in chosen:
        losses = _training_losses(sleeper_for, LineInterrupt(at))
        assert losses == undisturbed, f"after an interrupt at {dry.lines[at]}"


def _training_losses(sleeper_for: SleeperMaker, interrupt: LineInterrupt | None) -> list[float]:
    """Three steps; after the first a sleep that may be cut short, then a whole one."""
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sleeper = sleeper_for(model, optimizer=optimizer)
    losses = [_step(model, optimizer)]
    if interrupt is not None:
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            sleeper.sleep(1)
        sleeper.wake_up()
        sleeper.sleep(1)
        sleeper.wake_up()
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        assert is_readable(spans), "state in memory that is not there"
    losses += [_step(model, optimizer) for _ in range(2)]
    sleeper.close()
    return losses


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.arange(8.0).reshape(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.item())
