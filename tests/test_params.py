from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torpor
from torpor.errors import RequestError
from torpor.params import RequestOutputKind, SamplingParams, StructuredOutputsParams


def test_what_is_said_in_place_of_logprob_token_ids_is_possible() -> None:
    with pytest.raises(RequestError, match=r"set logprobs=-1, with max_logprobs=-1 for the engine"):
        SamplingParams(logprob_token_ids=[1])


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (0.0, None, (), ())
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (16, 0, None)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.prompt_logprobs, params.logit_bias, params.bad_words) == (None, (), ())
    assert (params.allowed_token_ids, params.structured_outputs) == (None, None)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.skip_special_tokens
    assert params.detokenize
    assert params.spaces_between_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 1.0),
        ("n", True),
        ("n", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1.5),
        ("seed", True),
        ("seed", 2**64),
        ("seed", 10**40),
        ("seed", -(2**63) - 1),
        ("seed", math.nan),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("stop_token_ids", ""),
        ("stop_token_ids", False),
        ("stop_token_ids", {}),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", 0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("logprobs", -2),
        ("logprobs", False),
        ("logprobs", 1.0),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", "all"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e300),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", [3]),
        ("logit_bias", 7),
        ("logit_bias", ""),
        ("logit_bias", "12"),
        ("logit_bias", False),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 3),
        ("bad_words", ["a", ""]),
        ("bad_words", [1]),
        ("bad_words", 1),
        ("structured_outputs", {"json": "{}"}),
        ("detokenize", 1),
        ("output_kind", 2),
        ("spaces_between_special_tokens", False),
        ("logprob_token_ids", [1]),
        ("flat_logprobs", True),
        ("extra_args", {"a": 1}),
        ("thinking_token_budget", 5),
        ("repetition_detection", "on"),
        ("trace_decode_token_ids", [1]),
    ],
)
def test_a_bad_value_is_refused_with_name_and_value(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert any(word in message for word in ("give", "remove", "leave"))


FINITE = {
    "temperature": "a finite number of at least 0",
    "top_p": "a finite number above 0 and at most 1",
    "min_p": "a finite number of at least 0 and at most 1",
    "presence_penalty": "a finite number of at least -2 and at most 2",
    "frequency_penalty": "a finite number of at least -2 and at most 2",
    "repetition_penalty": "a finite number of at least 1e-30 and at most 1e+30",
    "logit_bias": "a finite number",
}


@pytest.mark.parametrize(("name", "words"), FINITE.items())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "warm", None, True])
def test_what_is_no_finite_number_is_told_to_be_one(name: str, words: str, value: Any) -> None:
    place = "logit_bias[5]" if name == "logit_bias" else name
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: {5: value} if name == "logit_bias" else value})
    assert str(caught.value) == f"{place} is {value!r}; give {words}"


INTEGERS = {
    "n": (0, "a whole number of at least 1 and at most 16384"),
    "top_k": (-2, "a whole number of at least -1"),
    "seed": (
        2**64,
        "a whole number of at least -9223372036854775808 and at most 18446744073709551615, or None",
    ),
    "max_tokens": (0, "a whole number of at least 1, or None"),
    "min_tokens": (-1, "a whole number of at least 0"),
    "logprobs": (-2, "a whole number of at least -1, or None"),
    "prompt_logprobs": (-2, "a whole number of at least -1, or None"),
}


@pytest.mark.parametrize(("name", "bad", "words"), [(k, *v) for k, v in INTEGERS.items()])
def test_the_limits_of_whole_numbers_are_told_as_such(name: str, bad: int, words: str) -> None:
    for value in (bad, 1.5, math.nan, "7"):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name} is {value!r}; give {words}"


def test_seeds_reach_to_both_ends_of_their_range() -> None:
    for seed in (-(2**63), 2**64 - 1):
        assert SamplingParams(seed=seed).seed == seed


TOO_LONG = 10**5000
"""Python refuses to spell it."""


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (cls, entry.name)
        for cls in (SamplingParams, StructuredOutputsParams)
        for entry in dataclasses.fields(cls)
    ],
)
@pytest.mark.parametrize(
    "value",
    [TOO_LONG, -TOO_LONG, [TOO_LONG], {TOO_LONG: TOO_LONG}],
    ids=["high", "low", "list", "mapping"],
)
def test_a_number_too_long_to_show_is_refused_all_the_same(
    params: Any, name: str, value: Any
) -> None:
    try:
        made = params(**{name: value})
    except RequestError as error:
        told = str(error)
        assert name in told
        assert len(told) < 300
    else:
        assert name in {
            "top_k",
            "stop_token_ids",
            "allowed_token_ids",
            "max_tokens",
            "logprobs",
        } | {"prompt_logprobs"}
        assert made is not None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False)])
