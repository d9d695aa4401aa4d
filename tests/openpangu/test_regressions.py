"""Ways in which sinks were lost or stale elsewhere, each with the test that sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torpor.engine.llm import LLM
from torpor.engine.steps.sinks import OWNER
from torpor.errors import OwnershipError
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.layers.attention import Attention
from torpor.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 12, 44, 7, 70, 31], [80], [3, 4] * 20]
KINDS = ("pro moe v2", "pro moe v2, zero values", "ultra, sinks")
NORM = {"pro": "k_layernorm.weight", "ult": "kv_a_layernorm.weight"}
"""A source of the sinks, by the kind's first letters."""

each_kind = pytest.mark.parametrize("kind", KINDS)
each_placement = pytest.mark.parametrize("placement", ["merged", "reserved"])


def engine(folders: Folders, kind: str, placement: str, **options: Any) -> LLM:
    given = {"max_model_len": 64, "poison": True, "sink_placement": placement, **options}
    return LLM(folders(kind), **given)


def answers(llm: LLM) -> Any:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def sinks(llm: LLM) -> list[torch.Tensor]:
    """Copies of the layers' sinks; reserved blocks must hold the same, bit for bit."""
    layers = llm.core._runner._model.static_sinks()
    if OWNER in llm.cache.pool.reserved():
        for layer in layers:
            keys, values = llm.core._runner._attention.read(layer.spec.layer)
            assert torch.equal(keys, layer.sink_key)
            assert torch.equal(values, layer.sink_value)
    return [each.clone() for layer in layers for each in (layer.sink_key, layer.sink_value)]


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@each_placement
@each_kind
def test_sinks_are_not_lost_with_the_kv_cache(folders: Folders, kind: str, placement: str) -> None:
    with engine(folders, kind, placement) as llm:
        want, before = answers(llm), sinks(llm)
        for _ in range(3):
            llm.release_kv_cache_memory()
            llm.wake_up(tags=["kv_cache"])
            assert same(sinks(llm), before)
            assert answers(llm) == want


@each_placement
@each_kind
def test_sinks_are_not_stale_after_an_update_without_sleep(
    folders: Folders, kind: str, placement: str
) -> None:
    name = f"model.layers.0.self_attn.{NORM[kind[:3]]}"
    part = [(name, tensors(MODELS[kind], seed=1)[name])]
    with engine(folders, kind, placement) as llm:
        first, before = answers(llm), sinks(llm)
        llm.update_weights(part)
        after = answers(llm)
        moved = sinks(llm)
        assert not same(moved, before)
        # As an engine has it that was given the same weights from the start.
        llm.release_kv_cache_memory()
        llm.wake_up()
        for layer in llm.core._runner._model.model.layers:
            for entry in layer.self_attn.derived(""):
                assert torch.equal(entry.tensor, entry.rebuild()), entry.name
        assert same(sinks(llm), moved)
        assert answers(llm) == after
        assert after != first


@each_placement
@pytest.mark.parametrize("kind", ["pro moe v2, zero values", "ultra, zero latents"])
def test_zero_values_are_zeros_after_level_2(folders: Folders, kind: str, placement: str) -> None:
    name = "param_sink_compressed_kv" if "latents" in kind else "param_sink_value"
    with engine(folders, kind, placement) as llm:
        want, before = answers(llm), sinks(llm)
        rows = [row for row in llm.sleeper.table() if row.name.endswith(name)]
        assert [(row.cls, row.tag) for row in rows] == [("buffer", "weights")] * 3
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            llm.wake_up(tags=["kv_cache"])
            llm.reload_weights()
            for layer in llm.core._runner._model.model.layers:
                assert not getattr(layer.self_attn, name).any()
                assert not layer.self_attn.sink_attn.sink_value.any()
            assert same(sinks(llm), before)
            assert answers(llm) == want


def test_zero_values_in_a_plain_attribute_are_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Attention._add_sinks

    def plain(self: Attention, *args: Any) -> None:
        add(self, *args)
        del self._buffers["param_sink_value"]
        self.__dict__["param_sink_value"] = torch.zeros(16, 2, 16)

    monkeypatch.setattr(Attention, "_add_sinks", plain)
    with pytest.raises(OwnershipError, match="param_sink_value"):
        engine(folders, "pro moe v2, zero values", "merged")


