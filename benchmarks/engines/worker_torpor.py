"""Worker: torpor."""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import time
from collections.abc import Mapping
from typing import Any

import torch
import wire

from torpor import LLM, SamplingParams, __version__

PROFILE_ROWS = 15


class Engine:
    """One loaded model."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Complete prompts greedily, all at once."""
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        cached = [getattr(output, "num_cached_tokens", None) for output in outputs]
        return {
            "elapsed_s": elapsed_s,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached_tokens": None if None in cached else cached,
        }

    def status(self) -> dict[str, Any]:
        """The engine's own counters."""
        return {"status": json.loads(json.dumps(self.llm.status(), default=str))}

    def profile(self, batch: int, steps: int) -> dict[str, Any]:
        """Where the time of decode steps goes: prompts of one token make every step such a step.

        Both tables count all the steps together; the profilers themselves take time, too.
        """
        prompts = [[token] for token in range(1, batch + 1)]
        self.generate(prompts, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            self.generate(prompts, steps)
        operators = seen.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS, max_name_column_width=60
        )
        watch = cProfile.Profile()
        watch.runcall(self.generate, prompts, steps)
        text = io.StringIO()
        pstats.Stats(watch, stream=text).strip_dirs().sort_stats("tottime").print_stats(
            PROFILE_ROWS
        )
        return {"steps": steps, "operators": operators, "functions": text.getvalue()}


def start(options: argparse.Namespace) -> tuple[dict[str, Any], Mapping[str, wire.Handler]]:
    """Load the model."""
    llm = LLM(
        options.model,
        dtype=options.dtype,
        num_threads=options.threads,
        **json.loads(options.arguments),
    )
    engine = Engine(llm)
    facts = {
        "versions": {"torpor": __version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "arguments": json.loads(options.arguments),
    }
    handlers = {"generate": engine.generate, "status": engine.status, "profile": engine.profile}
    return facts, handlers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--arguments", default="{}")
    chosen = parser.parse_args()
    wire.serve(lambda: start(chosen))
