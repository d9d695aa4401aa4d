"""What is measured, of whom, and with which prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = list[int]

BF16_BATCH = 4
"""Measured in both dtypes, and of torpor alone."""
LONG_PROMPT = 1000
SHARERS = 16
TAIL = 24
"""Tokens of each prompt after the shared ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of work, given to several workers in turn."""

    name: str
    workers: tuple[str, ...]
    batch: int
    input_len: int
    output_len: int
    shared_len: int = 0
    """Tokens that all prompts begin with."""
    bound: bool = False
    """Whether plain products of its shapes are measured beside it."""

    def prompts(self, seed: str, vocab_size: int) -> list[Prompt]:
        """The prompts of one round: the same for every worker, new in every round."""
        draw = random.Random(f"{self.name} {seed}")

        def tokens(count: int) -> Prompt:
            return [draw.randrange(vocab_size) for _ in range(count)]

        shared = tokens(self.shared_len)
        return [shared + tokens(self.input_len - self.shared_len) for _ in range(self.batch)]


def all_cases(input_len: int, output_len: int, batches: Sequence[int]) -> list[Case]:
    """Every case, in the order in which a round runs them."""
    ours = ("torpor-fp32", "torpor-bf16")
    others = ("torpor-invariant", "transformers-fp32", "vllm-fp32")
    found = [
        Case(
            name=f"batch {batch}",
            workers=ours + others if batch in batches else ours,
            batch=batch,
            input_len=input_len,
            output_len=output_len,
            bound=batch in batches,
        )
        for batch in sorted({*batches, BF16_BATCH})
    ]
    found.append(
        Case(
            name="first token",
            workers=("torpor-fp32", *others),
            batch=1,
            input_len=LONG_PROMPT,
            output_len=1,
        )
    )
    found.append(
        Case(
            name="shared prefix",
            workers=("torpor-fp32",),
            batch=SHARERS,
            input_len=LONG_PROMPT + TAIL,
            output_len=1,
            shared_len=LONG_PROMPT,
        )
    )
    return found
