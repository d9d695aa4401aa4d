from __future__ import annotations

from typing import Any

import pytest
import torch

from torpor.engine.options import (
    check_mode,
    check_on_asleep,
    check_timeout,
    resolve_dtype,
    resolve_level,
    resolve_max_model_len,
    resolve_seed,
    set_num_threads,
)
from torpor.errors import ArgumentError


def test_dtypes_are_taken_by_name_or_as_they_are() -> None:
    assert resolve_dtype("auto") is torch.float32
    assert resolve_dtype("bfloat16") is torch.bfloat16
    assert resolve_dtype(torch.float16) is torch.float16


@pytest.mark.parametrize("dtype", ["fp32", "", None, 32, torch.int8, torch.float64])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"dtype is .*give 'auto'"):
        resolve_dtype(dtype)


def test_the_context_is_bounded_by_the_model_and_a_default() -> None:
    assert resolve_max_model_len(None, 128) == 128
    assert resolve_max_model_len(None, 8192) == 2048
    assert resolve_max_model_len(8192, 8192) == 8192


@pytest.mark.parametrize("length", [0, 1, -1, 2.0, "128", True, 129])
def test_other_contexts_are_refused(length: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_model_len is .*give"):
        resolve_max_model_len(length, 128)


@pytest.mark.parametrize(("level", "number"), [(0, 0), (1, 1), (2, 2), ("0", 0), ("2", 2)])
def test_levels_are_taken_as_numbers_or_digits(level: int | str, number: int) -> None:
    assert resolve_level(level) == number


@pytest.mark.parametrize("level", [7, -1, 3, "7", "", "one", "1.0", 1.0, None, True, [1], "²"])
def test_other_levels_are_refused_with_the_legal_ones(level: Any) -> None:
    with pytest.raises(ArgumentError, match=r"level is .*give 0 .*1 .*2 "):
        resolve_level(level)


def test_modes_are_those_of_vllm() -> None:
    for mode in ("abort", "wait", "keep"):
        check_mode(mode)
    with pytest.raises(ArgumentError, match=r"mode is 'drop'; give one of 'abort', 'wait', 'keep'"):
        check_mode("drop")


@pytest.mark.parametrize("seed", [None, 1.0, "1", True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    assert resolve_seed(-3) == -3
    with pytest.raises(ArgumentError, match="seed is"):
        resolve_seed(seed)


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, "2", True])
def test_a_number_of_threads_is_a_positive_whole_number(num_threads: Any) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ArgumentError, match="num_threads is"):
        set_num_threads(num_threads)
    set_num_threads(None)
    assert torch.get_num_threads() == before


def test_a_number_of_threads_is_set_for_the_process() -> None:
    set_num_threads(2)
    assert torch.get_num_threads() == 2


def test_a_request_for_a_sleeping_model_is_queued_refused_or_wakes_it() -> None:
    for policy in ("queue", "reject", "wake"):
        assert check_on_asleep(policy) == policy
    for bad in ("drop", None, True, ["queue"]):
        with pytest.raises(ArgumentError) as caught:
            check_on_asleep(bad)
        told = f"on_asleep is {bad!r}; give one of 'queue', 'reject', 'wake'"
        assert str(caught.value) == told


def test_a_timeout_is_a_number_above_zero() -> None:
    assert check_timeout("t_s", 3) == 3.0
    assert check_timeout("t_s", 0.5) == 0.5
    assert check_timeout("t_s", float("inf")) == float("inf")


@pytest.mark.parametrize("seconds", [0, -1.0, "3", None, True, float("nan")])
def test_another_timeout_is_refused_by_its_name(seconds: Any) -> None:
    with pytest.raises(ArgumentError, match=r"t_s is .*; give a number of seconds above 0"):
        check_timeout("t_s", seconds)
