from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from torpor.engine.args import EngineArgs, EngineOptions, engine_args
from torpor.engine.async_llm import AsyncLLM
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError


def test_the_keywords_are_the_fields_with_the_same_types() -> None:
    names = [field.name for field in fields(EngineArgs)]
    assert names[0] == "model"
    assert list(EngineOptions.__annotations__) == names[1:]
    options = {
        name: annotation.__forward_arg__
        for name, annotation in EngineOptions.__annotations__.items()
    }
    arguments = inspect.get_annotations(EngineArgs)
    assert options == {name: arguments[name] for name in names[1:]}


def test_every_option_may_be_left_out() -> None:
    assert EngineOptions.__required_keys__ == frozenset()
    assert all(
        field.default is not MISSING for field in fields(EngineArgs) if field.name != "model"
    )


def test_the_defaults_are_these() -> None:
    args = engine_args("m", {})
    found = {field.name: getattr(args, field.name) for field in fields(args)}
    assert found == {
        "model": "m",
        "load_format": "auto",
        "sink_placement": "merged",
        "kv_cache_dtype": "auto",
        "calculate_kv_scales": False,
        "dtype": "auto",
        "max_model_len": None,
        "seed": 0,
        "num_threads": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": None,
        "long_prefill_token_threshold": 0,
        "block_size": 16,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "prefault_kv_cache": None,
        "enable_prefix_caching": True,
        "batch_invariant": False,
        "cpu_kernels": "auto",
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "scheduling_policy": "fcfs",
        "strict": True,
        "spill_dir": None,
        "poison": None,
        "progress": None,
        "on_foreign_write": "error",
        "host_copy": "defer",
        "check_nan": True,
    }


def test_options_become_fields() -> None:
    args = engine_args(
        Path("folder"),
        {"block_size": 8, "max_num_batched_tokens": 1, "max_logprobs": -1, "seed": -1},
    )
    assert args.model == Path("folder")
    assert (args.block_size, args.max_num_batched_tokens, args.max_logprobs) == (8, 1, -1)


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override"]
)
def test_some_sizes_may_be_left_to_the_engine(name: str) -> None:
    options: Any = {name: None}
    assert getattr(engine_args("m", options), name) is None


@pytest.mark.parametrize("name", ["temperature", "max_seqs", "model", "on_asleep", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    options: Any = {name: 1, "block_size": 8}
    with pytest.raises(ArgumentError) as caught:
        engine_args("m", options)
    told = str(caught.value)
    assert told.startswith(f"unknown argument {name!r}; known are dtype, max_model_len, ")
    assert told.endswith("check_nan")


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_both_faces_refuse_an_unknown_name_before_they_load(make: Any) -> None:
    with pytest.raises(ArgumentError, match="unknown argument 'tensor_parallel'"):
        make("no-such-model", tensor_parallel=2)


@pytest.mark.parametrize("model", [None, 5, b"smollm2", ["smollm2"]])
def test_a_model_is_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model is .*; give a name or the path of a folder"):
        engine_args(model, {})


LOWEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,
    "max_logprobs": -1,
}


@pytest.mark.parametrize(("name", "low"), LOWEST.items())
def test_a_whole_number_has_its_lowest_value(name: str, low: int) -> None:
    good: Any = {name: low}
    assert getattr(engine_args("m", good), name) == low
    for value in (low - 1, 16.0, "16", True, [16]):
        bad: Any = {name: value}
        with pytest.raises(ArgumentError) as caught:
            engine_args("m", bad)
        told = f"{name} is {value!r}; give a whole number of at least {low}"
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize("name", LOWEST)
def test_a_whole_number_has_its_highest_value(name: str) -> None:
    most = 2**63 - 1 if name == "kv_cache_memory_bytes" else 2**31 - 1
    good: Any = {name: most}
    assert getattr(engine_args("m", good), name) == most
    for value, told in (
        (most + 1, most + 1),
        (10**40, 10**40),
        (10**5000, "a number of 16610 bits"),
    ):
        bad: Any = {name: value}
        with pytest.raises(ArgumentError) as caught:
            engine_args("m", bad)
        assert str(caught.value) == f"{name} is {told}; give at most {most}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("progress", 3),
        ("poison", 3),
        ("spill_dir", "/proc"),
        ("spill_dir", 3),
        ("on_foreign_write", 3),
        ("host_copy", None),
        ("seed", 10**40),
        ("dtype", 3),
        ("num_threads", 10**40),
    ],
)
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_both_faces_refuse_a_value_before_they_look_for_the_model(
    make: Any, name: str, value: Any
) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name} is .*{value!r}.*; give "):
        make("no-such-model", **{name: value})


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "long_prefill_token_threshold", "block_size", "max_logprobs"]
)
def test_none_is_no_number_where_there_is_a_default(name: str) -> None:
    options: Any = {name: None}
    with pytest.raises(
        ArgumentError, match=rf"^{name} is None; give a whole number of at least -?\d$"
    ):
        engine_args("m", options)


@pytest.mark.parametrize(
    "name", ["enable_prefix_caching", "batch_invariant", "calculate_kv_scales"]
)
@pytest.mark.parametrize("value", [1, 0, None, "True"])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    options: Any = {name: value}
    with pytest.raises(ArgumentError, match=rf"{name} is .*; give True or False"):
        engine_args("m", options)


def test_the_cache_is_taken_at_once_or_not_or_as_its_size_says() -> None:
    for value in (True, False, None):
        assert engine_args("m", {"prefault_kv_cache": value}).prefault_kv_cache is value
    wrong: Any = {"prefault_kv_cache": 1}
    with pytest.raises(ArgumentError, match="prefault_kv_cache is 1; give True, False or None"):
        engine_args("m", wrong)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("cpu_kernels", ["auto", "native", "torch"]),
        ("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3"]),
        ("logprobs_mode", ["raw_logprobs", "processed_logprobs"]),
        ("scheduling_policy", ["fcfs", "priority"]),
        ("on_foreign_write", ["adopt", "restore", "error"]),
        ("host_copy", ["defer", "write_through", "drop"]),
    ],
)
def test_a_choice_is_one_of_its_names(name: str, choices: list[str]) -> None:
    for choice in choices:
        good: Any = {name: choice}
        assert getattr(engine_args("m", good), name) == choice
    for value in ("raw_logits", "", None, ["fcfs"], {}):
        bad: Any = {name: value}
        with pytest.raises(ArgumentError) as caught:
            engine_args("m", bad)
        assert str(caught.value) == f"{name} is {value!r}; give {' or '.join(map(repr, choices))}"


def test_arguments_cannot_be_changed() -> None:
    args = EngineArgs(model="m")
    with pytest.raises(AttributeError):
        args.block_size = 8  # type: ignore[misc]
