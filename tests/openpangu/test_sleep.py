"""openPangu generates, sleeps, wakes, reloads and generates: bit for bit the same, poison on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, tensors

from torpor.engine.llm import LLM
from torpor.params import SamplingParams
from torpor.sleep.classes import OwnershipClass

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 12, 44, 7, 70, 31], [80], [3, 4] * 20]
ALIKE = {"embedded, tied", "embedded, windows", "pro moe v2, 128 sinks", "ultra, direct queries"}
"""Kinds in which nothing sleeps that does not sleep in others."""
ALL = [
    (kind, placement)
    for kind, config in MODELS.items()
    for placement in ("merged", "reserved")
    if placement == "merged" or config.get("param_sink_number")
]
PLACED = [each for each in ALL if each[0] not in ALIKE]
ORDERS: dict[str, list[list[str] | None]] = {
    "all at once": [None],
    "weights first": [["weights"], ["kv_cache"], ["graphs"]],
    "KV cache first": [["kv_cache"], ["graphs"], ["weights"]],
}


def answers(llm: LLM) -> Any:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def derived(llm: LLM) -> dict[str, torch.Tensor]:
    """Copies of what is computed from weights."""
    model = llm.core._runner._model
    return {entry.name: entry.tensor.clone() for entry in model.derived()}


@dataclass
class Cycled:
    """An engine that test after test sends to sleep, and what it answered at first."""

    llm: LLM
    answers: Any
    derived: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[*PLACED], ids=" ".join)
def cycled(request: pytest.FixtureRequest, folders: Folders) -> Iterator[Cycled]:
    kind, placement = request.param
    with LLM(folders(kind), max_model_len=64, poison=True, sink_placement=placement) as llm:
        made = Cycled(llm, answers(llm), derived(llm))
        # The file of host copies stays open from here on; no test leaves it behind.
        llm.sleep(level=1)
        llm.wake_up()
        yield made


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", [1, 2])
def test_three_cycles_of_sleep_change_no_bit(cycled: Cycled, level: int, order: str) -> None:
    llm = cycled.llm
    for _ in range(3):
        llm.sleep(level=level)
        for tags in ORDERS[order]:
            llm.wake_up(tags=tags)
        if level == 2:
            llm.reload_weights()
        assert answers(llm) == cycled.answers
        llm.reload_weights()
        assert answers(llm) == cycled.answers
        for name, tensor in derived(llm).items():
            assert torch.equal(tensor, cycled.derived[name]), name


@pytest.mark.parametrize(("kind", "placement"), ALL)
def test_every_tensor_has_an_owner_and_what_is_derived_its_sources(
    folders: Folders, kind: str, placement: str
) -> None:
    with LLM(folders(kind), max_model_len=64, strict=True, sink_placement=placement) as llm:
        assert not llm.sleeper.audit().unowned
        rows = {row.name: row for row in llm.sleeper.table()}
        for entry in llm.core._runner._model.derived():
            assert rows[entry.name].cls == OwnershipClass.DERIVED.value
            assert tuple(rows[entry.name].sources) == entry.sources
        names = set(rows).union(*(row.aliases for row in rows.values()))
        assert "lm_head.weight" in names


@pytest.mark.parametrize("kind", ["pro moe v2", "ultra, sinks"])
def test_sinks_are_heard(folders: Folders, kind: str) -> None:
    with LLM(folders(kind), max_model_len=64) as llm:
        before = answers(llm)
        for layer in llm.core._runner._model.model.layers:
            layer.self_attn.sink_attn.sink_key.mul_(-1)
        llm.reset_prefix_cache()
        assert answers(llm) != before


SOURCES = {
    "pro moe v2": {
        "sink_attn.sink_key": ("param_sink_key", "k_layernorm.weight"),
        "sink_attn.sink_value": ("param_sink_value",),
    },
    "ultra, sinks": {
        "w_uk": ("kv_b_proj.weight",),
        "w_uv": ("kv_b_proj.weight",),
        "sink_attn.sink_key": (
            *("param_sink_compressed_kv", "kv_a_layernorm.weight"),
            "param_sink_k_pe",
        ),
        "sink_attn.sink_value": ("param_sink_compressed_kv", "kv_a_layernorm.weight"),
    },
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_derived_follows_each_of_its_sources_alone(folders: Folders, kind: str) -> None:
    other, prefix = tensors(MODELS[kind], seed=1), "model.layers.0.self_attn."
    with LLM(folders(kind), max_model_len=64) as llm:
        entries = {entry.name: entry for entry in llm.core._runner._model.derived()}
        assert len(entries) == 3 * len(SOURCES[kind])
        for name, sources in SOURCES[kind].items():
            entry = entries[prefix + name]
            for source in sources:
                before = entry.tensor.clone()
                llm.update_weights([(prefix + source, other[prefix + source])])
                assert not torch.equal(entry.tensor, before), (name, source)
                assert torch.equal(entry.tensor, entry.rebuild()), (name, source)
                llm.reload_weights()
                assert torch.equal(entry.tensor, before), (name, source)
