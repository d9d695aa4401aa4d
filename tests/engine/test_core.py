"""The step loop over a scripted runner: exact tokens, failures, interrupts, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.interrupts import interrupted_at
from tests.engine.scripted import EOS, Bench

from torpor.cache import manager, pool, prefix, table
from torpor.engine.requests import completion as completion_module
from torpor.engine.requests.request import Request, Status
from torpor.engine.steps import core as core_module
from torpor.engine.steps import scheduler
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import AsleepError, OutOfMemoryError, RequestError, StepError

PROMPT = tuple(range(10, 22))
"""Three blocks."""

MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def ends(request: Request) -> list[str | None]:
    return [sequence.completion.finish_reason for sequence in request.sequences]


def texts(bench: Bench, request: Request) -> list[str]:
    return [bench.text(request, index) for index in range(len(request.sequences))]


# -- tokens -------------------------------------------------------------------------------------


def test_the_prompt_is_computed_once_and_then_token_by_token(bench: Bench) -> None:
    request = bench.add("ab")
    bench.run()
    assert bench.text(request) == "ab"
    assert bench.runner.counts == [{"0/0": 3}, {"0/0": 1}, {"0/0": 1}]
    assert ends(request) == ["stop"]
    assert bench.idle


def test_requests_are_computed_together_and_keep_their_own_tokens(bench: Bench) -> None:
    requests = [bench.add(word) for word in ("the lazy dog", "a", "sleep")]
    assert bench.core.requests == tuple(requests)
    assert bench.step() == requests
    assert bench.runner.counts == [{"0/0": 3, "1/0": 3, "2/0": 3}]
    bench.run()
    assert [bench.text(request) for request in requests] == ["the lazy dog", "a", "sleep"]
    assert bench.idle


def test_a_chunk_of_a_prompt_draws_no_token(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_num_batched_tokens=8)
    request = bench.add("ab", prompt=range(10, 22))
    assert bench.step() == []
    assert request.sequences[0].completion.token_ids == []
    assert bench.step() == [request]
    bench.run()
    assert bench.text(request) == "ab"


def test_several_completions_share_one_prompt_computation(bench: Bench) -> None:
    request = bench.add("ab", "the dog", "c", prompt=PROMPT)
    bench.run()
    assert texts(bench, request) == ["ab", "the dog", "c"]
    assert bench.runner.counts[0] == {"0/0": 12, "0/1": 4, "0/2": 4}
    assert request.finished
    assert bench.idle


def test_a_step_without_requests_does_nothing(bench: Bench) -> None:
    assert not bench.core.can_step
    assert bench.core.step() == []
    assert bench.runner.launched == []


def test_an_id_in_use_is_known_until_its_request_has_finished(bench: Bench) -> None:
    request = bench.add("a")
    assert bench.core.knows("0")
    with pytest.raises(AssertionError, match="in use"):
        bench.core.add(request)
    bench.run()
    assert not bench.core.knows("0")


def test_answers_tell_the_weights_of_their_newest_token(bench: Bench) -> None:
    first, second = bench.add("a"), bench.add("the lazy dog")
    while not first.finished:
        bench.step()
    bench.sleeper.weights_epoch, bench.sleeper.weights_version = 4, "v8"
    bench.run()
    assert (first.weights_epoch, first.weights_version) == (3, "v7")
    assert (second.weights_epoch, second.weights_version) == (4, "v8")


def test_metrics_tell_the_first_token_and_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100, 200))
    monkeypatch.setattr("torpor.engine.steps.core.time.monotonic", lambda: float(next(clock)))
    request = bench.add("ab", "a")
    assert (request.first_token_s, request.finished_s) == (None, None)
    bench.step()
    first = request.first_token_s
    assert first == 100.0
    bench.run()
    assert request.first_token_s == first
    assert request.finished_s is not None
    assert request.finished_s > first


# -- the gate and the epochs --------------------------------------------------------------------


def test_no_step_runs_behind_a_closed_gate(bench: Bench) -> None:
    request = bench.add("abc")

    def closed() -> None:
        raise AsleepError("asleep")

    bench.gate = closed
    with pytest.raises(AsleepError):
        bench.core.step()
    assert bench.runner.launched == []
    bench.gate = lambda: None
    bench.step()
    bench.gate = closed
    with pytest.raises(AsleepError):
        bench.core.step()
    assert len(bench.runner.launched) == 1
    bench.gate = lambda: None
    bench.run()
    assert bench.text(request) == "abc"


def test_a_cache_whose_memory_was_released_is_dropped_and_recomputed(bench: Bench) -> None:
    request = bench.add("the lazy dog", prompt=PROMPT)
    bench.step()
    bench.step()
    bench.sleeper.kv_epoch += 1
    bench.runner.slots.clear()
    bench.run()
    assert bench.text(request) == "the lazy dog"
    assert bench.runner.counts[2] == {"0/0": 14}
    later = bench.add("a", prompt=PROMPT)
    bench.sleeper.kv_epoch += 1
    bench.runner.slots.clear()
    bench.run()
    assert later.sequences[0].num_cached_tokens == 0
    assert bench.text(later) == "a"


def test_new_weights_leave_running_requests_their_blocks_and_nobody_else(bench: Bench) -> None:
    running = bench.add("the lazy dog", prompt=PROMPT)
    bench.step()
    bench.sleeper.weights_epoch += 1
    later = bench.add("a", prompt=PROMPT)
    bench.run()
    assert bench.runner.counts[1] == {"0/0": 1, "1/0": 12}
    assert (bench.text(running), bench.text(later)) == ("the lazy dog", "a")


# -- failures -----------------------------------------------------------------------------------


def test_an_error_of_one_row_fails_that_request_alone(bench: Bench) -> None:
    good, bad, other = bench.add("ab"), bench.add("cd"), bench.add("ef")
    bench.step()
    bench.runner.errors["1/0"] = RequestError("1 of 320 logits are NaN")
    assert bench.step() == [good, bad, other]
    assert ends(bad) == ["error"]
    assert type(bad.error) is RequestError
    assert str(bad.error) == "request 1: 1 of 320 logits are NaN"
    assert bad.finished_s is not None
    assert not bench.core.knows("1")
    bench.run()
    assert (bench.text(good), bench.text(bad), bench.text(other)) == ("ab", "c", "ef")
    assert (good.error, other.error) == (None, None)
    assert bench.idle


def test_nobody_hits_the_blocks_of_a_row_that_failed(bench: Bench) -> None:
    bad = bench.add("a", prompt=PROMPT)
    bench.runner.errors["0/0"] = RequestError("NaN")
    bench.step()
    assert bad.finished
    again = bench.add("a", prompt=PROMPT)
    bench.run()
    assert again.sequences[0].num_cached_tokens == 0
    third = bench.add("a", prompt=PROMPT)
    bench.run()
    assert third.sequences[0].num_cached_tokens == 8


def test_one_completion_that_fails_takes_its_siblings_along(bench: Bench) -> None:
    request, other = bench.add("abc", "a", "abcd", "abc"), bench.add("ab")
    bench.step()
    bench.step()
    assert ends(request) == [None, "stop", None, None]
    bench.runner.errors["0/2"] = RequestError("NaN")
    bench.step()
    assert ends(request) == ["error", "stop", "error", "error"]
    # Its row came before the one that failed, the other's after it.
    assert texts(bench, request) == ["abc", "a", "ab", "ab"]
    assert request.finished
    assert isinstance(request.error, RequestError)
    bench.run()
    assert bench.text(other) == "ab"
    assert bench.idle


def test_an_error_while_a_token_is_taken_in_fails_that_request_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = bench.add("ab"), bench.add("cd")
    bench.step()

    def refuse(token: Any) -> None:
        raise RequestError("does not fit")

    monkeypatch.setattr(bad.sequences[0].completion, "_check_text", refuse)
    bench.step()
    assert str(bad.error) == "request 1: does not fit"
    assert len(bad.sequences[0].completion.token_ids) == 1
    bench.run()
    assert bench.text(good) == "ab"
    assert bench.idle


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failure_of_the_step_fails_its_requests_and_no_other(
    tokenizer: Tokenizer, where: str
) -> None:
    bench = Bench(tokenizer, num_blocks=7)
    first, second = bench.add("ab", prompt=PROMPT[1:]), bench.add("cd", prompt=PROMPT[:0:-1])
    # There is no room for the third beside them, so the step that fails is not its step.
    third = bench.add("ef", prompt=PROMPT[:0:-1])
    bench.step()
    assert third.sequences[0].status is Status.WAITING
    bench.runner.faults[where] = ValueError("boom")
    assert bench.step() == [first, second]
    for request in (first, second):
        assert ends(request) == ["error"]
        assert type(request.error) is StepError
        assert "a step failed with ValueError: boom" in str(request.error)
        assert isinstance(request.error.__cause__, ValueError)
    assert third.error is None
    bench.run()
    assert bench.text(third) == "ef"
    assert third.sequences[0].num_cached_tokens == 0, "a hit on what the failed step wrote"
    assert bench.idle


def test_an_error_of_our_own_keeps_its_type(bench: Bench) -> None:
    request = bench.add("ab")
    bench.runner.faults["launch"] = OutOfMemoryError("no room")
    bench.step()
    assert type(request.error) is OutOfMemoryError
    assert bench.idle


# -- interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interrupted_step_is_computed_again(bench: Bench, where: str, num_steps: int) -> None:
    words = ("the lazy dog", "once upon")
    requests = [bench.add(word, prompt=PROMPT) for word in words]
    for _ in range(num_steps):
        bench.step()
    lengths = [request.sequences[0].num_tokens for request in requests]
    bench.runner.faults[where] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.core.step()
    bench.cache.check()
    assert [request.sequences[0].num_tokens for request in requests] == lengths
    bench.step()
    # Recomputed from the first token: what the interrupted step wrote is not trusted. The second
    # shares the blocks that the first fills in this very step.
    first, second = bench.runner.counts[-1].values()
    assert (first, second) == (lengths[0], lengths[1] - 12 + (4 if num_steps == 0 else 0))
    bench.run()
    assert [bench.text(request) for request in requests] == list(words)
    assert [request.error for request in requests] == [None, None]
    assert bench.idle


def test_an_interrupt_at_the_second_row_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [bench.add("the lazy dog"), bench.add("once upon"), bench.add("a")]
    bench.step()
    with monkeypatch.context() as patched:
        patched.setattr(requests[1].sequences[0].completion, "_check_length", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.core.step()
    bench.cache.check()
    assert [len(request.sequences[0].completion.token_ids) for request in requests] == [2, 1, 1]
    assert all(len(request.sequences[0].token_ids) >= 4 for request in requests)
    bench.run()
    assert [bench.text(request) for request in requests] == ["the lazy dog", "once upon", "a"]
    assert bench.idle


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("script", ["the lazy dog", ""])
def test_an_interrupt_between_a_token_and_its_sequence_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    request = bench.add(script)
    completion = request.sequences[0].completion
    accept = completion.accept

    def accepted_then_interrupted(token: Any) -> None:
        accept(token)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(completion, "accept", accepted_then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.core.step()
    assert request.sequences[0].token_ids == [5, 6, 7, *completion.token_ids]
    assert len(completion.token_ids) == 1
    bench.run()
    assert bench.text(request) == script
    assert bench.idle


STRIDE = 11
"""Every so many lines are tried: all of them, one after the other, take half a minute."""


@pytest.mark.parametrize("drop", [False, True])
def test_an_interrupt_at_any_line_loses_nothing(tokenizer: Tokenizer, drop: bool) -> None:
    expected = outcome(interrupted_run(tokenizer, None, drop))
    line, bench = 0, interrupted_run(tokenizer, 0, drop)
    while bench is not None:
        assert outcome(bench) == expected, f"after an interrupt at line {line}"
        line += STRIDE
        bench = interrupted_run(tokenizer, line, drop)
    assert line > 500


def interrupted_run(tokenizer: Tokenizer, line: int | None, drop: bool) -> Bench | None:
    """Interrupt a step with rows of every kind; None when it has fewer lines."""
    bench = Bench(tokenizer, num_blocks=14, max_num_batched_tokens=24)
    bench.add("ab", "a", params={"logprobs": 1}, prompt=PROMPT)
    bench.add("b")
    bench.add("ab")
    bench.add("abc", "ab", params={"stop": ["bc", "ba"]}, prompt=PROMPT)
    bench.step()
    bench.add("the dog", prompt=range(30, 50))
    bench.core.abandon(bench.requests[1])
    bench.runner.errors["2/0"] = RequestError("NaN")
    if drop:
        bench.sleeper.kv_epoch += 1
        bench.runner.slots.clear()
    if line is not None and not interrupted_at(line, bench.core.step, INTERRUPTED_FILES):
        return None
    bench.run()
    assert bench.idle
    return bench


INTERRUPTED_FILES = {
    str(module.__file__)
    for module in (completion_module, core_module, scheduler, manager, pool, prefix, table)
}


def outcome(bench: Bench | None) -> Any:
    assert bench is not None
    return [
        (
            [sequence.completion.output() for sequence in request.sequences],
            request.first_token_s is None,
            request.finished_s is None,
            str(request.error),
        )
        for request in bench.requests
    ]


# -- ends from outside --------------------------------------------------------------------------


def test_an_abort_ends_a_request_wherever_it_is(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, num_blocks=5)
    running, waiting = bench.add("ab", "cd", prompt=range(9)), bench.add("ef", prompt=range(14))
    bench.step()
    assert waiting.sequences[0].status is Status.WAITING
    assert bench.core.abort(["1", "unknown", "0"]) == [waiting, running]
    assert ends(running) == ["abort", "abort"]
    assert ends(waiting) == ["abort"]
    assert (running.error, waiting.error) == (None, None)
    assert running.finished_s is not None
    assert bench.told == ["0", "1", "0"]
    assert bench.idle
    assert bench.core.abort(["0", "1"]) == []


def test_an_abort_leaves_other_requests_alone(bench: Bench) -> None:
    first, second = bench.add("ab", prompt=PROMPT), bench.add("cd", prompt=PROMPT)
    bench.step()
    bench.core.abort(["0"])
    bench.run()
    assert (ends(first), ends(second)) == (["abort"], ["stop"])
    assert bench.text(second) == "cd"


def test_all_requests_can_be_aborted(bench: Bench) -> None:
    requests = [bench.add("ab"), bench.add("cd")]
    bench.step()
    assert bench.core.abort_all() == requests
    assert bench.idle


def test_an_abandoned_request_ends_at_the_next_step(bench: Bench) -> None:
    left, other = bench.add("ab"), bench.add("cd")
    bench.step()
    bench.core.abandon(left)
    assert bench.core.has_abandoned
    assert not left.finished
    bench.step()
    assert not bench.core.has_abandoned
    assert ends(left) == ["abort"]
    assert bench.runner.counts[-1] == {"1/0": 1}
    bench.core.abandon(left)
    bench.run()
    bench.core.sweep()
    assert bench.text(other) == "cd"
    assert ends(left) == ["abort"]


def test_abandoning_a_finished_request_does_not_end_another_of_its_id(bench: Bench) -> None:
    old = bench.add("a", request_id="same")
    bench.run()
    new = bench.add("b", request_id="same")
    bench.told.clear()
    bench.core.abandon(old)
    bench.core.sweep()
    assert bench.core.requests == (new,)
    assert bench.told == []
    bench.run()
    assert (ends(old), ends(new)) == (["stop"], ["stop"])


# -- who is told --------------------------------------------------------------------------------


def test_the_listener_is_told_once_per_request_and_step(bench: Bench) -> None:
    bench.add("ab", "a")
    bench.add("a")
    bench.step()
    assert bench.told == ["0", "1"]
    bench.step()
    assert bench.told == ["0", "1"] * 2
    bench.step()
    assert bench.told == ["0", "1"] * 2 + ["0"]


def test_the_listener_is_told_once_of_a_failure(bench: Bench) -> None:
    bench.add("abc", "abc")
    bench.add("abc")
    bench.step()
    bench.told.clear()
    bench.runner.errors["0/0"] = RequestError("NaN")
    bench.step()
    assert bench.told == ["0", "1"]
    bench.told.clear()
    bench.runner.faults["collect"] = ValueError("boom")
    bench.step()
    assert bench.told == ["1"]
    bench.run()
    assert bench.told == ["1"]


def test_the_listener_is_told_when_the_request_has_already_changed(bench: Bench) -> None:
    request = bench.add("a")
    seen: list[Any] = []
    bench.core.listener = lambda told: seen.append((told.finished, bench.core.knows("0")))
    bench.run()
    assert seen == [(False, True), (True, False)]
    assert request.sequences[0].completion.token_ids[-1] == EOS


def test_a_core_without_a_listener_tells_nobody(bench: Bench) -> None:
    bench.core.listener = None
    request = bench.add("a")
    bench.run()
    assert ends(request) == ["stop"]