WEIGHTS, CACHE, RELOAD = ["weights"], ["kv_cache"], None
WAKES = {
    "1, weights first": (1, [WEIGHTS, CACHE]),
    "1, KV cache first": (1, [CACHE, WEIGHTS]),
    "2, weights first": (2, [WEIGHTS, RELOAD, CACHE]),
    "2, weights first, filled last": (2, [WEIGHTS, CACHE, RELOAD]),
    "2, KV cache first": (2, [CACHE, WEIGHTS, RELOAD]),
}


@pytest.mark.parametrize("wake", WAKES)
@each_kind
def test_reserved_blocks_are_written_when_weights_and_cache_are_both_there(
    folders: Folders, kind: str, wake: str
) -> None:
    level, order = WAKES[wake]
    with engine(folders, kind, "reserved") as llm:
        want, before = answers(llm), sinks(llm)
        llm.sleep(level=level)
        for tags in order:
            if tags is None:
                llm.reload_weights()
            else:
                llm.wake_up(tags=tags)
        assert same(sinks(llm), before)
        llm.wake_up()
        assert answers(llm) == want


class Graph(TorchDispatchMode):
    """A step as a graph keeps it: every operation by its addresses, and none of its Python."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Compute all of it again, each result to its place."""
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], tuple[Graph, torch.Tensor]]:
    """Captures the first step of a prompt; its graph, and where it leaves its logits."""

    def call(llm: LLM) -> tuple[Graph, torch.Tensor]:
        runner, graph, logits = llm.core._runner, Graph(), []
        launch = runner.launch
        # Whatever the first step does once is done before a graph is captured.
        llm.generate([[80]], SamplingParams(temperature=0, max_tokens=1))

        def launched(step: Any) -> Any:
            with graph:
                made = launch(step)
            logits.append(made.logits_RV)
            return made

        with monkeypatch.context() as patch:
            patch.setattr(runner, "launch", launched)
            llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
        (place,) = logits
        return graph, place

    return call


@each_placement
@pytest.mark.parametrize("kind", [*KINDS, "pro moe v2, windows"])
def test_a_replayed_step_finds_sinks_that_none_of_its_python_wrote(
    folders: Folders,
    kind: str,
    placement: str,
    captured: Callable[[LLM], tuple[Graph, torch.Tensor]],
) -> None:
    with engine(folders, kind, placement, cpu_kernels="torch") as llm:
        graph, place = captured(llm)
        want = place.clone()
        for lose in (
            llm.release_kv_cache_memory,
            lambda: llm.sleep(level=1),
            lambda: llm.sleep(level=2),
        ):
            lose()
            llm.wake_up()
            with torch.inference_mode():
                place.fill_(torch.nan)
                graph.replay()
                assert torch.equal(place, want)


@pytest.fixture
def reads_past_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that need their fresh blocks cleared, as some on other devices do."""
    told = TorchAttention.capabilities.fget
    assert told is not None
    monkeypatch.setattr(
        TorchAttention,
        "capabilities",
        property(lambda self: dataclasses.replace(told(self), reads_past_length=True)),
    )


@pytest.fixture
def cleared(folders: Folders, reads_past_lengths: None) -> Iterator[tuple[LLM, list[int]]]:
    """An engine that clears fresh blocks, and every block it ever cleared or spoiled."""
    options = {"cpu_kernels": "torch", "num_gpu_blocks_override": 6}
    with engine(folders, "pro moe v2", "reserved", **options) as llm:
        touched: list[int] = []
        runner, pool = llm.core._runner, llm.cache.pool
        clear, spoil = runner._clear, pool._on_free
        assert spoil is not None

        def watched(block_ids: Sequence[int], work: Callable[[Sequence[int]], None]) -> None:
            touched.extend(block_ids)
            work(block_ids)

        runner._clear = lambda block_ids: watched(block_ids, clear)
        pool._on_free = lambda block_ids: watched(block_ids, spoil)
        yield llm, touched


def test_nothing_clears_the_sinks_after_they_are_written(cleared: tuple[LLM, list[int]]) -> None:
    llm, touched = cleared
    held = set(llm.cache.pool.reserved()[OWNER].block_ids)
    want, before = answers(llm), sinks(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert same(sinks(llm), before)
        assert answers(llm) == want
        assert same(sinks(llm), before)
    llm.reset_prefix_cache()
    assert same(sinks(llm), before)
    assert touched
    assert not held & set(touched)
