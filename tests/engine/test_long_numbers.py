"""Numbers that Python refuses to spell, wherever a caller can put one: a typed error, and short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.engine.llm import LLM
from torpor.engine.options import check_timeout
from torpor.errors import ArgumentError, RequestError, TorporError, shown
from torpor.params import SamplingParams

LONG = 10**5000
Call = Callable[[LLM, Any], object]

HI = [{"role": "user", "content": "hi"}]
CALLS: dict[str, Call] = {
    "prompt": lambda llm, x: llm.generate(x),
    "token": lambda llm, x: llm.generate([[1, x]]),
    "text": lambda llm, x: llm.generate({"prompt": x}),
    "key": lambda llm, x: llm.generate({x: 1}),
    "ids": lambda llm, x: llm.generate({"prompt_token_ids": x}),
    "params": lambda llm, x: llm.generate("a", x),
    "one of params": lambda llm, x: llm.generate(["a", "b"], [x, x]),
    "stream": lambda llm, x: llm.stream(x),
    "priority": lambda llm, x: llm.generate(["a", "b"], priority=x),
    "one priority": lambda llm, x: llm.generate(["a", "b"], priority=[x]),
    "logprobs": lambda llm, x: llm.generate("a", SamplingParams(logprobs=x)),
    "bias": lambda llm, x: llm.generate("a", SamplingParams(logit_bias={x: 1.0})),
    "level": lambda llm, x: llm.sleep(x),
    "digits": lambda llm, x: llm.sleep("9" * 5000),
    "tags": lambda llm, x: llm.sleep(1, x),
    "tag": lambda llm, x: llm.sleep(1, [x]),
    "tags of a pause": lambda llm, x: llm.sleep(0, x),
    "mode": lambda llm, x: llm.sleep(1, None, x),
    "wake": lambda llm, x: llm.wake_up(x),
    "reload": lambda llm, x: llm.wake_up(reload=x),
    "version": lambda llm, x: llm.begin_update(x),
    "messages": lambda llm, x: llm.chat(x),
    "role": lambda llm, x: llm.chat([{"role": x, "content": "a"}]),
    "content": lambda llm, x: llm.chat([{"role": "user", "content": x}]),
    "template": lambda llm, x: llm.chat(HI, chat_template=x),
    "decode": lambda llm, x: llm.get_tokenizer().decode(x),
    "decode one": lambda llm, x: llm.get_tokenizer().decode([x]),
    "template arguments": lambda llm, x: llm.chat(HI, chat_template_kwargs=x),
}


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder) as made:
        yield made


@pytest.mark.parametrize("value", [LONG, 10**4000], ids=["unspeakable", "long"])
@pytest.mark.parametrize("name", CALLS)
def test_a_long_number_is_refused_in_few_words(llm: LLM, name: str, value: int) -> None:
    with pytest.raises(TorporError) as caught:
        CALLS[name](llm, value)
    assert len(str(caught.value)) < 600
    assert llm.generate([[1, 2]])[0].finished


def test_a_value_is_shown_as_far_as_it_goes() -> None:
    assert shown("a") == "'a'"
    assert shown(LONG) == "a number of 16610 bits"
    assert shown([LONG]) == "a list with a number too long to show"
    assert shown("x" * 300, 10) == "'xxxxxx..."


def test_a_timeout_longer_than_any_float_is_long() -> None:
    assert check_timeout("asleep_timeout_s", LONG) > 1e300
    with pytest.raises(ArgumentError, match="a number of 16610 bits"):
        check_timeout("asleep_timeout_s", -LONG)


def test_a_prompt_without_content_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="a tensor on meta"):
        llm.generate(torch.tensor([1, 2], device="meta"))


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_text_that_no_answer_holds_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=rf"{name} has .*lone surrogate"):
        SamplingParams(**{name: ["a", "\udc80"]})  # type: ignore[arg-type]
