from __future__ import annotations

from typing import Any

import pytest
import torch

from torpor.engine.options import (
    check_mode,
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
