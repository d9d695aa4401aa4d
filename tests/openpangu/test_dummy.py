"""``load_format="dummy"``: every model runs without a checkpoint, and comes back as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.openpangu.conftest import write_words
from tests.openpangu.models import MODELS

from torpor.engine.llm import LLM
from torpor.errors import ArgumentError, CheckpointError
from torpor.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def bare(folder: Path, kind: str) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    write_words(folder, 96)
    return folder


@pytest.mark.parametrize("kind", ["embedded", "pro moe", "pro moe v2", "ultra, sinks"])
def test_a_config_alone_is_enough(tmp_path: Path, kind: str) -> None:
    with LLM(bare(tmp_path, kind), load_format="dummy", max_model_len=64, poison=True) as llm:
        before = llm.generate([[5, 6, 7]], PARAMS)[0].outputs
        assert all(
            math.isfinite(entry[token].logprob)
            for entry, token in zip(before[0].logprobs or [], before[0].token_ids, strict=True)
        )
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                llm.reload_weights()
            assert llm.generate([[5, 6, 7]], PARAMS)[0].outputs == before
        llm.verify()
    with LLM(tmp_path, load_format="dummy", max_model_len=64) as other:
        assert other.generate([[5, 6, 7]], PARAMS)[0].outputs == before


def test_without_it_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(bare(tmp_path, "embedded"))
    with pytest.raises(ArgumentError, match="load_format is 'random'"):
        LLM(tmp_path, load_format="random")
