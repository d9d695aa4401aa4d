"""Latency: how long one batch takes from prompt to last token, and to its first one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.check.bench_engine import Workload, load_engine
from torpor.check.bench_figures import Spread, rates, spread
from torpor.check.bench_scene import Scene, load_average, scene_since

if TYPE_CHECKING:
    from torpor.check.bench_options import LatencyOptions, Listener
    from torpor.model.checkpoints.files import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """What was measured."""

    model: str
    options: LatencyOptions
    load_s: float
    first_token_s: Spread
    """Of a batch of which one token each is asked for."""
    latency_s: Spread
    """Of a whole batch, prefill included."""
    scene: Scene

    @property
    def output_tokens_per_s(self) -> Spread:
        """Generated tokens of the batch, over its whole latency."""
        return rates(self.options.batch_size * self.options.output_len, self.latency_s)

    @property
    def step_s(self) -> float | None:
        """One decode step of the batch, from the medians; None with one token, which has none."""
        steps = self.options.output_len - 1
        return (self.latency_s.median - self.first_token_s.median) / steps if steps else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        options = self.options
        return {
            "benchmark": "latency",
            "model": self.model,
            "engine": options.engine.given(),
            "input_len": options.input_len,
            "output_len": options.output_len,
            "batch_size": options.batch_size,
            **options.repeats.to_dict(),
            "seed": options.seed,
            "load_s": self.load_s,
            "first_token_s": self.first_token_s.to_dict(),
            "latency_s": self.latency_s.to_dict(),
            "step_s": self.step_s,
            "output_tokens_per_s": self.output_tokens_per_s.to_dict(),
            **self.scene.to_dict(),
        }


def bench_latency(
    model: str | os.PathLike[str],
    options: LatencyOptions,
    *,
    listener: Listener | None = None,
    progress: Progress | None = None,
) -> LatencyResult:
    """Load a model and complete one batch after another, each of new prompts.

    Args:
        model: a name or a folder, as for ``LLM``.
        listener: told of each iteration before it begins.
        progress: told of slow parts of loading.

    Raises:
        ArgumentError: an impossible value, or prompts and completions that do not fit the engine.
        TorporError: the model cannot be loaded or run.
    """
    load_before = load_average()
    llm, load_s = load_engine(model, options.engine, progress)
    with llm:
        workload = Workload(
            llm.get_tokenizer().vocab_size,
            input_len=options.input_len,
            output_len=options.output_len,
            seed=options.seed,
        )
        first_token_s, latency_s = [], []
        for counts in options.repeats.iterations("latency", listener):
            first = workload.generate(llm, workload.prompts(options.batch_size), 1)
            whole = workload.generate(llm, workload.prompts(options.batch_size))
            if counts:
                first_token_s.append(first)
                latency_s.append(whole)
        scene = scene_since(load_before)
    return LatencyResult(
        model=str(model),
        options=options,
        load_s=load_s,
        first_token_s=spread(first_token_s),
        latency_s=spread(latency_s),
        scene=scene,
    )
