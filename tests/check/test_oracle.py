"""The oracle: equal answers are equal, and one changed bit is not."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.check.conftest import flip_a_bit

from torpor.check.oracle import NUM_LOGPROBS, Answer, Oracle
from torpor.engine.llm import LLM
from torpor.errors import RequestError

PROMPTS = ("the quick brown fox", "once upon")


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder) as made:
        yield made


def test_the_same_model_answers_the_same(llm: LLM) -> None:
    comparison = Oracle(llm, PROMPTS, max_tokens=6).ask_again()
    assert comparison.tokens_equal
    assert comparison.logprobs_equal
    assert [answer.prompt for answer in comparison.answers] == list(PROMPTS)


def test_every_answer_has_all_its_tokens_and_alternatives(llm: LLM) -> None:
    (answer,) = Oracle(llm, PROMPTS[:1], max_tokens=6).reference
    assert len(answer.token_ids) == len(answer.logprobs) == 6
    assert all(len(step) == NUM_LOGPROBS for step in answer.logprobs)
    assert [step[0][0] for step in answer.logprobs] == list(answer.token_ids)


def test_a_changed_weight_changes_the_answer(llm: LLM) -> None:
    oracle = Oracle(llm, PROMPTS, max_tokens=6)
    flip_a_bit(llm)
    assert not oracle.ask_again().logprobs_equal


def test_one_bit_of_one_logprob_is_noticed(llm: LLM) -> None:
    (answer,) = Oracle(llm, PROMPTS[:1], max_tokens=2).reference
    assert answer.same_logprobs(answer)
    ((token_id, value), *rest), *others = answer.logprobs
    nudged = ((token_id, value * (1 + 2**-52)), *rest)
    assert not answer.same_logprobs(dataclasses.replace(answer, logprobs=(nudged, *others)))


def test_zeros_of_two_signs_differ_and_nan_equals_itself() -> None:
    def with_logprob(value: float) -> Answer:
        return Answer(prompt="", text="", token_ids=(1,), logprobs=(((1, value),),))

    assert not with_logprob(0.0).same_logprobs(with_logprob(-0.0))
    assert with_logprob(float("nan")).same_logprobs(with_logprob(float("nan")))


def test_a_model_without_a_chat_template_completes(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "plain")
    (folder / "tokenizer_config.json").unlink()
    with LLM(folder) as llm:
        plain = Oracle(llm, PROMPTS[:1], max_tokens=4)
        (expected,) = llm.generate(PROMPTS[0], plain._params)
    assert plain.reference[0].token_ids == expected.outputs[0].token_ids
    with LLM(tiny_folder) as llm:
        assert Oracle(llm, PROMPTS[:1], max_tokens=4).reference[0].token_ids != (
            plain.reference[0].token_ids
        )


def test_an_impossible_length_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_tokens is 0"):
        Oracle(llm, PROMPTS, max_tokens=0)
