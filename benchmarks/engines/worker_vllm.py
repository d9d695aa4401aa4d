"""Worker: vLLM on the CPU, its engine in this process."""

from __future__ import annotations

import argparse
from typing import Any

import vllm
import worker_common


def start(options: argparse.Namespace) -> worker_common.Started:
    """Load the model; compiling takes minutes the first time."""
    arguments = {
        "max_model_len": 2048,
        # Token ids go in and come out.
        "skip_tokenizer_init": True,
        **options.arguments,
    }
    llm = vllm.LLM(model=options.model, dtype=options.dtype, **arguments)

    def generate(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        return worker_common.generate(llm, prompts, params)[0]

    return worker_common.facts(arguments, vllm=vllm.__version__), {"generate": generate}


if __name__ == "__main__":
    worker_common.main(__doc__, start)