def test_a_tiny_temperature_means_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("given", "kept"), [(1e-5, 0.01), (0.009, 0.01), (0.01, 0.01), (0.3, 0.3), (0.0, 0.0)]
)
def test_a_small_temperature_is_raised(given: float, kept: float) -> None:
    assert SamplingParams(temperature=given).temperature == kept


def test_greedy_resets_the_filters() -> None:
    filtered = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert filtered == SamplingParams(temperature=0)
    assert SamplingParams(top_p=0.5, top_k=3, min_p=0.1).top_k == 3


def test_several_greedy_completions_are_refused() -> None:
    with pytest.raises(RequestError, match="n is 2 with temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 17 and max_tokens is 16"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17


def test_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_lists_are_copied_so_that_an_instance_can_be_shared() -> None:
    stop, ids = ["a", "b"], [3, 4]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("c")
    ids.append(5)
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (3, 4)
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(3, 4))
    assert len({params, SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4])}) == 1


def test_one_stop_string_need_not_be_a_list() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_numpy_scalars_become_plain_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(4))  # type: ignore[arg-type]
    assert type(params.temperature) is float
    assert type(params.max_tokens) is int
    with pytest.raises(RequestError):
        SamplingParams(ignore_eos=np.bool_(True))  # type: ignore[arg-type]


def test_an_instance_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_true_logprobs_mean_one() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int
    assert SamplingParams(logprobs=-1, prompt_logprobs=-1).logprobs == -1


def test_logit_bias_is_cut_and_takes_the_keys_of_json() -> None:
    params = SamplingParams(logit_bias={"7": 300, 3: -100.5, 5: 0.5})  # type: ignore[dict-item]
    assert params.logit_bias == ((3, -100.0), (5, 0.5), (7, 100.0))
    with pytest.raises(RequestError, match=r"logit_bias\[4\] is nan"):
        SamplingParams(logit_bias={4: math.nan})


def test_what_vllm_leaves_unset_may_be_given_empty() -> None:
    params = SamplingParams(extra_args={}, logprob_token_ids=[], bad_words=None, logit_bias={})
    assert params == SamplingParams()
    assert hash(params) == hash(SamplingParams())


def test_an_instance_survives_copies_and_pickles() -> None:
    params = SamplingParams(
        logit_bias={3: 1.0},
        bad_words=["a"],
        allowed_token_ids=[1, 2],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        output_kind=RequestOutputKind.DELTA,
    )
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=1) == params
    assert hash(dataclasses.replace(params)) == hash(params)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="set detokenize=True or give stop_token_ids"):
        SamplingParams(stop="a", detokenize=False)
    assert not SamplingParams(detokenize=False, stop_token_ids=[3]).detokenize


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [1, 9]), ("allowed_token_ids", [9]), ("logit_bias", {9: 1.0, 2: 1.0})],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=f"{name} holds 9, but the vocabulary has 9 tokens"):
        params.check_token_ids(9)
    params.check_token_ids(10)


def test_a_schema_is_kept_as_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    params = StructuredOutputsParams(json=schema)
    schema["type"] = "array"
    assert params.json == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert hash(params) == hash(StructuredOutputsParams(json=params.json))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "has no constraint; give exactly one of json, regex, choice"),
        ({"json_object": False}, "has no constraint"),
        ({"json": "{}", "regex": "a"}, "has json and regex; give exactly one"),
        ({"choice": ["a"], "json_object": True}, "has choice and json_object"),
        ({"json": 5}, "json is 5; give a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is no JSON"),
        ({"json": {"a": math.nan}}, "json is no JSON"),
        ({"regex": 5}, "regex is 5; give a string"),
        ({"grammar": b"x"}, "grammar is b'x'; give a string"),
        ({"choice": []}, "choice is empty; give at least one"),
        ({"choice": "ab"}, "choice is 'ab'; give a list"),
        ({"choice": ["a", 1]}, "give a list of strings"),
        ({"json_object": 1}, "json_object is 1; give True or False"),
        ({"json": "{}", "disable_any_whitespace": None}, "disable_any_whitespace is None"),
        ({"regex": "a", "disable_any_whitespace": True}, "has regex with an option for white"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "has choice with an option for white"),
        (
            {"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " ?"},
            "whitespace_pattern ' \\?'; remove one",
        ),
        ({"structural_tag": "x"}, "structural_tag is 'x', which torpor does not follow; remove"),
        (
            {"json": "{}", "disable_additional_properties": True},
            "does not follow; remove it and write additionalProperties in the schema",
        ),
    ],
)
def test_structured_outputs_take_one_constraint(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutputsParams(**arguments)


def test_options_that_change_nothing_are_accepted() -> None:
    assert StructuredOutputsParams(regex="a", disable_fallback=True).regex == "a"
    assert StructuredOutputsParams(choice=("a", "b")).choice == ("a", "b")


def test_params_and_outputs_do_not_import_torch() -> None:
    code = "import sys, torpor.params, torpor.outputs; sys.exit('torch' in sys.modules)"
    source = str(Path(torpor.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False)
    assert done.returncode == 0
