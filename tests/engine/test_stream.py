"""Text as it comes, over a scripted engine."""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
from tests.engine.scripted import Bench

from torpor.engine.requests.answers import answer
from torpor.engine.requests.request import Request
from torpor.engine.steps.turns import Turns
from torpor.engine.stream import Stream
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import AsleepError, RequestError, StateError, StepError
from torpor.outputs import RequestOutput


class Engine:
    """What a stream asks of an engine, around a scripted core."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.core = bench.core
        self.turns = Turns()
        self.awake = True

    def may_step(self) -> bool:
        return self.awake

    def output(self, request: Request) -> RequestOutput:
        return answer(request)

    def stream(self, script: Any, **params: Any) -> Stream:
        return Stream(cast(Any, self), self.bench.add(script, params=params))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return Engine(Bench(tokenizer))


def finish(stream: Stream) -> tuple[list[str], RequestOutput]:
    pieces: list[str] = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as done:
            return pieces, done.value


def test_pieces_join_to_the_text_of_the_answer(engine: Engine) -> None:
    stream = engine.stream("one two 🙂 three", stop=["two 🙂 x", "ree"])
    pieces, output = finish(stream)
    assert "".join(pieces) == output.outputs[0].text == "one two 🙂 th"
    assert all(pieces), "a piece is never empty"
    assert not any("\ufffd" in piece for piece in pieces)
    assert output == stream.output
    assert output.finished


def test_each_piece_is_computed_when_it_is_asked_for(engine: Engine) -> None:
    stream = engine.stream("abc")
    assert engine.bench.runner.launched == []
    assert next(stream) == "a"
    assert len(engine.bench.runner.launched) == 1
    assert stream.output.outputs[0].text == "a"
    assert not stream.output.finished
    assert next(stream) == "b"
    assert len(engine.bench.runner.launched) == 2


def test_it_can_be_iterated_in_a_loop(engine: Engine) -> None:
    assert "".join(engine.stream("the lazy dog")) == "the lazy dog"


def test_an_ended_stream_stays_ended(engine: Engine) -> None:
    stream = engine.stream("ab")
    _, output = finish(stream)
    for _ in range(2):
        with pytest.raises(StopIteration) as caught:
            next(stream)
        assert caught.value.value == output


def test_two_streams_and_other_requests_share_the_steps(engine: Engine) -> None:
    first, second = engine.stream("one two three"), engine.stream("the lazy dog")
    other = engine.bench.add("sleep")
    pieces = [next(first), next(second), next(first), next(second)]
    rest = "".join(second)
    assert "".join([pieces[1], pieces[3], rest]) == "the lazy dog"
    assert "".join([pieces[0], pieces[2], *first]) == "one two three"
    engine.bench.run()
    assert engine.bench.text(other) == "sleep"
    assert all(len(step) == 3 for step in engine.bench.runner.counts[:3])


def test_while_the_model_sleeps_asking_fails_and_later_goes_on(engine: Engine) -> None:
    stream = engine.stream("abc")
    assert next(stream) == "a"
    engine.awake = False
    for _ in range(2):
        with pytest.raises(AsleepError, match="ask for the next piece again"):
            next(stream)
    assert len(engine.bench.runner.launched) == 1
    engine.awake = True
    assert "".join(stream) == "bc"


def test_text_that_is_known_already_is_told_while_the_model_sleeps(engine: Engine) -> None:
    stream = engine.stream("abc")
    engine.bench.step()
    engine.awake = False
    assert next(stream) == "a"


def test_an_aborted_request_ends_the_text_with_what_was_held_back(engine: Engine) -> None:
    stream = engine.stream("the dog", stop="dogs")
    length = len(engine.bench.tokenizer.encode("the dog"))
    for _ in range(length):
        engine.core.step()
    assert next(stream) == "the "
    engine.core.abort(["0"])
    pieces, output = finish(stream)
    assert (pieces, output.outputs[0].text) == (["dog"], "the dog")
    assert output.outputs[0].finish_reason == "abort"


def test_an_abort_by_somebody_else_ends_the_text(engine: Engine) -> None:
    stream = engine.stream("abc")
    assert next(stream) == "a"
    engine.core.abort(["0"])
    pieces, output = finish(stream)
    assert pieces == []
    assert output.outputs[0].finish_reason == "abort"


def test_a_failure_is_raised_after_the_text_before_it(engine: Engine) -> None:
    stream = engine.stream("abc")
    engine.bench.step()
    engine.bench.runner.errors["0/0"] = RequestError("NaN")
    engine.bench.step()
    assert next(stream) == "a"
    for _ in range(2):
        with pytest.raises(RequestError, match="request 0: NaN"):
            next(stream)
    failed = engine.stream("abc")
    engine.bench.runner.faults["launch"] = ValueError("boom")
    with pytest.raises(StepError, match="boom"):
        next(failed)


def test_a_step_that_may_not_run_is_told_as_it_is(engine: Engine) -> None:
    stream = engine.stream("abc")

    def closed() -> None:
        raise StateError("closed")

    engine.bench.gate = closed
    with pytest.raises(StateError, match="closed"):
        next(stream)
    engine.bench.gate = lambda: None
    assert "".join(stream) == "abc"


def test_an_interrupt_loses_nothing_of_a_stream(engine: Engine) -> None:
    stream = engine.stream("abc")
    assert next(stream) == "a"
    engine.bench.runner.faults["collect"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert "".join(stream) == "bc"


def test_a_closed_stream_aborts_its_request_at_once(engine: Engine) -> None:
    stream = engine.stream("abc")
    next(stream)
    stream.close()
    assert engine.bench.idle
    assert stream.output.outputs[0].finish_reason == "abort"
    stream.close()
    done = engine.stream("a")
    _, output = finish(done)
    done.close()
    assert done.output == output


def test_an_abandoned_stream_ends_at_the_next_step(engine: Engine) -> None:
    stream = engine.stream("abc")
    other = engine.stream("ab")
    next(stream)
    del stream
    gc.collect()
    assert engine.core.has_abandoned
    assert engine.core.num_unfinished_requests == 2
    assert next(other) == "a"
    assert next(other) == "b"
    assert engine.core.num_unfinished_requests == 1
    assert engine.bench.runner.counts[-1] == {"1/0": 1}


def test_abandoning_never_waits_for_the_turn(engine: Engine) -> None:
    stream = engine.stream("abc")
    with engine.turns.take():
        del stream
        gc.collect()
        assert engine.core.has_abandoned
