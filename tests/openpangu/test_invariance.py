"""Batch-invariant openPangu: the bits of an answer depend on its request alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS

from torpor.engine.llm import LLM
from torpor.model.attention.partial import attend_with_sinks
from torpor.model.layers.routers import route_by_groups, route_by_sigmoid
from torpor.params import SamplingParams

IDS = random.Random(0).choices(range(3, 96), k=70)
PROMPTS = [IDS[:9], IDS[:64], IDS[5:6], [*IDS[:32], 7, 8], IDS[40:], IDS[20:37], IDS[:33]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
WAYS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    {"max_num_batched_tokens": 41, "block_size": 4},
]
KINDS = ("pro moe", "pro moe v2", "pro moe v2, zero values", "pro moe v2, windows")
LATENT = ("ultra", "ultra, sinks")
PLACED = [
    (kind, placement, kernels)
    for kind in KINDS + LATENT
    for placement in ("merged", "reserved")
    for kernels in ("native", "torch")
    if placement == "merged" or (kernels == "native" and MODELS[kind].get("param_sink_number"))
]


@pytest.mark.parametrize(("kind", "placement", "kernels"), PLACED)
def test_no_schedule_changes_a_bit(
    folders: Folders, kind: str, placement: str, kernels: str
) -> None:
    options: dict[str, Any] = {
        "max_model_len": 96,
        "batch_invariant": True,
        "sink_placement": placement,
        "cpu_kernels": "auto" if kernels == "native" else kernels,
    }
    with LLM(folders(kind), enable_prefix_caching=False, **options) as llm:
        want = [llm.generate([prompt], PARAMS)[0].outputs for prompt in PROMPTS]
    for way in WAYS:
        if placement == "reserved" and "block_size" in way:
            way = {**way, "block_size": 8}
        with LLM(folders(kind), **options, **way) as llm:
            assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == want, way


ROWS = 150
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def attended(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Rows of queries with their contexts' results, a layer's sinks, and all rows' attention."""
    sinks, groups, group, k_dim, v_dim = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    heads = groups * group
    rows = [normal(ROWS, heads, k_dim), normal(ROWS, heads, v_dim), normal(ROWS, heads).float()]
    parts = [normal(sinks, groups, k_dim), normal(sinks, groups, v_dim)]
    q, context, lse = rows
    return rows, parts, attend_with_sinks(q, *parts, k_dim**-0.5, context, lse)


def spans(count: int) -> Iterator[tuple[int, int]]:
    """Batches of this size that begin at several places."""
    for start in sorted({0, 1, ROWS // 2, ROWS - count}):
        if start + count <= ROWS:
            yield start, start + count


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(
        st.sampled_from([1, 16, 24, 128]),
        st.integers(1, 3),
        st.sampled_from([1, 4, 5, 8, 40]),
        st.sampled_from([8, 24, 40]),
        st.sampled_from([8, 16]),
    ),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, ROWS),
    threads=st.sampled_from([1, 2]),
)
def test_a_rows_attention_over_sinks_does_not_know_the_other_rows(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, count: int, threads: int
) -> None:
    (q, context, lse), sinks, (out, log) = attended(shape, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for start, end in spans(count):
            some = slice(start, end)
            part, part_log = attend_with_sinks(
                q[some], *sinks, shape[3] ** -0.5, context[some], lse[some]
            )
            assert torch.equal(part, out[some])
            assert torch.equal(part_log, log[some])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, ROWS), chosen=st.sampled_from([1, 2, 4, 8]))
def test_a_rows_experts_do_not_know_the_other_rows(count: int, chosen: int) -> None:
    generator = torch.Generator().manual_seed(chosen)
    logits = torch.randn(ROWS, 40, generator=generator) * 3
    bias, scale = torch.randn(40, generator=generator), torch.rand(40, generator=generator)

    def routed(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            *route_by_sigmoid(rows, chosen, bias, norm=True),
            *route_by_groups(rows, chosen, scale),
        )

    whole = routed(logits)
    for start, end in spans(count):
        for part, all_rows in zip(routed(logits[start:end].clone()), whole, strict=True):
            assert torch.equal(part, all_rows[start:end])
