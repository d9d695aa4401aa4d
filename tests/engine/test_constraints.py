"""Constraints on what is generated, through the whole engine: grammars, bad words, biases."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.engine.async_llm import AsyncLLM
from torpor.engine.llm import LLM
from torpor.errors import RequestError
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams, StructuredOutputsParams

PROMPT = "the quick brown fox"
WORDS = ["sleep", "wake", "the same bytes"]


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, kv_cache_memory_bytes=1 << 20, block_size=4) as made:
        yield made


def params(max_tokens: int = 60, n: int = 1, **constraint: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**constraint)
    return SamplingParams(seed=5, n=n, max_tokens=max_tokens, structured_outputs=structured)


def texts(output: RequestOutput) -> list[str]:
    assert {entry.finish_reason for entry in output.outputs} == {"stop"}
    return [entry.text for entry in output.outputs]


def test_completions_keep_to_a_choice(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, params(n=8, choice=WORDS))
    assert set(texts(output)) <= set(WORDS)


def test_each_prompt_of_a_batch_has_its_own_constraint(llm: LLM) -> None:
    given = [params(choice=WORDS), params(regex="[0-9]{3}-[a-f]{2}"), SamplingParams(max_tokens=3)]
    first, second, _ = llm.generate([PROMPT] * 3, given)
    assert texts(first)[0] in WORDS
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", texts(second)[0])


def test_json_follows_its_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": WORDS}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    (output,) = llm.generate(PROMPT, params(n=3, json=schema))
    for text in texts(output):
        answer = json.loads(text)
        assert set(answer) == {"name", "ok"}
        assert answer["name"] in WORDS


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_constraint_survives_preemption_and_sleep(llm: LLM, level: int) -> None:
    given = params(regex="[0-9]{20}")
    (expected,) = llm.generate(PROMPT, given)
    stream = llm.stream(PROMPT, given)
    pieces = [next(stream)]
    llm.core.scheduler.preempt_all()
    pieces.append(next(stream))
    llm.sleep(level, mode="keep")
    llm.wake_up()
    assert "".join([*pieces, *stream]) == expected.outputs[0].text


@pytest.mark.parametrize(
    "constraint", [{"json": "{"}, {"regex": "("}, {"grammar": "?"}, {"json": {"type": "strange"}}]
)
def test_an_impossible_constraint_fails_alone_and_before_anything_runs(
    tiny_folder: Path, constraint: dict[str, Any]
) -> None:
    async def last(engine: AsyncLLM, given: SamplingParams) -> RequestOutput:
        return [output async for output in engine.generate(PROMPT, given)][-1]

    async def main() -> None:
        async with AsyncLLM(tiny_folder) as engine:
            good = asyncio.create_task(last(engine, params(choice=WORDS)))
            with pytest.raises(RequestError):
                await last(engine, params(**constraint))
            assert texts(await good)[0] in WORDS

    asyncio.run(main())


def test_bad_words_do_not_appear(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(PROMPT, free)
    tokenizer = llm.get_tokenizer()
    # Each word that came, forbidden: none comes again, and there is text all the same.
    pieces = {tokenizer.decode([token]) for token in output.outputs[0].token_ids}
    bad = sorted(piece for piece in pieces if piece.strip().isalpha())
    assert bad
    changed = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=bad)
    (other,) = llm.generate(PROMPT, changed)
    found = {tokenizer.decode([token]) for token in other.outputs[0].token_ids}
    assert not found & set(bad)


def test_bias_and_allowed_tokens_decide(llm: LLM) -> None:
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (biased,) = llm.generate(PROMPT, SamplingParams(logit_bias={77: 100.0}, **common))
    assert set(biased.outputs[0].token_ids) == {77}
    (allowed,) = llm.generate(PROMPT, SamplingParams(allowed_token_ids=[5, 6], **common))
    assert set(allowed.outputs[0].token_ids) <= {5, 6}


def test_blocks_that_nobody_may_read_are_full_of_nan_and_cached_ones_are_not(
    tiny_folder: Path,
) -> None:
    with LLM(tiny_folder, block_size=4, num_gpu_blocks_override=40, poison=True) as llm:
        kv = llm.core._runner._clear.__self__.kv  # type: ignore[attr-defined]
        llm.generate([list(range(3, 12))], SamplingParams(temperature=0, max_tokens=1))
        # Nine tokens: two full blocks that can be hit, and one that nobody may read any more.
        used = {int(block) for block in (kv != 0).any(dim=1).nonzero()}
        dead = {int(block) for block in torch.isnan(kv).all(dim=1).nonzero()}
        assert len(used) == 3
        assert len(dead) == 1
        (again,) = llm.generate([list(range(3, 12))], SamplingParams(temperature=0, max_tokens=1))
        assert again.num_cached_tokens == 8
