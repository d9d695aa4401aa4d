"""States move along the table only, and what happened is on record."""

from __future__ import annotations

import itertools
import json

import pytest

from torpor.errors import StateError
from torpor.sleep.states import HISTORY_LENGTH, TRANSITIONS, State, StateMachine, Transition

ROUND = (State.DRAINING, State.FALLING_ASLEEP, State.ASLEEP, State.WAKING, State.AWAKE)
PATHS: dict[State, tuple[State, ...]] = {
    State.AWAKE: (),
    State.DRAINING: ROUND[:1],
    State.FALLING_ASLEEP: ROUND[:2],
    State.ASLEEP: ROUND[:3],
    State.WAKING: ROUND[:4],
    State.FAULTED: (*ROUND[:4], State.FAULTED),
}


def machine_in(state: State) -> StateMachine:
    machine = StateMachine()
    for step in PATHS[state]:
        machine.move(step)
    return machine


def test_the_table_names_every_state_and_each_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert all(TRANSITIONS.values())
    assert {target for targets in TRANSITIONS.values() for target in targets} == set(State)


@pytest.mark.parametrize("source", State, ids=lambda state: state.value)
@pytest.mark.parametrize("target", State, ids=lambda state: state.value)
def test_a_move_is_made_exactly_when_the_table_has_it(source: State, target: State) -> None:
    machine = machine_in(source)
    before = machine.history
    if target in TRANSITIONS[source]:
        machine.move(target, moved_bytes=7)
        assert machine.state is target
        assert machine.history[:-1] == before
        last = machine.history[-1]
        assert (last.source, last.target, last.moved_bytes) == (source, target, 7)
    else:
        with pytest.raises(StateError, match=f"{source.value} cannot become {target.value}"):
            machine.move(target)
        assert machine.state is source
        assert machine.history == before


def test_a_refused_move_says_what_is_possible() -> None:
    with pytest.raises(StateError, match="it can become: draining"):
        StateMachine().move(State.WAKING)


def test_sleep_and_wake_are_the_only_ways_between_awake_and_asleep() -> None:
    assert State.ASLEEP not in TRANSITIONS[State.AWAKE]
    assert State.AWAKE not in TRANSITIONS[State.ASLEEP]
    assert TRANSITIONS[State.FAULTED] == {State.WAKING}


def test_history_is_a_ring_whose_records_join_up() -> None:
    machine = StateMachine()
    for _ in range(HISTORY_LENGTH):
        for step in ROUND:
            machine.move(step)
    history = machine.history
    assert len(history) == HISTORY_LENGTH
    assert history[-1].target is machine.state is State.AWAKE
    joints = itertools.pairwise(history)
    assert all(earlier.target is later.source for earlier, later in joints)


def test_the_state_outlives_its_record_in_the_ring() -> None:
    machine = machine_in(State.ASLEEP)
    for _ in range(HISTORY_LENGTH):
        machine.move(State.DRAINING)
        machine.move(State.ASLEEP)
    assert machine.state is State.ASLEEP


def test_a_record_tells_how_long_the_source_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 13.0])
    monkeypatch.setattr("torpor.sleep.states.time.monotonic", lambda: next(clock))
    machine = StateMachine()
    machine.move(State.DRAINING)
    machine.move(State.AWAKE)
    assert [record.duration_s for record in machine.history] == [2.5, 0.5]


def test_a_record_is_jsonable_with_plain_names() -> None:
    record = Transition(State.AWAKE, State.DRAINING, 1.0, 0.5, 3)
    assert json.loads(json.dumps(record.to_dict())) == {
        "source": "awake", "target": "draining", "at_s": 1.0, "duration_s": 0.5, "moved_bytes": 3
    }  # fmt: skip
