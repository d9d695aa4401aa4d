"""Sinks in reserved blocks: nothing overwrites, frees, counts or forgets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, tensors

from torpor.engine.llm import LLM
from torpor.engine.steps.sinks import OWNER
from torpor.errors import CacheInUseError, ConfigError
from torpor.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS: list[list[int]] = [[7 + n, *range(3, 3 + 4 * n)] for n in range(1, 9)]
KINDS = ["pro moe v2", "pro moe v2, zero values", "pro moe v2, windows", "ultra, sinks"]

each_kind = pytest.mark.parametrize("kind", KINDS)


def reserved(folder: Any, **options: Any) -> LLM:
    return LLM(folder, max_model_len=64, sink_placement="reserved", poison=True, **options)


def ids(llm: LLM) -> tuple[int, ...]:
    return llm.cache.pool.reserved()[OWNER].block_ids


def sink_bytes(llm: LLM) -> torch.Tensor:
    return llm.core._runner._attention._kv[list(ids(llm))].clone()


def texts(llm: LLM) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@each_kind
def test_a_pool_run_to_exhaustion_leaves_the_sinks_alone(folders: Folders, kind: str) -> None:
    with LLM(folders(kind), max_model_len=64) as merged:
        want = texts(merged)
    with reserved(folders(kind), num_gpu_blocks_override=6) as llm:
        before, held = sink_bytes(llm), ids(llm)
        assert not before.isnan().any()
        freed: list[int] = []
        handed: list[int] = []
        cleared: list[int] = []
        runner = llm.core._runner
        clear = runner._clear
        runner._clear = lambda blocks: (cleared.extend(blocks), clear(blocks))[1]
        # As for a backend that reads past lengths: every fresh block is cleared.
        llm.cache._clear_fresh = True
        take, on_free = llm.cache.pool.allocate, llm.cache.pool._on_free
        assert on_free is not None
        llm.cache.pool._on_free = lambda blocks: (freed.extend(blocks), on_free(blocks))[1]

        def watched(count: int, after: int = 0) -> list[int]:
            handed.extend(blocks := take(count, after))
            return blocks

        llm.cache.pool.allocate = watched  # type: ignore[method-assign]
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == want
        assert any(output.metrics and output.metrics.num_preemptions for output in outputs)
        llm.cache.check()
        assert torch.equal(sink_bytes(llm), before)
        assert handed
        assert cleared
        assert not set(held) & {*handed, *freed, *cleared}


@each_kind
def test_the_prefix_cache_can_be_reset_with_reserved_blocks(folders: Folders, kind: str) -> None:
    with reserved(folders(kind)) as llm:
        first = texts(llm)
        before = sink_bytes(llm)
        assert llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS[-1:], PARAMS)
        assert outputs[0].num_cached_tokens == 0
        assert outputs[0].outputs[0].token_ids == first[-1]
        assert torch.equal(sink_bytes(llm), before)
        llm.cache.check()


@each_kind
def test_a_live_request_refuses_the_reset_and_a_preempted_one_does_not(
    folders: Folders, kind: str
) -> None:
    with reserved(folders(kind)) as llm:
        want, before = texts(llm), sink_bytes(llm)
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        next(streams[0])
        with pytest.raises(CacheInUseError, match="8 running requests hold"):
            llm.reset_prefix_cache()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        llm.cache.check()
        assert llm.cache.pool.num_held == 0
        assert llm.reset_prefix_cache(), "while they are preempted"
        for stream in streams:
            list(stream)
        assert [stream.output.outputs[0].token_ids for stream in streams] == want
        assert llm.reset_prefix_cache()
        assert llm.cache.pool.num_free == llm.cache.pool.num_usable
        assert torch.equal(sink_bytes(llm), before)


@each_kind
def test_wake_and_update_write_the_sinks_again(folders: Folders, kind: str) -> None:
    with reserved(folders(kind)) as llm:
        before, first = sink_bytes(llm), texts(llm)
        llm.update_weights(tensors(MODELS[kind], seed=1).items())
        changed = sink_bytes(llm)
        assert not torch.equal(changed, before)
        llm.sleep(level=1)
        llm.wake_up(tags=["kv_cache"])
        llm.wake_up(tags=["weights"])
        assert torch.equal(sink_bytes(llm), changed)
        llm.update_weights(tensors(MODELS[kind], seed=0).items())
        assert torch.equal(sink_bytes(llm), before)
        assert texts(llm) == first


def test_a_cache_that_is_only_just_large_enough_says_so(folders: Folders) -> None:
    with reserved(folders("pro moe v2"), num_gpu_blocks_override=6) as llm:
        assert llm.cache.pool.num_usable == 4
        assert len(llm.generate([[5] * 40], PARAMS)[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize("kind", ["pro moe v2", "ultra, sinks"])
def test_sinks_that_do_not_fill_blocks_are_refused(folders: Folders, kind: str) -> None:
    with pytest.raises(ConfigError, match="param_sink_number is 16, which block_size 5"):
        reserved(folders(kind), block_size=5)
    with LLM(folders(kind), max_model_len=64, block_size=5) as merged:
        assert texts(merged)
