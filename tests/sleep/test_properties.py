"""Random sequences of sleep, wake, update, failure and foreign writes against a small model.

The model knows nothing of memory: it keeps the official content of every checkpoint name, which
tensors are valid, which content their host copies hold, and the level of every sleeping tag.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.sleep.kit import MemorySource, Rig, Weights, expected, weights_of

from torpor.errors import (
    ArenaError,
    AsleepError,
    ForeignWriteError,
    StateError,
    WeightsIncompleteError,
    WeightsMismatchError,
)
from torpor.sleep.choices import tags_from

CHECKPOINT = 1
SEEDS = st.integers(1, 3)
FOREIGN_SEED = 9
PARTS = {"embed": ("embed",), "qk": ("q", "k"), "low": ("low",), "correction": ("correction",)}
OWNER = {name: entry for entry, names in PARTS.items() for name in names}
NAMES = st.lists(st.sampled_from(sorted(OWNER)), min_size=1, max_size=5, unique=True)
LEVELS = st.sampled_from([1, 2])
TAGS = st.sampled_from(
    [None, ["weights"], ["kv_cache"], ["graphs"], ["weights", "graphs"], ["kv_cache", "weights"]]
)
OWNED_TAGS = ("weights", "kv_cache", "graphs")
VALUES = {seed: weights_of(seed) for seed in (1, 2, 3, FOREIGN_SEED)}

Content = tuple[int, ...]
"""The seed that each part of an entry was made from."""


class Machine(RuleBasedStateMachine):
    """One sleeper and its model."""

    on_foreign_write = "adopt"

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.source = MemorySource(VALUES[CHECKPOINT])
        self.rig = Rig(
            weights=VALUES[CHECKPOINT], reload=self.source, spill_dir=folder,
            on_foreign_write=self.on_foreign_write,
        )  # fmt: skip
        self.stack.callback(self.rig.sleeper.close, discard=True)
        self.content: dict[str, Content] = {
            entry: (CHECKPOINT,) * len(names) for entry, names in PARTS.items()
        }
        self.valid = dict.fromkeys(PARTS, True)
        self.copies: dict[str, Content | None] = dict.fromkeys(PARTS)
        self.written: dict[str, int] = {}
        """What was sent of tensors that are invalid still."""
        self.foreign = False
        """Whether ``low`` was written outside the door."""
        self.released: dict[str, int] = {}
        self.from_checkpoint = True
        self.epochs = (0, 0)

    def teardown(self) -> None:
        self.stack.close()

    # -- the model --------------------------------------------------------------------------------

    def is_clean(self, entry: str) -> bool:
        return self.copies[entry] == self.content[entry]

    def missing(self) -> list[str]:
        return [
            name
            for name, entry in OWNER.items()
            if not self.valid[entry] and name not in self.written
        ]

    def weights(self) -> Weights:
        made = {
            name: VALUES[seed][name]
            for entry, names in PARTS.items()
            for name, seed in zip(names, self.content[entry], strict=True)
        }
        return made | ({"low": VALUES[FOREIGN_SEED]["low"]} if self.foreign else {})

    def send(self, names: Iterable[str], seed: int) -> None:
        """What an update that is accepted does."""
        for name in names:
            entry = OWNER[name]
            if self.valid[entry]:
                content = dict(zip(PARTS[entry], self.content[entry], strict=True)) | {name: seed}
                self.content[entry] = tuple(content.values())
            else:
                self.written[name] = seed
        self.foreign &= "low" not in names
        for entry, parts in PARTS.items():
            if not self.valid[entry] and all(part in self.written for part in parts):
                self.valid[entry] = True
                self.content[entry] = tuple(self.written.pop(part) for part in parts)
                self.copies[entry] = None

    def accept(self, names: Iterable[str], seed: int) -> None:
        """An update from elsewhere than the checkpoint."""
        self.send(names, seed)
        self.from_checkpoint = False

    def fail_to_send(self, names: Iterable[str], seed: int) -> None:
        """What an update that is undone does to the tensors it touched."""
        for entry in {OWNER[name] for name in names}:
            content = dict(zip(PARTS[entry], self.content[entry], strict=True))
            same = all(content[part] == seed for part in PARTS[entry] if part in names)
            self.valid[entry] &= self.is_clean(entry) or same
            for part in PARTS[entry]:
                self.written.pop(part, None)
        self.foreign &= "low" not in names

    def fall(self, level: int, tags: tuple[str, ...]) -> None:
        """What a sleep that succeeds does."""
        if "weights" in tags and "weights" not in self.released:
            self.written.clear()
            for entry in PARTS:
                if level == 1 and self.valid[entry]:
                    self.copies[entry] = self.content[entry]
        if "weights" in tags and max(level, self.released.get("weights", 0)) == 2:
            self.valid = dict.fromkeys(PARTS, False)
            self.copies = dict.fromkeys(PARTS)
        for tag in tags:
            self.released[tag] = max(level, self.released.get(tag, 0))

    def rise(self, tags: tuple[str, ...], *, reloaded: bool) -> None:
        """What a wake that succeeds does."""
        if "weights" in tags and "weights" in self.released:
            self.valid = {entry: self.is_clean(entry) for entry in PARTS}
            self.written.clear()
        if reloaded:
            self.send(OWNER, CHECKPOINT)
            self.from_checkpoint = True
        for tag in tags:
            self.released.pop(tag, None)

    # -- sleep and wake ---------------------------------------------------------------------------

    @rule(level=LEVELS, tags=TAGS)
    def sleep(self, level: int, tags: list[str] | None) -> None:
        wanted = tuple(tag for tag in tags_from(tags) if tag in OWNED_TAGS)
        if self.foreign and "weights" in wanted and "weights" not in self.released:
            if not self.answers_foreign_write(level, tags):
                return
        else:
            report = self.rig.sleeper.sleep(level, tags)
            assert report.adopted == ()
            assert set(report.tags) == set(wanted) - set(self.released)
            deeper = any(self.released.get(tag, 2) < level for tag in wanted)
            assert report.changed == (bool(report.tags) or deeper)
            if level == 1 and "weights" in report.tags and all(map(self.is_clean, PARTS)):
                assert report.copied_bytes in (0, *self.small_copies())
        self.fall(level, wanted)

    def small_copies(self) -> Iterator[int]:
        """What may be copied although all weights are clean: derived tensors and the buffer."""
        sizes = [self.rig.entry(name).nbytes for name in ("rope", "normed", "doubled")]
        yield from {a * sizes[0] + b * sizes[1] for a in (0, 1) for b in (0, 1, 2)}

    def answers_foreign_write(self, level: int, tags: list[str] | None) -> bool:
        """Sleep with a foreign write pending; whether the sleep goes on."""
        policy = self.on_foreign_write
        if policy == "error" or (policy == "restore" and not self.is_clean("low")):
            with pytest.raises(ForeignWriteError) as caught:
                self.rig.sleeper.sleep(level, tags)
            assert caught.value.names == ("low",)
            return False
        epoch = self.rig.sleeper.weights_epoch
        report = self.rig.sleeper.sleep(level, tags)
        self.foreign = False
        if policy == "adopt":
            assert report.adopted == ("low",)
            assert report.weights_epoch == epoch + 1
            self.content["low"] = (FOREIGN_SEED,)
            self.from_checkpoint = False
        else:
            assert (report.adopted, report.weights_epoch) == ((), epoch)
        return True

    @rule(tags=TAGS, reload=st.sampled_from([None, None, True, False]))
    def wake(self, tags: list[str] | None, reload: bool | None) -> None:
        rising = tuple(tag for tag in tags_from(tags) if tag in self.released)
        will_reload = self.will_reload(tags, reload)
        if will_reload is None:
            with pytest.raises(StateError, match="would undo them"):
                self.rig.sleeper.wake_up(tags, reload=reload)
            return
        report = self.rig.sleeper.wake_up(tags, reload=reload)
        assert set(report.tags) == set(rising)
        assert report.reloaded == will_reload
        self.rise(rising, reloaded=will_reload)
        if "weights" in rising:
            assert list(report.missing) == self.missing()

    def will_reload(self, tags: list[str] | None, reload: bool | None) -> bool | None:
        """Whether a wake reads the checkpoint; None when it is refused."""
        if "weights" not in tags_from(tags):
            return False
        if "weights" not in self.released:
            return reload is True and not all(self.valid.values())
        if reload is not None:
            return reload
        if tags is not None or all(map(self.is_clean, PARTS)):
            return False
        if self.from_checkpoint:
            return True
        return False if self.released["weights"] == 1 else None

    @precondition(lambda self: not self.foreign)
    @rule(level=LEVELS, tags=TAGS, call=st.integers(0, 20), after=st.booleans())
    def sleep_on_a_failing_device(
        self, level: int, tags: list[str] | None, call: int, after: bool
    ) -> None:
        wanted = tuple(tag for tag in tags_from(tags) if tag in OWNED_TAGS)
        self.rig.device.arm(call, lambda: ArenaError("injected"), after=after)
        try:
            self.rig.sleeper.sleep(level, tags)
        except ArenaError:
            assert self.rig.device.raised
            self.look_at_what_a_rollback_left(level, wanted)
        else:
            assert not self.rig.device.raised
            self.fall(level, wanted)
        finally:
            self.rig.device.disarm()

    def look_at_what_a_rollback_left(self, level: int, wanted: tuple[str, ...]) -> None:
        for name in PARTS:
            entry = self.rig.entry(name)
            if entry.host is None:
                self.copies[name] = None
            elif not entry.is_dirty:
                self.copies[name] = self.content[name]
            if "weights" in self.released or entry.valid == self.valid[name]:
                continue
            if not self.valid[name]:
                self.valid[name] = True  # The bytes were right; the answer will tell.
                continue
            assert level == 2, "level 1 has copies of everything"
            assert entry.is_dirty
            assert "weights" in wanted
            self.valid[name] = False
        if "weights" in wanted and any(not self.valid[OWNER[name]] for name in self.written):
            actual = {n for n in self.written if n in self.rig.entry(OWNER[n]).covered}
            self.written = {name: self.written[name] for name in actual}

    @rule(call=st.integers(0, 60), after=st.booleans())
    def wake_on_a_failing_device(self, call: int, after: bool) -> None:
        will_reload = self.will_reload(None, None)
        if will_reload is None:
            return
        self.rig.device.arm(call, lambda: ArenaError("injected"), after=after)
        try:
            self.rig.sleeper.wake_up()
        except ArenaError:
            assert self.rig.device.raised
        else:
            assert not self.rig.device.raised
            self.rise(OWNED_TAGS, reloaded=will_reload)
        finally:
            self.rig.device.disarm()

    # -- the door ---------------------------------------------------------------------------------

    @rule(names=NAMES, seed=SEEDS, how=st.sampled_from(["whole", "pushed", "implied"]))
    def update(self, names: list[str], seed: int, how: str) -> None:
        pairs = {name: VALUES[seed][name] for name in names}
        if "weights" in self.released:
            with pytest.raises(AsleepError):
                self.rig.sleeper.update_weights(pairs)
            return
        sleeper = self.rig.sleeper
        before, epoch = self.weights(), sleeper.weights_epoch
        self.accept(names, seed)
        with self.raises_if_incomplete():
            if how == "whole":
                sleeper.update_weights(pairs)
            else:
                sleeper.begin_update()
                for pair in pairs.items():
                    assert sleeper.load_weights([pair]) == {OWNER[pair[0]]}
                sleeper.finish_update() if how == "pushed" else sleeper.verify()
        after = self.weights()
        if not self.missing() and all(torch.equal(before[n], after[n]) for n in names):
            assert sleeper.weights_epoch == epoch

    @contextlib.contextmanager
    def raises_if_incomplete(self) -> Iterator[None]:
        missing = self.missing()
        if not missing:
            yield
            return
        with pytest.raises(WeightsIncompleteError) as caught:
            yield
        assert list(caught.value.names) == missing

    @precondition(lambda self: "weights" not in self.released)
    @rule(names=NAMES, seed=SEEDS)
    def update_that_fails(self, names: list[str], seed: int) -> None:
        pairs: list[tuple[str, Any]] = [(name, VALUES[seed][name]) for name in names]
        with pytest.raises(WeightsMismatchError):
            self.rig.sleeper.update_weights([*pairs, ("q", torch.zeros(1))])
        self.fail_to_send(names, seed)

    @precondition(lambda self: "weights" not in self.released)
    @rule(names=NAMES, seed=SEEDS, call=st.integers(0, 3), after=st.booleans())
    def update_on_a_failing_device(
        self, names: list[str], seed: int, call: int, after: bool
    ) -> None:
        pairs = {name: VALUES[seed][name] for name in names}
        self.rig.device.arm(call, lambda: ArenaError("injected"), after=after)
        try:
            self.rig.sleeper.update_weights(pairs)
        except ArenaError:
            assert self.rig.device.raised
            self.fail_to_send(names, seed)
        except WeightsIncompleteError:
            self.accept(names, seed)  # The invariants look at what is missing.
        else:
            self.accept(names, seed)
        finally:
            self.rig.device.disarm()

    @precondition(lambda self: "weights" not in self.released)
    @rule()
    def reload(self) -> None:
        self.send(OWNER, CHECKPOINT)
        self.from_checkpoint = True
        assert self.rig.sleeper.reload_weights().updated == len(OWNER)

    @precondition(lambda self: "weights" not in self.released and all(self.valid.values()))
    @rule()
    def write_outside_the_door(self) -> None:
        self.rig.model.low.data.copy_(VALUES[FOREIGN_SEED]["low"])
        self.foreign = self.content["low"] != (FOREIGN_SEED,)

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        self.rig.check_books()
        assert {tag: state == "released" for tag, state in self.rig.sleeper.tag_states.items()} == {
            tag: tag in self.released for tag in OWNED_TAGS
        }
        assert self.rig.sleeper.is_sleeping == bool(self.released)
        assert dict(self.rig.sleeper._context.released) == self.released

    @invariant()
    def epochs_only_grow(self) -> None:
        epochs = (self.rig.sleeper.weights_epoch, self.rig.sleeper.kv_epoch)
        assert epochs >= self.epochs
        assert epochs[1] >= self.epochs[1]
        self.epochs = epochs

    @invariant()
    def the_answer_is_right_or_a_typed_error(self) -> None:
        missing = self.missing()
        if "weights" not in self.released:
            assert list(self.rig.sleeper.missing) == missing
        if self.released:
            with pytest.raises(AsleepError):
                self.rig.output()
        elif missing:
            with pytest.raises(WeightsIncompleteError) as caught:
                self.rig.output()
            assert list(caught.value.names) == missing
        else:
            assert torch.equal(self.rig.output(), expected(self.weights()))

    @invariant()
    def verification_finds_exactly_the_foreign_write(self) -> None:
        if "weights" not in self.released and all(self.valid.values()):
            report = self.rig.sleeper.verify()
            assert report.differing == (("low",) if self.foreign else ())
            assert report.ok == (not self.foreign)


class Restoring(Machine):
    on_foreign_write = "restore"


class Refusing(Machine):
    on_foreign_write = "error"


SETTINGS = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestAdopting = Machine.TestCase
TestRestoring = Restoring.TestCase
TestRefusing = Refusing.TestCase
TestAdopting.settings = TestRestoring.settings = TestRefusing.settings = SETTINGS
