"""The engine that a benchmark loads, and the prompts it is given."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torpor.check.bench_options import at_least
from torpor.engine.llm import LLM
from torpor.errors import ArgumentError
from torpor.params import SamplingParams

if TYPE_CHECKING:
    from torpor.check.bench_options import EngineChoices
    from torpor.model.checkpoints.files import Progress

Prompt = list[int]


def load_engine(
    model: str | os.PathLike[str], options: EngineChoices, progress: Progress | None = None
) -> tuple[LLM, float]:
    """Load a model; the engine, awake, and the seconds it took.

    Raises:
        TorporError: see ``LLM``.
    """
    start_s = time.perf_counter()
    llm = LLM(model, progress=progress, **options.given())
    return llm, time.perf_counter() - start_s


class Workload:
    """Prompts of random tokens, no two alike, and so never in a prefix cache already."""

    def __init__(self, vocab_size: int, *, input_len: int, output_len: int, seed: int) -> None:
        """Prepare.

        Args:
            vocab_size: ids are drawn below it.
            input_len: tokens of each prompt.
            output_len: tokens generated from each.

        Raises:
            ArgumentError: a length below 1.
        """
        at_least("input_len", input_len, 1)
        at_least("output_len", output_len, 1)
        self._vocab_size = vocab_size
        self._input_len = input_len
        self._output_len = output_len
        self._random = random.Random(seed)

    def prompts(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; the same ones in every run with the same seed."""
        return [
            [self._random.randrange(self._vocab_size) for _ in range(self._input_len)]
            for _ in range(count)
        ]

    def generate(self, llm: LLM, prompts: Sequence[Prompt], output_len: int | None = None) -> float:
        """Complete prompts greedily, past end tokens; the seconds it took.

        Args:
            output_len: tokens from each prompt, if not those of the workload.

        Raises:
            ArgumentError: a completion ended early, for want of positions.
            TorporError: see ``LLM.generate``.
        """
        wanted = self._output_len if output_len is None else output_len
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=wanted)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        shortest = min(len(output.outputs[0].token_ids) for output in outputs)
        if shortest < wanted:
            raise ArgumentError(
                f"a prompt of {self._input_len} tokens got {shortest} of {wanted} more; make "
                "max_model_len larger, or input_len or output_len smaller"
            )
        return seconds
