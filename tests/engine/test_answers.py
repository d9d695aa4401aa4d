"""What is told of a request while it runs: everything, what is new, or the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.scripted import Bench

from torpor.engine.requests.answers import Teller, answer
from torpor.engine.requests.prompt_logprobs import PromptLogprobs
from torpor.engine.requests.request import Request
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import RequestError
from torpor.outputs import CompletionOutput, RequestOutput
from torpor.params import RequestOutputKind

STOP = {"stop": ["two 🙂 x", "ree", "dogs"], "logprobs": 1}
SCRIPTS = ("one two 🙂 three", "the dog")


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


def told_in(bench: Bench, kind: RequestOutputKind, **params: Any) -> list[RequestOutput]:
    """Every output of a request with two completions, of which one ends long before the other."""
    request = bench.add(*SCRIPTS, params={"output_kind": kind, **params})
    teller = Teller(request)
    outputs = []
    while bench.core.can_step:
        bench.step()
        output = teller.tell()
        if output is not None:
            outputs.append(output)
    return outputs


def joined(outputs: Sequence[RequestOutput], index: int) -> CompletionOutput:
    """The deltas of one completion as one output."""
    parts = [part for output in outputs for part in output.outputs if part.index == index]
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        cumulative_logprob=parts[-1].cumulative_logprob,
        logprobs=None if parts[-1].logprobs is None else tuple(logprobs),
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


@pytest.mark.parametrize("params", [{}, STOP, {"max_tokens": 4}, {"detokenize": False}], ids=str)
def test_deltas_join_to_the_whole_answer(bench: Bench, params: dict[str, Any]) -> None:
    whole = told_in(bench, RequestOutputKind.CUMULATIVE, **params)[-1]
    deltas = told_in(bench, RequestOutputKind.DELTA, **params)
    (final,) = told_in(bench, RequestOutputKind.FINAL_ONLY, **params)
    assert whole.finished
    assert final.outputs == whole.outputs
    assert tuple(joined(deltas, index) for index in range(2)) == whole.outputs
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_outputs_so_far_only_grow(bench: Bench) -> None:
    outputs = told_in(bench, RequestOutputKind.CUMULATIVE, **STOP)
    assert len(outputs) > 4
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    assert not any("two 🙂" in output.outputs[0].text for output in outputs[:4])


def test_a_delta_is_empty_of_what_was_told_before(bench: Bench) -> None:
    deltas = told_in(bench, RequestOutputKind.DELTA, **STOP)
    for delta in deltas:
        for part in delta.outputs:
            assert part.token_ids
            assert part.logprobs is not None
            assert len(part.logprobs) == len(part.token_ids) == 1


def test_the_end_of_a_completion_is_told_once_while_others_go_on(bench: Bench) -> None:
    deltas = told_in(bench, RequestOutputKind.DELTA)
    ends = [part.index for delta in deltas for part in delta.outputs if part.finish_reason]
    assert ends == [1, 0]
    assert [part.index for part in deltas[-1].outputs] == [0]


def test_an_abort_is_told_with_the_text_held_back(bench: Bench) -> None:
    request = bench.add("the dog", params={"output_kind": RequestOutputKind.DELTA, "stop": "dogs"})
    teller = Teller(request)
    text = ""
    length = len(bench.tokenizer.encode("the dog"))
    for _ in range(length):
        bench.step()
        output = teller.tell()
        assert output is not None
        text += output.outputs[0].text
    assert text == "the "
    bench.core.abort(["0"])
    last = teller.tell()
    assert last is not None
    assert (last.outputs[0].text, last.outputs[0].token_ids) == ("dog", ())
    assert (last.outputs[0].finish_reason, last.finished) == ("abort", True)


def test_only_the_end_is_told_when_that_was_asked(bench: Bench) -> None:
    params = {"output_kind": RequestOutputKind.FINAL_ONLY}
    request = bench.add("ab", params=params)
    teller = Teller(request)
    bench.step()
    assert teller.tell() is None
    bench.run()
    output = teller.tell()
    assert output is not None
    assert output.outputs[0].text == "ab"


def test_nothing_new_is_nothing_to_tell(bench: Bench) -> None:
    request = bench.add("ab", params={"output_kind": RequestOutputKind.DELTA})
    teller = Teller(request)
    assert teller.tell() is None
    bench.step()
    assert teller.tell() is not None
    assert teller.tell() is None


def test_an_answer_tells_its_prompt_its_weights_and_its_times(bench: Bench) -> None:
    shared = tuple(range(10, 22))
    bench.add("a", prompt=shared)
    bench.run()
    request = bench.add("ab", "a", prompt=shared)
    assert answer(request).num_cached_tokens is None
    bench.run()
    output = answer(request)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("1", None, shared)
    assert (output.weights_epoch, output.weights_version) == (3, "v7")
    assert (output.finished, output.error, output.prompt_logprobs) == (True, None, None)
    assert output.num_cached_tokens == 8
    assert output.metrics is not None
    assert output.metrics.arrival_s == request.arrival_s
    assert output.metrics.first_token_s == request.first_token_s
    assert output.metrics.finished_s == request.finished_s
    assert [part.index for part in output.outputs] == [0, 1]


def test_preemptions_are_counted_over_all_completions(bench: Bench) -> None:
    request = bench.add("ab", "cd")
    bench.step()
    bench.core.scheduler.preempt_all()
    bench.step()
    bench.core.scheduler.preempt_all()
    bench.run()
    output = answer(request)
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 4
    assert [part.text for part in output.outputs] == ["ab", "cd"]


def test_a_failure_is_told_with_its_error(bench: Bench) -> None:
    request = bench.add("ab")
    bench.runner.errors["0/0"] = RequestError("NaN")
    bench.step()
    output = answer(request)
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    assert output.error is request.error is not None


def test_log_probabilities_of_the_prompt_are_told(bench: Bench) -> None:
    request: Request = bench.add("a")
    request.prompt_logprobs = PromptLogprobs(3, 0, bench.tokenizer)
    assert answer(request).prompt_logprobs == (None, None, None)
