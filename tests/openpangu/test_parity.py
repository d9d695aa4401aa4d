"""Every openPangu architecture gives the logits of the float64 reference."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.model.helpers import OneSequence, fill, logits_of
from tests.openpangu.models import MODELS, names_of_today, tensors, write_model
from tests.openpangu.reference import Reference

from torpor.model.checkpoints.load import build_model
from torpor.model.checkpoints.resolve import resolve_model

IDS = torch.randint(0, 96, (20,), generator=torch.Generator().manual_seed(3)).tolist()

each_model = pytest.mark.parametrize("kind", MODELS)


@functools.cache
def expected(kind: str) -> torch.Tensor:
    config = MODELS[kind]
    return Reference(names_of_today(config), tensors(config)).logits(IDS)


@each_model
@torch.inference_mode()
def test_logits_equal_the_reference_however_the_prompt_is_cut(tmp_path: Path, kind: str) -> None:
    files = resolve_model(write_model(tmp_path, MODELS[kind]))
    model = fill(build_model(files, torch.float32), files.source)
    model.post_weight_load()
    want = expected(kind)
    assert (logits_of(model, IDS) - want).abs().max() <= 1e-4
    attn = OneSequence()
    parts = [logits_of(model, IDS[:7], attn), logits_of(model, IDS[7:16], attn, start=7)]
    parts += [logits_of(model, [IDS[at]], attn, start=at) for at in range(16, 20)]
    assert (torch.cat(parts) - want).abs().max() <= 1e-4
