from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.engine.options import (
    check_mode,
    check_on_asleep,
    check_poison,
    check_progress,
    check_spill_dir,
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


@pytest.mark.parametrize(
    "seed", [None, 1.0, "1", True, float("nan"), 10**40, -(10**40), 2**64, -(2**63) - 1]
)
def test_a_seed_is_a_whole_number_of_64_bits(seed: Any) -> None:
    for good in (-3, -(2**63), 2**64 - 1):
        assert resolve_seed(good) == good
    limits = "of at least -9223372036854775808 and at most 18446744073709551615"
    with pytest.raises(ArgumentError) as caught:
        resolve_seed(seed)
    assert str(caught.value) == f"seed is {seed!r}; give a whole number {limits}"


TOO_LONG = 10**5000
"""Python refuses to spell it."""


@pytest.mark.parametrize(
    "check",
    [
        check_mode,
        check_on_asleep,
        check_poison,
        check_progress,
        check_spill_dir,
        resolve_dtype,
        resolve_level,
        resolve_seed,
        set_num_threads,
        lambda value: resolve_max_model_len(value, 128),
        lambda value: check_timeout("t_s", [value]),
    ],
)
def test_a_number_too_long_to_show_is_refused_all_the_same(check: Any) -> None:
    with pytest.raises(ArgumentError, match=r"is a (number of 16610 bits|list with a number too)"):
        check(TOO_LONG)


@pytest.mark.parametrize("poison", [3, 0, 1, -1, 10**40, float("nan"), "ff", 255.0, b"x", [255]])
def test_another_poison_is_refused(poison: Any) -> None:
    for good in (None, True, False, 255, 127):
        check_poison(good)
    with pytest.raises(ArgumentError) as caught:
        check_poison(poison)
    assert str(caught.value) == f"poison is {poison!r}; give True, False, None, 0xff, 0x7f"


def nothing(stage: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize(
    "progress", [3, True, float("nan"), "x", [], {}, lambda: None, lambda stage: None]
)
def test_progress_is_a_function_of_three(progress: Any) -> None:
    for good in (None, nothing, lambda *told: None, lambda s, d, t, more=1: None, print):
        check_progress(good)
    with pytest.raises(ArgumentError) as caught:
        check_progress(progress)
    told = f"progress is {progress!r}; give a function of (stage, done, total), or None"
    assert str(caught.value) == told


def test_host_copies_go_to_a_folder_that_takes_files(tmp_path: Path) -> None:
    for good in (None, tmp_path, str(tmp_path)):
        check_spill_dir(good)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", [False, True], ids=["argument", "environment"])
@pytest.mark.parametrize("kind", ["file", "missing", "unwritable"])
def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variable: bool
) -> None:
    (tmp_path / "file").touch()
    # Not even root can make files in /proc.
    folder = Path("/proc") if kind == "unwritable" else tmp_path / kind
    name = "TORPOR_SPILL_DIR" if variable else "spill_dir"
    if variable:
        monkeypatch.setenv(name, str(folder))
    with pytest.raises(ArgumentError) as caught:
        check_spill_dir(None if variable else folder)
    told = str(caught.value)
    assert told.startswith(f"{name} is {str(folder)!r}, where no file can be made (")
    assert told.endswith("); give a folder that can be written to")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("folder", [3, True, float("nan"), b"/tmp", ["/tmp"], "", "\0", "\ud800"])
def test_what_is_no_path_holds_no_host_copies(folder: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^spill_dir is .*; give "):
        check_spill_dir(folder)


def test_a_folder_in_the_environment_does_not_matter_beside_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_SPILL_DIR", str(tmp_path / "missing"))
    check_spill_dir(tmp_path)
    monkeypatch.setenv("TORPOR_SPILL_DIR", "")
    check_spill_dir(None)


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
