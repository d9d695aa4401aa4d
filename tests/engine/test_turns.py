"""The engine's lock: turns are handed over, news wakes those who wait, nobody spins."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from tests.engine.interrupts import interrupted_at

from torpor.engine.steps import turns as turns_module
from torpor.engine.steps.turns import Turns


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_loop_of_turns_lets_another_thread_in() -> None:
    turns, entered, rounds = Turns(), threading.Event(), 0

    def enter() -> None:
        with turns.take():
            entered.set()

    with turns.take():
        thread = in_thread(enter)
        while not entered.is_set():
            rounds += 1
            turns.pass_on()
    thread.join(10)
    assert entered.is_set()


def test_turns_nest_in_one_thread() -> None:
    turns = Turns()
    with turns.take(), turns.take():
        pass
    done = threading.Event()

    def enter() -> None:
        with turns.take():
            done.set()

    in_thread(enter).join(10)
    assert done.is_set()


def test_a_condition_is_asked_again_after_anyones_turn() -> None:
    turns, box = Turns(), list[str]()
    waiting = threading.Event()

    def wait() -> None:
        def holds() -> bool:
            waiting.set()
            return bool(box)

        with turns.take():
            turns.wait_until(holds)
            box.append("seen")

    thread = in_thread(wait)
    assert waiting.wait(10)
    with turns.take():
        box.append("put")
    thread.join(10)
    assert box == ["put", "seen"]


def test_telling_news_wakes_without_a_turn() -> None:
    turns, flag, waiting = Turns(), threading.Event(), threading.Event()

    def wait() -> None:
        def holds() -> bool:
            waiting.set()
            return flag.is_set()

        with turns.take():
            turns.wait_until(holds)

    thread = in_thread(wait)
    assert waiting.wait(10)
    flag.set()
    turns.tell()
    thread.join(10)
    assert not thread.is_alive()


def test_those_who_wait_do_not_wake_each_other_for_ever() -> None:
    turns, stop, asked = Turns(), threading.Event(), [0, 0]

    def wait(me: int) -> None:
        def holds() -> bool:
            asked[me] += 1
            return stop.is_set()

        with turns.take():
            turns.wait_until(holds)

    threads = [in_thread(lambda me=me: wait(me)) for me in (0, 1)]  # type: ignore[misc]
    for _ in range(50):
        with turns.take():
            pass
    before = sum(asked)
    assert before <= 2 * 60
    stop.set()
    turns.tell()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_inside_a_turn_ends_it() -> None:
    turns = Turns()
    try:
        with turns.take():
            raise ValueError
    except ValueError:
        pass
    with turns.take():
        turns.pass_on()


def nest(turns: Turns) -> None:
    with turns.take(), turns.take():
        pass


def pass_on(turns: Turns) -> None:
    with turns.take():
        turns.pass_on()
        turns.pass_on()


def wait(turns: Turns) -> None:
    asked = iter([False, True])

    def holds() -> bool:
        turns.tell()  # news, so that asking again does not wait for another thread
        return next(asked)

    with turns.take():
        turns.wait_until(holds)


@pytest.mark.parametrize("act", [nest, pass_on, wait])
def test_an_interrupt_at_any_line_leaves_the_turn_to_be_had(act: Callable[[Turns], None]) -> None:
    line = 0
    while True:
        turns, done = Turns(), threading.Event()

        def enter(turns: Turns = turns, done: threading.Event = done) -> None:
            with turns.take():
                done.set()

        if not interrupted_at(line, lambda turns=turns: act(turns), [turns_module.__file__]):  # type: ignore[misc]
            break
        assert not turns.held, f"the turn is kept after an interrupt at line {line}"
        in_thread(enter).join(10)
        assert done.is_set(), f"the turn is lost after an interrupt at line {line}"
        line += 1
    assert line > 10


FORKED = """
import os, sys, threading
from torpor.engine.steps.turns import Turns
from torpor.errors import StateError

busy, idle = Turns(), Turns()
held, go_on = threading.Event(), threading.Event()

def hold():
    with busy.take():
        held.set()
        go_on.wait(60)

thread = threading.Thread(target=hold, daemon=True)
thread.start()
held.wait(60)
child = os.fork()
if child == 0:
    code = 3
    with idle.take():
        pass
    try:
        with busy.take():
            pass
    except StateError as error:
        code = 0 if "forked" in str(error) else 4
    os._exit(code)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join()
with busy.take():
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_process_forked_in_the_middle_of_a_turn_says_so_and_does_not_wait() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
