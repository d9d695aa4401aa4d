"""The workers of the engine benchmark: what they say hello with, and what they answer."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.engine.conftest import write_model

import torpor

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "engines"
PROMPTS = [[5, 6, 7], [8, 9, 10]]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a worker, as if it ran in its own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        for module in ("wire", "worker_common", name):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return import_module(name)

    return load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", seed=0)


def options(folder: Path, **arguments: Any) -> Namespace:
    return Namespace(model=str(folder), dtype="float32", threads=1, arguments=arguments)


def test_torpor_answers_with_tokens_and_cache_hits(worker: Any, folder: Path) -> None:
    module = worker("worker_torpor")
    facts, handlers = module.start(options(folder, block_size=2))
    generate = handlers["generate"]
    try:
        assert facts == {
            "versions": {"torpor": torpor.__version__, "torch": torch.__version__},
            "threads": 1,
            "arguments": {"block_size": 2},
        }
        answer = generate(prompts=PROMPTS, max_tokens=4)
        assert list(answer) == ["elapsed_s", "token_ids", "num_cached_tokens"]
        assert answer["elapsed_s"] > 0
        assert [len(ids) for ids in answer["token_ids"]] == [4, 4]
        assert answer["num_cached_tokens"] == [0, 0]
        again = generate(prompts=PROMPTS, max_tokens=4)
        assert again["token_ids"] == answer["token_ids"]
        assert again["num_cached_tokens"] == [2, 2]
        assert handlers["status"]()["status"]["block_size"] == 2
    finally:
        generate.__self__.llm.close()


class OtherLLM:
    """Has vLLM's interface, and notes how it was made and asked."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.asked = arguments, list[Any]()
        OTHERS.append(self)

    def generate(self, requests: Any, params: Any, *, use_tqdm: bool) -> Any:
        self.asked.append((requests, params, use_tqdm))
        completion = SimpleNamespace(token_ids=(1, 2))
        return [SimpleNamespace(outputs=[completion], num_cached_tokens=0) for _ in requests]


OTHERS: list[OtherLLM] = []


def test_vllm_is_asked_for_the_same(
    worker: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("vllm")
    other.LLM, other.SamplingParams, other.__version__ = OtherLLM, dict, "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    OTHERS.clear()
    facts, handlers = worker("worker_vllm").start(options(folder, max_model_len=64))
    answer = handlers["generate"](prompts=PROMPTS, max_tokens=2)
    assert list(answer) == ["elapsed_s", "token_ids"]
    assert answer["token_ids"] == [[1, 2], [1, 2]]
    chosen = {"max_model_len": 64, "skip_tokenizer_init": True}
    assert facts == {
        "versions": {"vllm": "9.9", "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "arguments": chosen,
    }
    (llm,) = OTHERS
    assert llm.arguments == {"model": str(folder), "dtype": "float32", **chosen}
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 2, "detokenize": False}
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    assert llm.asked == [(requests, params, False)]
