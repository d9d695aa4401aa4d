"""The engine that a benchmark loads and measures, and the prompts it is given."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torpor.check.bench_scene import Scene, load_average, scene_since
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError
from torpor.params import SamplingParams

if TYPE_CHECKING:
    from torpor.check.bench_options import EngineChoices, GenerationOptions
    from torpor.model.checkpoints.files import Progress

Prompt = list[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[T]):
    """One engine, loaded, measured and closed."""

    measured: T
    load_s: float
    scene: Scene


def run_engine(
    model: str | os.PathLike[str],
    choices: EngineChoices,
    measure: Callable[[LLM], T],
    progress: Progress | None = None,
) -> Run[T]:
    """Load a model, measure it, and note what the machine did meanwhile.

    Args:
        model: a name or a folder, as for ``LLM``.
        measure: given the engine, awake.
        progress: told of slow parts of loading.

    Raises:
        TorporError: see ``LLM``; and what ``measure`` raises.
    """
    load_before = load_average()
    start_s = time.perf_counter()
    with LLM(model, progress=progress, **choices.given()) as llm:
        load_s = time.perf_counter() - start_s
        measured = measure(llm)
        scene = scene_since(load_before)
    return Run(measured=measured, load_s=load_s, scene=scene)


class Workload:
    """Prompts of random tokens, no two alike, and so never in a prefix cache already."""

    def __init__(self, llm: LLM, options: GenerationOptions) -> None:
        """Prompts for an engine, the same ones in every run with the same seed."""
        self._llm = llm
        self._options = options
        self._vocab_size = llm.get_tokenizer().vocab_size
        self._random = random.Random(options.seed)

    def prompts(self) -> list[Prompt]:
        """The next prompts."""
        return [
            [self._random.randrange(self._vocab_size) for _ in range(self._options.input_len)]
            for _ in range(self._options.num_prompts)
        ]

    def generate(self, output_len: int) -> float:
        """Complete the next prompts greedily, past end tokens; the seconds it took.

        Args:
            output_len: tokens from each prompt.

        Raises:
            ArgumentError: a completion ended early, for want of positions.
            TorporError: see ``LLM.generate``.
        """
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
        requests = [{"prompt_token_ids": prompt} for prompt in self.prompts()]
        start_s = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        shortest = min(len(output.outputs[0].token_ids) for output in outputs)
        if shortest < output_len:
            raise ArgumentError(
                f"a prompt of {self._options.input_len} tokens got {shortest} of {output_len} "
                "more; make max_model_len larger, or input_len or output_len smaller"
            )
        return seconds
