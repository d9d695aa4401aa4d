"""Worker: torpor."""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
from typing import Any

import torch
import wire
import worker_common

from torpor import LLM, SamplingParams, __version__

PROFILE_ROWS = 15


class Engine:
    """One loaded model."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Complete prompts greedily, all at once."""
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        answer, outputs = worker_common.generate(self.llm, prompts, params)
        # An older commit under test may not count them.
        cached = [getattr(output, "num_cached_tokens", None) for output in outputs]
        return {**answer, "num_cached_tokens": None if None in cached else cached}

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


def start(options: argparse.Namespace) -> worker_common.Started:
    """Load the model."""
    arguments = options.arguments
    engine = Engine(
        LLM(options.model, dtype=options.dtype, num_threads=options.threads, **arguments)
    )
    handlers: dict[str, wire.Handler] = {
        "generate": engine.generate,
        "status": engine.status,
        "profile": engine.profile,
    }
    return worker_common.facts(arguments, torpor=__version__), handlers


if __name__ == "__main__":
    worker_common.main(__doc__, start)
