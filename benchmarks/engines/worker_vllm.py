"""Worker: vLLM on the CPU, its engine in this process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import torch
import vllm
import wire


class Engine:
    """One loaded model."""

    def __init__(self, llm: vllm.LLM) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Complete prompts greedily, all at once."""
        params = vllm.SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"elapsed_s": elapsed_s, "token_ids": token_ids}


def start(options: argparse.Namespace) -> tuple[dict[str, Any], Mapping[str, wire.Handler]]:
    """Load the model; compiling takes minutes the first time."""
    arguments = {
        "max_model_len": 2048,
        # Token ids go in and come out.
        "skip_tokenizer_init": True,
        **json.loads(options.arguments),
    }
    llm = vllm.LLM(model=options.model, dtype=options.dtype, **arguments)
    facts = {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "arguments": arguments,
    }
    return facts, {"generate": Engine(llm).generate}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--arguments", default="{}")
    chosen = parser.parse_args()
    wire.serve(lambda: start(chosen))
