"""Compiled kernels where they can be had, torch's everywhere, and the same tokens from both."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.engine import backends
from torpor.engine.args import EngineArgs
from torpor.engine.async_llm import AsyncLLM
from torpor.engine.backends import choose_backends
from torpor.engine.llm import LLM
from torpor.engine.steps.kv_cache import KVCacheMemory
from torpor.errors import ArgumentError
from torpor.model.attention.interface import AttentionSpec
from torpor.model.attention.kv_layout import KVLayout
from torpor.model.layers.ops import OpsModule, TorchOps
from torpor.model.native import library
from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.ops import NativeOps
from torpor.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS: list[list[int]] = [
    [5, 9, 200, 31, 7],
    [77],
    [3 + 7 * index % 290 for index in range(90)],
    [250, 11, 11, 4],
]


@pytest.fixture
def compiled_kernels() -> None:
    """Skips where there are none."""
    try:
        library.load_library()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, and without kernels from before."""
    monkeypatch.setenv("TORPOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(backends, "load_library", library.load_library.__wrapped__)


@pytest.fixture
def llms() -> Iterator[list[LLM]]:
    """Engines to close."""
    opened: list[LLM] = []
    yield opened
    for llm in opened:
        llm.close()


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy answers to all prompts."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def names(llm: LLM) -> set[str]:
    """What an engine computes with."""
    runner = llm.core._runner
    parts = [part for part in runner._model.modules() if isinstance(part, OpsModule)]
    assert parts
    return {runner._attention.capabilities.name, *(type(part.ops).__name__ for part in parts)}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.usefixtures("compiled_kernels")
def test_both_kinds_give_the_same_greedy_tokens(
    tiny_folder: Path, llms: list[LLM], batch_invariant: bool
) -> None:
    for kernels in ("torch", "native"):
        llms.append(LLM(tiny_folder, cpu_kernels=kernels, batch_invariant=batch_invariant))
    assert [names(llm) for llm in llms] == [{"torch", "TorchOps"}, {"native", "NativeOps"}]
    answers = [tokens(llm) for llm in llms]
    assert answers[0] == answers[1]
    assert len({token for answer in answers[0] for token in answer}) > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("compiled_kernels")
def test_kernels_are_used_where_they_can_be_had_and_nothing_is_said(
    tiny_folder: Path, llms: list[LLM], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    llms.append(LLM(tiny_folder, dtype=dtype))
    assert names(llms[0]) == {"native", "NativeOps"}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.usefixtures("compiled_kernels")
def test_kernels_find_weights_and_cache_after_a_sleep(
    tiny_folder: Path, llms: list[LLM], level: int
) -> None:
    llms.append(LLM(tiny_folder, cpu_kernels="native"))
    before = tokens(llms[0])
    for _ in range(2):
        llms[0].sleep(level=level)
        llms[0].wake_up()
        if level == 2:
            llms[0].reload_weights()
        assert tokens(llms[0]) == before


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_is_used_and_one_warning_says_so(
    tiny_folder: Path, llms: list[LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llms.append(LLM(tiny_folder, cpu_kernels="auto"))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "computing with torch's kernels, which are slower: "
        "no C++ compiler found (g++, clang++, c++); install g++, or set CXX"
    ]
    assert names(llms[0]) == {"torch", "TorchOps"}
    llms.append(LLM(tiny_folder, cpu_kernels="torch"))
    assert tokens(llms[0]) == tokens(llms[1])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_kernels_asked_for_that_cannot_be_had_are_an_error(tiny_folder: Path, make: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(tiny_folder, cpu_kernels="native")
    told = str(caught.value)
    assert told.startswith(
        "cpu_kernels is 'native', and there are none: no C++ compiler found (g++"
    )
    assert "install g++, or set CXX" in told
    assert told.endswith("; or use cpu_kernels='auto'")
    assert isinstance(caught.value.__cause__, KernelsUnavailableError)


@pytest.mark.parametrize("value", ["cuda", "Native", "", None, True, 1])
@pytest.mark.parametrize("make", [LLM, AsyncLLM])
def test_another_value_is_refused_before_the_model_is_looked_for(make: Any, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make("no-such-model", cpu_kernels=value)
    assert str(caught.value) == f"cpu_kernels is {value!r}; give 'auto' or 'native' or 'torch'"


def memory(dtype: torch.dtype = torch.float32, device: str = "cpu") -> KVCacheMemory:
    """A cache of one layer."""
    spec = AttentionSpec(layer=0, num_heads=2, num_kv_heads=1, k_dim=8, v_dim=8, scale=1.0)
    layout = KVLayout([spec], 8, dtype)
    kv = torch.zeros(4, layout.elements_per_block, dtype=dtype, device=device)
    return KVCacheMemory(kv, layout, ())


def allocate(shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.usefixtures("compiled_kernels")
def test_batch_invariance_reaches_attention(kernels: str, batch_invariant: bool) -> None:
    args = EngineArgs(model="m", cpu_kernels=kernels, batch_invariant=batch_invariant)
    ops, make_attention = choose_backends(args, memory(), allocate)
    attention = make_attention("")
    assert attention.capabilities.name == kernels
    assert attention.capabilities.batch_invariant is (batch_invariant or kernels == "native")
    assert isinstance(ops, NativeOps if kernels == "native" else TorchOps)


@pytest.mark.parametrize(("kernels", "device"), [("torch", "cpu"), ("auto", "meta")])
def test_kernels_nobody_wants_are_not_compiled(
    kernels: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(backends, "load_library", never)
    args = EngineArgs(model="m", cpu_kernels=kernels)
    ops, make_attention = choose_backends(args, memory(device=device), allocate)
    attention = make_attention("")
    assert attention.capabilities.name == "torch"
    assert isinstance(ops, TorchOps)


def test_a_dtype_without_kernels_goes_to_torch_and_compiles_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(backends, "load_library", never)
    half = memory(torch.float16)
    ops, make_attention = choose_backends(EngineArgs(model="m"), half, allocate)
    attention = make_attention("")
    assert attention.capabilities.name == "torch"
    assert isinstance(ops, TorchOps)
    assert caplog.records == []
    with pytest.raises(ArgumentError, match=r"'native', .* torch\.float16 .*or use .*'auto'"):
        choose_backends(EngineArgs(model="m", cpu_kernels="native"), half, allocate)
