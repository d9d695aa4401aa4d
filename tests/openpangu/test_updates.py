"""Other weights: what is derived becomes, bit for bit, what a fresh engine has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, tensors

from torpor.engine.llm import LLM
from torpor.engine.steps.sinks import OWNER
from torpor.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 12, 44, 7, 70, 31], [80], [3, 4] * 20]
PLACED = [
    ("pro moe v2", "merged"),
    ("pro moe v2", "reserved"),
    ("pro moe v2, zero values", "reserved"),
    ("ultra", "merged"),
    ("ultra, sinks", "merged"),
    ("ultra, sinks", "reserved"),
]
Pairs = list[tuple[str, torch.Tensor]]


def by_update(llm: LLM, pairs: Pairs) -> None:
    llm.update_weights(pairs)


def by_parts(llm: LLM, pairs: Pairs) -> None:
    for start in range(0, len(pairs), 7):
        llm.load_weights(pairs[start : start + 7])
    llm.finish_update()


def by_level_2(llm: LLM, pairs: Pairs) -> None:
    llm.sleep(level=2)
    llm.wake_up(reload=False)
    llm.update_weights(pairs)


def by_level_2_cache_last(llm: LLM, pairs: Pairs) -> None:
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.load_weights(pairs)
    llm.finish_update()
    llm.wake_up(tags=["kv_cache"])


WAYS: dict[str, Callable[[LLM, Pairs], None]] = {
    "update": by_update,
    "parts": by_parts,
    "level 2": by_level_2,
    "level 2, cache last": by_level_2_cache_last,
}


def answers(llm: LLM) -> Any:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def derived(llm: LLM) -> dict[str, torch.Tensor]:
    """Copies of all that is computed from weights, reserved blocks included."""
    runner = llm.core._runner
    found = {entry.name: entry.tensor.clone() for entry in runner._model.derived()}
    if OWNER in llm.cache.pool.reserved():
        ids = list(llm.cache.pool.reserved()[OWNER].block_ids)
        found["reserved blocks"] = runner._attention._kv[ids].clone()
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> set[str]:
    assert ours.keys() == theirs.keys()
    return {name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])}


Fresh = tuple[str, LLM, list[tuple[Any, dict[str, torch.Tensor]]]]


@pytest.fixture(scope="module", params=PLACED, ids=", ".join)
def fresh(request: pytest.FixtureRequest, folders: Folders) -> Iterator[Fresh]:
    """An engine on the first weights, and what fresh ones on either have and answer."""
    kind, placement = request.param
    options: dict[str, Any] = {"max_model_len": 64, "sink_placement": placement, "poison": True}
    found = []
    for seed in (0, 1):
        with LLM(folders(kind, seed=seed), **options) as llm:
            found.append((answers(llm), derived(llm)))
    with LLM(folders(kind), **options) as llm:
        # The file of host copies stays open from here on; no test leaves it behind.
        llm.update_weights(tensors(MODELS[kind], seed=1).items())
        llm.sleep(level=1)
        llm.wake_up()
        llm.reload_weights()
        yield kind, llm, found


@pytest.mark.parametrize("way", WAYS)
def test_what_is_derived_is_a_fresh_engines(fresh: Fresh, way: str) -> None:
    kind, llm, ((old_answers, old), (new_answers, new)) = fresh
    assert not differing(derived(llm), old)
    kept = {name for name in old if "zero values" in kind and name.endswith("sink_value")}
    assert differing(old, new) == old.keys() - kept
    WAYS[way](llm, list(tensors(MODELS[kind], seed=1).items()))
    assert not differing(derived(llm), new)
    assert answers(llm) == new_answers
    llm.sleep(level=1)
    llm.wake_up()
    assert not differing(derived(llm), new)
    if way == "parts":  # The checkpoint's come back by another door each time.
        llm.sleep(level=2)
        llm.wake_up(reload=True)
    else:
        llm.reload_weights()
    assert not differing(derived(llm), old)
    assert answers(llm) == old_answers
