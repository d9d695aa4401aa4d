from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import torpor
from torpor.errors import RequestError
from torpor.params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (0.0, None, (), ())
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (16, 0, None)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.skip_special_tokens
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
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop", {"a": 1}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
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
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
    ],
)
def test_a_bad_value_is_refused_with_name_and_value(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "give" in message or "remove" in message


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9e-6, True), (1e-5, False)])
def test_a_tiny_temperature_means_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


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


def test_params_and_outputs_do_not_import_torch() -> None:
    code = "import sys, torpor.params, torpor.outputs; sys.exit('torch' in sys.modules)"
    source = str(Path(torpor.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False)
    assert done.returncode == 0
