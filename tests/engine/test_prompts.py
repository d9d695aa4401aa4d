from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torpor.engine.requests.prompts import PromptReader, params_for
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import PromptTooLongError, RequestError
from torpor.params import SamplingParams


@pytest.fixture
def reader(tokenizer: Tokenizer) -> PromptReader:
    return PromptReader(tokenizer, vocab_size=320, max_model_len=16)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([3, 4], [(3, 4)]),
        ((3, 4), [(3, 4)]),
        ([[3, 4], [5]], [(3, 4), (5,)]),
        ({"prompt_token_ids": [3, 4]}, [(3, 4)]),
        ([{"prompt_token_ids": (3, 4)}, [5]], [(3, 4), (5,)]),
        (np.array([3, 4]), [(3, 4)]),
        (torch.tensor([3, 4]), [(3, 4)]),
        ([torch.tensor([3, 4]), {"prompt_token_ids": np.array([5])}], [(3, 4), (5,)]),
        ([np.int64(3), 4], [(3, 4)]),
        ([], []),
    ],
    ids=str,
)
def test_token_ids_are_read_in_every_form(
    reader: PromptReader, prompts: Any, ids: list[tuple[int, ...]]
) -> None:
    read = reader.read_all(prompts)
    assert [prompt.token_ids for prompt in read] == ids
    assert all(type(value) is int for prompt in read for value in prompt.token_ids)
    assert all(prompt.text is None for prompt in read)


def test_texts_are_read_in_every_form(reader: PromptReader, tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("the dog"))
    for prompts in ("the dog", ["the dog"], {"prompt": "the dog"}, [{"prompt": "the dog"}]):
        (prompt,) = reader.read_all(prompts)
        assert (prompt.text, prompt.token_ids) == ("the dog", ids)


def test_token_ids_win_over_the_text_beside_them(reader: PromptReader) -> None:
    (prompt,) = reader.read_all({"prompt": "the dog", "prompt_token_ids": [7]})
    assert (prompt.text, prompt.token_ids) == ("the dog", (7,))


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("", "the prompt is an empty string"),
        (["a", ""], "prompt 1 is an empty string"),
        ({"prompt": ""}, "empty string"),
        ({}, "the keys []"),
        ({"prompt": 5}, "'prompt' 5"),
        ({"prompt": None}, "empty string"),
        ({"text": "a"}, "the keys ['text']"),
        ({"prompt": "a", "multi_modal_data": 1}, "multi_modal_data"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt_token_ids": None}, "token ids None"),
        ({"prompt_token_ids": "abc"}, "token ids 'abc'"),
        ({"prompt_token_ids": [1, "a"]}, "token ids [1, 'a']"),
        ({"prompt_token_ids": [True]}, "token ids [True]"),
        ({"prompt_token_ids": [1.0]}, "token ids [1.0]"),
        ([[]], "prompt 0 has no tokens"),
        ([[3, -1]], "token id -1 at index 1"),
        ([320], "token id 320 at index 0; the vocabulary has ids 0 to 319"),
        ([[3], [5, 10**30]], "prompt 1 has token id 1000"),
        (np.zeros((2, 2), dtype=np.int64), "token ids [[0, 0], [0, 0]]"),
        (torch.zeros(2), "token ids [0.0, 0.0]"),
        (torch.tensor(3), "token ids 3"),
        (5, "prompts is 5"),
        (None, "prompts is None"),
        (b"abc", "prompts is b'abc'"),
        ({"a"}, "prompts is {"),
        ([None], "prompt 0 is None"),
        ([b"abc"], "prompt 0 is b'abc'"),
        (["a", 5], "prompt 1 is 5"),
        ("\ud800", "lone surrogate"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_with_its_value(
    reader: PromptReader, prompts: Any, told: str
) -> None:
    with pytest.raises(RequestError) as caught:
        reader.read_all(prompts)
    assert told in str(caught.value)


def test_a_prompt_must_leave_room_for_one_token(reader: PromptReader) -> None:
    assert len(reader.read_all([3] * 15)) == 1
    with pytest.raises(PromptTooLongError, match=r"16 tokens and max_model_len is 16.*shorten"):
        reader.read_all([3] * 16)


def test_chat_text_gets_no_special_tokens_added(reader: PromptReader) -> None:
    assert reader.read_chat("<|start|>a", "the conversation").token_ids[0] == 0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("stop_token_ids", [0, 319], [0, 320]),
        ("allowed_token_ids", [319], [5, 320, 7]),
        ("logit_bias", {319: 1.0}, {3: 1.0, 320: -1.0}),
        ("logit_bias", {"319": 1.0}, {"320": 1.0}),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused(
    reader: PromptReader, name: str, good: Any, bad: Any
) -> None:
    reader.check_params(SamplingParams(**{name: good}))
    with pytest.raises(RequestError) as caught:
        reader.check_params(SamplingParams(**{name: bad}))
    assert str(caught.value) == f"{name} holds 320, but the vocabulary has 320 tokens; remove it"


def test_default_params_fit_every_model(reader: PromptReader) -> None:
    reader.check_params(SamplingParams())


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_the_engine_gives_are_refused(
    tokenizer: Tokenizer, name: str
) -> None:
    def check(most: int, count: int) -> None:
        reader = PromptReader(tokenizer, vocab_size=320, max_model_len=16, max_logprobs=most)
        reader.check_params(SamplingParams(**{name: count}))

    for most, count in [(5, 0), (5, 5), (0, 0), (-1, -1), (-1, 1000)]:
        check(most, count)
    for most, count in [(5, 6), (5, -1), (0, 1)]:
        told = f"^{name} is {count}, and this engine gives at most {most} per token; lower it, or "
        with pytest.raises(RequestError, match=told):
            check(most, count)


def test_params_are_given_once_or_per_prompt() -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert params_for(None, 2) == [SamplingParams()] * 2
    assert params_for(one, 2) == [one, one]
    assert params_for([one, two], 2) == [one, two]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ([SamplingParams()], "1 entries for 2 prompts"),
        ({"temperature": 0}, "sampling_params is {"),
        ([SamplingParams(), None], "sampling_params[1] is None"),
        (5, "sampling_params is 5"),
    ],
    ids=str,
)
def test_bad_params_are_refused(params: Any, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        params_for(params, 2)
    assert told in str(caught.value)
