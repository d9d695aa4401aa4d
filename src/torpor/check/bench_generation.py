"""Throughput and latency: how long prompts take that an engine has all at once.

Throughput is of many prompts, and counts tokens. Latency is of one batch, and is measured to the
first token, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torpor.check.bench_engine import Run, Workload, run_engine
from torpor.check.bench_figures import Spread, rates, spread
from torpor.check.bench_scene import Scene

if TYPE_CHECKING:
    from torpor.check.bench_options import GenerationOptions, Listener
    from torpor.engine.llm import LLM
    from torpor.model.checkpoints.files import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What was measured."""

    model: str
    options: GenerationOptions
    load_s: float
    elapsed_s: Spread
    """Of all prompts together, prefill included."""
    scene: Scene

    @property
    def output_tokens_per_s(self) -> Spread:
        """Generated tokens only, over the whole time."""
        return rates(self.options.num_output_tokens, self.elapsed_s)

    def _facts(
        self, benchmark: str, num_prompts: str, figures: Mapping[str, Spread | float | None]
    ) -> dict[str, Any]:
        """JSON-able form; ``num_prompts`` is what this benchmark calls them."""
        options = self.options
        return {
            "benchmark": benchmark,
            "model": self.model,
            "engine": options.engine.given(),
            "input_len": options.input_len,
            "output_len": options.output_len,
            num_prompts: options.num_prompts,
            **options.repeats.to_dict(),
            "seed": options.seed,
            "load_s": self.load_s,
            **{
                name: figure.to_dict() if isinstance(figure, Spread) else figure
                for name, figure in figures.items()
            },
            **self.scene.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult(_Result):
    """What was measured of throughput."""

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
        figures = {
            "elapsed_s": self.elapsed_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "requests_per_s": self.requests_per_s,
        }
        return self._facts("throughput", "num_prompts", figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult(_Result):
    """What was measured of latency."""

    first_token_s: Spread
    """Of a batch of which one token each is asked for."""

    @property
    def step_s(self) -> float | None:
        """One decode step of the batch, from the medians; None with one token, which has none."""
        steps = self.options.output_len - 1
        return (self.elapsed_s.median - self.first_token_s.median) / steps if steps else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. Keys carry their units."""
        figures = {
            "first_token_s": self.first_token_s,
            "latency_s": self.elapsed_s,
            "step_s": self.step_s,
            "output_tokens_per_s": self.output_tokens_per_s,
        }
        return self._facts("latency", "batch_size", figures)


def bench_throughput(
    model: str | os.PathLike[str],
    options: GenerationOptions,
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
        ArgumentError: prompts and completions that do not fit the engine.
        TorporError: the model cannot be loaded or run.
    """
    lengths = (options.output_len,)
    run = _run(model, options, "throughput", lengths, listener, progress)
    return ThroughputResult(
        model=str(model),
        options=options,
        load_s=run.load_s,
        elapsed_s=run.measured[0],
        scene=run.scene,
    )


def bench_latency(
    model: str | os.PathLike[str],
    options: GenerationOptions,
    *,
    listener: Listener | None = None,
    progress: Progress | None = None,
) -> LatencyResult:
    """Load a model and complete one batch after another, each of new prompts.

    Args, raises:
        As ``bench_throughput``.
    """
    lengths = (1, options.output_len)
    run = _run(model, options, "latency", lengths, listener, progress)
    return LatencyResult(
        model=str(model),
        options=options,
        load_s=run.load_s,
        first_token_s=run.measured[0],
        elapsed_s=run.measured[1],
        scene=run.scene,
    )


def _run(
    model: str | os.PathLike[str],
    options: GenerationOptions,
    what: str,
    output_lens: tuple[int, ...],
    listener: Listener | None,
    progress: Progress | None,
) -> Run[list[Spread]]:
    """Seconds by length of the completions; each iteration takes one sample of each."""

    def measure(llm: LLM) -> list[Spread]:
        workload = Workload(llm, options)
        rounds = []
        for counts in options.repeats.iterations(what, listener):
            seconds = [workload.generate(length) for length in output_lens]
            if counts:
                rounds.append(seconds)
        return [spread(samples) for samples in zip(*rounds, strict=True)]

    return run_engine(model, options.engine, measure, progress)
