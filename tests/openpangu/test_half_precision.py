"""openPangu in bfloat16: near the reference, and bit for bit itself after sleep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.openpangu.conftest import Folders
from tests.openpangu.models import MODELS, names_of_today, tensors
from tests.openpangu.reference import Reference

from torpor.engine.llm import LLM
from torpor.params import SamplingParams

PROMPTS = [[5, 9, 12, 44, 7, 70, 31], [80], [3, 4] * 12]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
KINDS = ("embedded", "pro moe", "pro moe v2", "ultra, sinks")
PLACED = [
    (kind, placement)
    for kind in KINDS
    for placement in ("merged", "reserved")
    if placement == "merged" or MODELS[kind].get("param_sink_number")
]


def answers(llm: LLM) -> Any:
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_it_sleeps_and_wakes_bit_for_bit(folders: Folders, kind: str, placement: str) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "sink_placement": placement, "poison": True}
    with LLM(folders(kind), dtype="bfloat16", **options) as llm:
        want = answers(llm)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert answers(llm) == want
        llm.verify()


def test_what_corrects_the_choice_of_experts_is_not_rounded(folders: Folders) -> None:
    stored = tensors(MODELS["pro moe v2"])
    with LLM(folders("pro moe v2"), dtype="bfloat16", max_model_len=64) as llm:
        held = dict(llm.core._runner._model.named_parameters())
        names = [name for name in held if name.endswith("e_score_correction_bias")]
        assert len(names) == 2, "of each layer with experts"
        for name in names:
            assert held[name].dtype == torch.float32
            assert torch.equal(held[name], stored[name])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_its_logits_are_near_the_references(
    folders: Folders, kind: str, placement: str, kernels: str
) -> None:
    """Of each next token; half of the tokens at least, since a near tie changes experts."""
    prompt = [5, 9, 12, 44, 7, 70, 31, 3, 60, 18, 22, 90]
    config = names_of_today(MODELS[kind])
    want = Reference(config, tensors(MODELS[kind])).logits(prompt).log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=96)
    options: dict[str, Any] = {"max_model_len": 64, "sink_placement": placement}
    with LLM(
        folders(kind), dtype="bfloat16", cpu_kernels=kernels, max_logprobs=96, **options
    ) as llm:
        entries = (llm.generate([prompt], params)[0].prompt_logprobs or [])[1:]
    errors = []
    for row, entry in zip(want, entries, strict=False):
        said = torch.tensor([(entry or {})[token].logprob for token in range(96)])
        errors.append(float((said - row).abs().max()))
    errors.sort()
    assert errors[len(errors) // 2] <= TOLERANCE


TOLERANCE = 0.15
