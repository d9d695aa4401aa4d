"""Throughput: how many tokens per second an engine makes when it has all the prompts at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.check.bench_engine import Workload, load_engine
from torpor.check.bench_figures import Spread, rates, spread
from torpor.check.bench_scene import Scene, load_average, scene_since

if TYPE_CHECKING:
    from torpor.check.bench_options import Listener, ThroughputOptions
    from torpor.model.checkpoints.files import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What was measured."""

    model: str
    options: ThroughputOptions
    load_s: float
    elapsed_s: Spread
    """Of all prompts together, prefill included."""
    scene: Scene

    @property
    def output_tokens_per_s(self) -> Spread:
        """Generated tokens only."""
        return rates(self.options.num_prompts * self.options.output_len, self.elapsed_s)

    @property
    def total_tokens_per_s(self) -> Spread:
        """Prompt tokens and generated tokens."""
        each = self.options.input_len + self.options.output_len
        return rates(self.options.num_prompts * each, self.elapsed_s)

    @property
    def requests_per_s(self) -> Spread:
        """Whole completions."""
        return rates(self.options.num_prompts, self.elapsed_s)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        options = self.options
        return {
            "benchmark": "throughput",
            "model": self.model,
            "engine": options.engine.given(),
            "input_len": options.input_len,
            "output_len": options.output_len,
            "num_prompts": options.num_prompts,
            **options.repeats.to_dict(),
            "seed": options.seed,
            "load_s": self.load_s,
            "elapsed_s": self.elapsed_s.to_dict(),
            "output_tokens_per_s": self.output_tokens_per_s.to_dict(),
            "total_tokens_per_s": self.total_tokens_per_s.to_dict(),
            "requests_per_s": self.requests_per_s.to_dict(),
            **self.scene.to_dict(),
        }


def bench_throughput(
    model: str | os.PathLike[str],
    options: ThroughputOptions,
    *,
    listener: Listener | None = None,
    progress: Progress | None = None,
) -> ThroughputResult:
    """Load a model, complete all prompts at once, and again with new ones.

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
        elapsed_s = []
        for counts in options.repeats.iterations("throughput", listener):
            seconds = workload.generate(llm, workload.prompts(options.num_prompts))
            if counts:
                elapsed_s.append(seconds)
        scene = scene_since(load_before)
    return ThroughputResult(
        model=str(model),
        options=options,
        load_s=load_s,
        elapsed_s=spread(elapsed_s),
        scene=scene,
    )
