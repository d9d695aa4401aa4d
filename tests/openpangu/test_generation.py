"""The engine's openPangu: the reference's tokens over 64 steps, whatever the schedule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, names_of_today, tensors
from tests.openpangu.reference import Reference

from torpor.engine.llm import LLM
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams

VOCAB = 96
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=1)
IDS = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [IDS[:33], IDS[:1], [*IDS[:17], *IDS[30:]], IDS[20:29]]
CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "block_size": 4},
    "full cache": {"block_size": 4, "num_gpu_blocks_override": 33, "max_model_len": 128},
    "torch, chunks": {"cpu_kernels": "torch", "max_num_batched_tokens": 19},
    "invariant": {"batch_invariant": True, "max_num_batched_tokens": 11, "max_num_seqs": 4},
}
RESERVED: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4, "block_size": 8},
    "full cache": {"num_gpu_blocks_override": 18, "max_model_len": 128},
    "torch, chunks": {"cpu_kernels": "torch", "max_num_batched_tokens": 19},
}
WITH_SINKS = [kind for kind, config in MODELS.items() if config.get("param_sink_number")]
OTHERS = ("embedded, tied", "ultra, direct queries", "pro moe v2, 128 sinks")
"""Kinds that differ too little from others to run in every case."""


@functools.cache
def model(kind: str) -> Reference:
    return Reference(names_of_today(MODELS[kind]), tensors(MODELS[kind]))


@functools.cache
def logits(kind: str, ids: tuple[int, ...]) -> torch.Tensor:
    """Of a whole sequence; what other schedules give too is computed once."""
    return model(kind).logits(ids)


def check(kind: str, outputs: Sequence[RequestOutput]) -> None:
    """Every token is the reference's, or one that the reference finds as good within 1e-4."""
    for output in outputs:
        prompt, made = output.prompt_token_ids, output.outputs[0]
        assert len(made.token_ids) == 64
        rows = logits(kind, (*prompt, *made.token_ids))[len(prompt) - 1 : -1]
        probs = rows.log_softmax(-1)
        assert made.logprobs is not None
        for row, prob, token, said in zip(rows, probs, made.token_ids, made.logprobs, strict=True):
            assert row[token] >= row.max() - 1e-4
            assert abs(said[token].logprob - float(prob[token])) <= 1e-4


def generate(folder: Path, **options: Any) -> list[RequestOutput]:
    """All prompts together, then the first once more, which hits the prefix cache."""
    with LLM(folder, **{"max_model_len": 256, **options}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS[:1], PARAMS)
        llm.cache.check()
    if "num_gpu_blocks_override" not in options:
        assert (again[0].num_cached_tokens or 0) >= 16
    return [*outputs, *again]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in OTHERS])
def test_greedy_tokens_are_the_references(folders: Folders, kind: str, case: str) -> None:
    check(kind, generate(folders(kind), **CASES[case]))


@pytest.mark.parametrize("kind", OTHERS)
def test_greedy_tokens_of_further_kinds(folders: Folders, kind: str) -> None:
    check(kind, generate(folders(kind)))


@pytest.mark.parametrize("case", RESERVED)
@pytest.mark.parametrize("kind", [kind for kind in WITH_SINKS if kind not in OTHERS])
def test_reserved_sinks_give_the_same(folders: Folders, kind: str, case: str) -> None:
    check(kind, generate(folders(kind), sink_placement="reserved", **RESERVED[case]))


@pytest.mark.parametrize("block_size", [16, 32])
def test_many_reserved_sinks(folders: Folders, block_size: int) -> None:
    kind = "pro moe v2, 128 sinks"
    merged = generate(folders(kind), block_size=block_size)
    reserved = generate(folders(kind), block_size=block_size, sink_placement="reserved")
    check(kind, reserved)
    for one, other in zip(merged, reserved, strict=True):
        for ours, theirs in zip(
            *(each.outputs[0].logprobs or [] for each in (one, other)), strict=True
        ):
            for token in ours.keys() & theirs.keys():
                assert abs(ours[token].logprob - theirs[token].logprob) <= 1e-5
