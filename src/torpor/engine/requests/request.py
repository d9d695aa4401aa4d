"""A request and its sequences, as the scheduler and the core see them. No torch.

A *request* is what a caller asked: one prompt, ``n`` completions. A *sequence* is one of those
completions while it is computed: the unit that is scheduled, preempted and sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.engine.requests.completion import Completion
    from torpor.engine.requests.prompt_logprobs import PromptLogprobs
    from torpor.engine.requests.prompts import Prompt
    from torpor.errors import TorporError
    from torpor.params import SamplingParams


class Status(Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    """Holds no blocks; new or preempted."""
    RUNNING = "running"
    """Holds blocks."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request while it is computed."""

    seq_id: str
    """Unique among the sequences alive."""
    request: Request
    completion: Completion
    seed: int
    token_ids: list[int]
    """Prompt and generated tokens; grows."""
    num_computed_tokens: int = 0
    """Positions whose keys and values are in the cache, or will be when the step ends."""
    num_cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache at the first admission."""
    num_preemptions: int = 0
    status: Status = Status.WAITING

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt.token_ids)

    @property
    def finished(self) -> bool:
        """Whether it will never be scheduled again."""
        return self.status is Status.FINISHED

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts by priority (lower first), then arrival, then index."""
        return (self.request.priority, self.request.number, self.completion.index)

    @property
    def reads_cache(self) -> bool:
        """Whether a prefix may come from the cache: not where its log probabilities are asked."""
        return self.request.prompt_logprobs is None or self.completion.index > 0


@dataclass(slots=True, eq=False)
class Request:
    """A checked prompt with its parameters, and its completions so far."""

    request_id: str
    number: int
    """Counts up by arrival."""
    prompt: Prompt
    params: SamplingParams
    arrival_s: float
    """When it came, on the monotonic clock."""
    priority: int = 0
    """Lower is served first, under the priority policy."""
    cache_salt: str = ""
    """Requests share prefixes only with requests of the same salt."""
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    error: TorporError | None = None
    """Why it failed at run time."""
    first_token_s: float | None = None
    finished_s: float | None = None
    weights_epoch: int = 0
    """Of the newest token."""
    weights_version: str | None = None
    _num_passed: int = 0
    """So many sequences from the first on are known to have finished."""

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        # From where the last look ended: ``n`` may be thousands, and every token looks.
        while self._num_passed < len(self.sequences):
            if not self.sequences[self._num_passed].finished:
                return False
            self._num_passed += 1
        return True
