"""What the workers share: options, facts about themselves, and a round of an ``LLM``.

Runs in every worker's environment, so it needs nothing but torch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import wire

Started = tuple[dict[str, Any], Mapping[str, wire.Handler]]
"""Facts for the hello, and what answers which request."""


def main(description: str | None, start: Callable[[argparse.Namespace], Started]) -> None:
    """Read the command line, start with it, then answer requests."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON, for LLM")
    options = parser.parse_args()
    wire.serve(lambda: start(options))


def facts(arguments: Mapping[str, Any], **versions: str) -> dict[str, Any]:
    """What to say of an engine that was made with these arguments."""
    return {
        "versions": {**versions, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "arguments": dict(arguments),
    }


def generate(llm: Any, prompts: list[list[int]], params: Any) -> tuple[dict[str, Any], list[Any]]:
    """Complete prompts, all at once, with an ``LLM`` of vLLM's interface; so is torpor's.

    Returns:
        The answer to the parent, and the outputs.
    """
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    start_s = time.perf_counter()
    outputs = llm.generate(requests, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    return {"elapsed_s": elapsed_s, "token_ids": token_ids}, outputs
