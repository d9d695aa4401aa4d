"""The loop of steps on a scripted model: no weights, no sleeper, exact tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from torpor.engine.generation import EndRules, GenerationLoop, Request
from torpor.engine.kv import KVCache
from torpor.engine.prompts import Prompt
from torpor.engine.runner import ModelRunner
from torpor.engine.text import Tokenizer
from torpor.errors import AsleepError, RequestError, StateError
from torpor.outputs import CompletionOutput, RequestOutput
from torpor.params import SamplingParams

EOS, VOCAB = 1, 320


class ScriptedModel:
    """Its favourite token at position p is ``script[p - start]``; then it keeps to the last."""

    def __init__(self, script: Sequence[int], start: int) -> None:
        self.script = list(script)
        self.start = start
        self.calls: list[tuple[list[int], list[int]]] = []
        self.sharpness = 50.0

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, kv: KVCache) -> torch.Tensor:
        self.calls.append((ids_T.tolist(), positions_T.tolist()))
        rows = torch.zeros(len(ids_T), 1, 1)
        kv.append(0, rows, rows)
        return positions_T[:, None]

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        assert len(hidden_TD) == 1, "logits of the last position only"
        index = min(int(hidden_TD[-1]) + 1 - self.start, len(self.script) - 1)
        logits = torch.zeros(1, VOCAB)
        logits[0, self.script[index]] = self.sharpness
        return logits


class Bench:
    """A loop around a scripted model, and what a test wants to turn on it."""

    def __init__(self, tokenizer: Tokenizer, script: Sequence[int], prompt: Sequence[int]) -> None:
        self.model = ScriptedModel(script, start=len(prompt))
        self.sleeper = SimpleNamespace(weights_epoch=3, weights_version="v7", kv_epoch=0)
        self.gate: Callable[[], None] = lambda: None
        self.prompt = tuple(prompt)
        runner = ModelRunner(
            cast(Any, self.model),
            KVCache(torch.zeros(1, 2, 32, 1, 1)),
            sleeper=cast(Any, self.sleeper),
            ready=lambda: self.gate(),
        )
        rules = EndRules(eos_token_ids=frozenset({EOS}), max_model_len=32)
        self.loop = GenerationLoop(runner, tokenizer, rules)

    def steps(self, **params: Any) -> Generator[str, None, RequestOutput]:
        request = Request(
            request_id="0",
            prompt=Prompt(None, self.prompt),
            params=SamplingParams(**{"temperature": 0.0, **params}),
            seed=11,
        )
        return self.loop.steps(request)

    def run(self, **params: Any) -> RequestOutput:
        return finish(self.steps(**params))[1]

    def one(self, **params: Any) -> CompletionOutput:
        (output,) = self.run(**params).outputs
        return output


def finish(steps: Generator[str, None, RequestOutput]) -> tuple[list[str], RequestOutput]:
    pieces = []
    while True:
        try:
            pieces.append(next(steps))
        except StopIteration as done:
            return pieces, done.value


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Callable[..., Bench]:
    def make(text: str, *, end: Sequence[int] = (EOS,), prompt: Sequence[int] = (5, 6, 7)) -> Bench:
        return Bench(tokenizer, [*tokenizer.encode(text), *end], prompt)

    return make


Make = Callable[..., Bench]


def test_a_completion_ends_at_the_end_token(bench: Make, tokenizer: Tokenizer) -> None:
    output = bench("the lazy dog").one()
    assert output.text == "the lazy dog"
    assert output.token_ids == (*tokenizer.encode("the lazy dog"), EOS)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_the_prompt_is_computed_once_and_then_token_by_token(bench: Make) -> None:
    made = bench("ab")
    output = made.run()
    first, second = output.outputs[0].token_ids[:2]
    assert made.model.calls == [([5, 6, 7], [0, 1, 2]), ([first], [3]), ([second], [4])]


def test_an_answer_tells_its_prompt_and_its_weights(bench: Make) -> None:
    output = bench("a").run()
    assert output.prompt_token_ids == (5, 6, 7)
    assert output.prompt is None
    assert output.finished
    assert (output.weights_epoch, output.weights_version) == (3, "v7")


def test_max_tokens_ends_a_completion(bench: Make) -> None:
    output = bench("the lazy dog").one(max_tokens=1)
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_the_context_ends_a_completion(bench: Make) -> None:
    for max_tokens in (None, 1000):
        output = bench("a", end=[70]).one(max_tokens=max_tokens)
        # 32 positions, 3 of them for the prompt.
        assert (len(output.token_ids), output.finish_reason) == (29, "length")


def test_the_end_token_can_be_ignored(bench: Make) -> None:
    output = bench("a").one(ignore_eos=True, max_tokens=4)
    assert output.token_ids[1:] == (EOS, EOS, EOS)
    assert (output.text, output.finish_reason) == ("a", "length")


def test_a_stop_token_ends_a_completion_and_is_named(bench: Make) -> None:
    output = bench("a", end=[70]).one(stop_token_ids=[70])
    assert (output.text, output.token_ids[-1]) == ("a", 70)
    assert (output.finish_reason, output.stop_reason) == ("stop", 70)


def test_the_text_of_a_stop_token_can_be_kept(bench: Make, tokenizer: Tokenizer) -> None:
    output = bench("a", end=[70]).one(stop_token_ids=[70], include_stop_str_in_output=True)
    assert output.text == "a" + tokenizer.decode([70])


def test_a_stop_string_ends_a_completion_and_is_named(bench: Make) -> None:
    output = bench("one two three").one(stop=["wo t", "three"])
    assert output.text == "one t"
    assert (output.finish_reason, output.stop_reason) == ("stop", "wo t")
    kept = bench("one two three").one(stop="wo t", include_stop_str_in_output=True)
    assert kept.text == "one two t"


def test_a_stop_string_on_the_last_allowed_token_still_counts(bench: Make) -> None:
    length = len(bench("one two").one().token_ids) - 1
    output = bench("one two").one(stop="two", max_tokens=length)
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "two", "one ")


def test_min_tokens_holds_off_end_tokens_and_stop_strings(bench: Make) -> None:
    made = bench("", end=[EOS])
    made.model.script = [EOS, EOS, EOS, EOS]
    assert len(made.one(min_tokens=3).token_ids) == 4
    assert EOS not in made.one(min_tokens=3).token_ids[:3]
    repeated = bench("", end=[70])
    assert len(repeated.one(stop_token_ids=[70], min_tokens=2).token_ids) == 3
    assert len(bench("bbbbbbbb").one(stop="b", min_tokens=4).token_ids) == 5


def test_pieces_join_to_the_text_and_hold_back_stop_strings(bench: Make) -> None:
    pieces, output = finish(bench("one two 🙂 three").steps(stop=["two 🙂 x", "ree"]))
    assert "".join(pieces) == output.outputs[0].text == "one two 🙂 th"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "tw" not in "".join(pieces[:3])


def test_part_of_a_character_is_told_when_the_text_ends(bench: Make, tokenizer: Tokenizer) -> None:
    length = len(tokenizer.encode("a🙂"))
    pieces, output = finish(bench("a🙂").steps(max_tokens=length - 1))
    assert output.outputs[0].text == "".join(pieces)
    assert output.outputs[0].text.startswith("a\ufffd")


def test_logprobs_are_told_per_token_with_rank_and_text(bench: Make) -> None:
    output = bench("ab").one(logprobs=2)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert entry[token_id].rank == 1
        assert len(entry) == 2
    assert output.logprobs[-1][EOS].decoded_token == "<|end|>"
    total = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == total


def test_several_completions_share_one_prompt_computation(bench: Make) -> None:
    made = bench("abc", end=[70])
    made.model.sharpness = 0.0
    outputs = made.run(n=3, temperature=1.0, max_tokens=4, ignore_eos=True).outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({output.token_ids for output in outputs}) == 3
    assert all(len(set(output.token_ids)) > 1 for output in outputs), "positions share their noise"
    prefills = [ids for ids, positions in made.model.calls if positions[0] == 0]
    assert prefills == [[5, 6, 7]]
    assert [positions for _, positions in made.model.calls[1:]] == [[3], [4], [5]] * 3
    alone = made.one(temperature=1.0, max_tokens=4, ignore_eos=True)
    assert alone.token_ids == outputs[0].token_ids


def test_no_step_runs_behind_a_closed_gate(bench: Make) -> None:
    made = bench("abc")

    def closed() -> None:
        raise AsleepError("asleep")

    made.gate = closed
    with pytest.raises(AsleepError):
        made.run()
    assert made.model.calls == []
    made.gate = lambda: None
    steps = made.steps()
    next(steps)
    made.gate = closed
    with pytest.raises(AsleepError):
        next(steps)
    assert len(made.model.calls) == 1


@pytest.mark.parametrize(
    ("field", "told"), [("weights_epoch", "weights were updated"), ("kv_epoch", "model slept")]
)
def test_a_cache_of_another_epoch_is_never_used(bench: Make, field: str, told: str) -> None:
    made = bench("abc")
    steps = made.steps()
    next(steps)
    setattr(made.sleeper, field, 9)
    with pytest.raises(StateError, match=told):
        next(steps)
    assert len(made.model.calls) == 1


def test_two_streams_never_share_the_cache(bench: Make) -> None:
    made = bench("abc")
    first, second = made.steps(), made.steps()
    next(first)
    next(second)
    with pytest.raises(StateError, match="another request used the KV cache"):
        next(first)
    assert finish(second)[1].outputs[0].text == "abc"


def test_nan_logits_fail_the_request_by_its_id(bench: Make) -> None:
    made = bench("abc")
    made.model.sharpness = float("nan")
    with pytest.raises(RequestError, match="request 0: 1 of 320 logits at position 3 are NaN"):
        made.run()


def test_an_interrupted_step_leaves_the_loop_usable(bench: Make) -> None:
    made = bench("abc")
    call = made.model.compute_logits
    made.model.compute_logits = cast(Any, interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    made.model.compute_logits = call  # type: ignore[method-assign]
    assert made.one().text == "abc"


def interrupted(hidden_TD: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt
