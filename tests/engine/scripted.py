"""A core over a real scheduler and cache, whose runner says what a script says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from torpor.cache.manager import Epochs, KVCacheManager
from torpor.cache.spec import KVSpec
from torpor.engine.requests.completion import Completion, EndRules
from torpor.engine.requests.prompts import Prompt
from torpor.engine.requests.request import Request
from torpor.engine.requests.request import Sequence as Seq
from torpor.engine.sampling.logprobs import RankedToken
from torpor.engine.sampling.sampler import SampledToken
from torpor.engine.steps.core import EngineCore
from torpor.engine.steps.runner import Launched
from torpor.engine.steps.scheduler import Scheduler, SchedulerConfig
from torpor.engine.steps.step import Row, Step
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import RequestError
from torpor.params import SamplingParams

EOS = 1
END_RULES = EndRules(eos_token_ids=frozenset({EOS}), max_model_len=32)


def sampled(token_id: int, count: int | None = None) -> SampledToken:
    """A token with ``count`` log probabilities beside its own: those of the ids below it."""
    if count is None:
        return SampledToken(token_id, None)
    others = (RankedToken(token_id - rank, -0.5 - rank, rank + 1) for rank in range(1, count + 1))
    return SampledToken(token_id, (RankedToken(token_id, -0.5, 1), *others))


class ScriptedRunner:
    """Draws the tokens of scripts, and remembers what every slot of the cache holds.

    Each step checks that a row finds its own tokens in the slots that its block table names.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.scripts: dict[str, Sequence[int]] = {}
        """By sequence id: what it says; the last token again when that is used up."""
        self.errors: dict[str, RequestError] = {}
        """By sequence id: raised for its row once it samples."""
        self.faults: dict[str, BaseException] = {}
        """"launch" or "collect": raised there, once."""
        self.launched: list[Step] = []
        self.slots: dict[int, tuple[int, int]] = {}
        self._cache = cache

    @property
    def counts(self) -> list[dict[str, int]]:
        """New tokens by sequence, of each step that was launched."""
        return [{r.sequence.seq_id: r.num_new_tokens for r in step.rows} for step in self.launched]

    def launch(self, step: Step) -> Launched:
        self.launched.append(step)
        broken = "launch" in self.faults
        for row in step.rows:
            for position in range(row.start, row.end):
                token = -1 if broken else row.sequence.token_ids[position]
                self.slots[self._slot(row, position)] = (position, token)
        self._trip("launch")
        for row in step.rows:
            found = [self.slots[self._slot(row, position)] for position in range(row.end)]
            assert found == list(enumerate(row.sequence.token_ids[: row.end]))
        return Launched([row for row in step.rows if row.samples], None)

    def collect(self, launched: Launched) -> list[SampledToken | RequestError]:
        self._trip("collect")
        return [
            self.errors.get(row.sequence.seq_id) or self._token(row.sequence)
            for row in launched.rows
        ]

    def _token(self, sequence: Seq) -> SampledToken:
        script = self.scripts[sequence.seq_id]
        drawn = sequence.num_tokens - sequence.num_prompt_tokens
        return sampled(script[min(drawn, len(script) - 1)], sequence.request.params.logprobs)

    def _slot(self, row: Row, position: int) -> int:
        size = self._cache.block_size
        return self._cache.table(row.sequence.seq_id)[position // size] * size + position % size

    def _trip(self, where: str) -> None:
        if where in self.faults:
            raise self.faults.pop(where)


class Bench:
    """A core around a scripted runner, and what a test wants to turn on it."""

    def __init__(
        self, tokenizer: Tokenizer, *, num_blocks: int = 60, max_num_batched_tokens: int = 64
    ) -> None:
        self.tokenizer = tokenizer
        self.sleeper = SimpleNamespace(weights_epoch=3, weights_version="v7", kv_epoch=0)
        spec = KVSpec(block_size=4, num_kv_heads=1, k_dim=1, v_dim=1, dtype="float32", itemsize=4)
        self.cache = KVCacheManager([spec], num_blocks, epochs=self._epochs)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_num_batched_tokens)
        self.runner = ScriptedRunner(self.cache)
        self.gate: Callable[[], None] = lambda: None
        self.core = EngineCore(
            Scheduler(config, self.cache),
            cast(Any, self.runner),
            cast(Any, self.sleeper),
            ready=lambda: self.gate(),
        )
        self.told: list[str] = []
        self.core.listener = lambda request: self.told.append(request.request_id)
        self.requests: list[Request] = []
        """All that were added, finished ones too."""

    def _epochs(self) -> Epochs:
        return Epochs(weights=self.sleeper.weights_epoch, kv=self.sleeper.kv_epoch)

    def add(
        self,
        *scripts: str | Sequence[int],
        prompt: Sequence[int] = (5, 6, 7),
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Add a request with one completion per script; a text is followed by the end token."""
        options = {"temperature": 1.0, "max_tokens": None, "n": len(scripts), **(params or {})}
        request = Request(
            request_id=str(len(self.requests)) if request_id is None else request_id,
            number=len(self.requests),
            prompt=Prompt(None, tuple(prompt)),
            params=SamplingParams(**options),
            arrival_s=0.0,
        )
        self.requests.append(request)
        for index, script in enumerate(scripts):
            seq_id = f"{request.request_id}/{index}"
            ids = [*self.tokenizer.encode(script), EOS] if isinstance(script, str) else script
            self.runner.scripts[seq_id] = ids
            completion = Completion(
                request.params, index, len(prompt), tokenizer=self.tokenizer, rules=END_RULES
            )
            request.sequences.append(Seq(seq_id, request, completion, 0, list(prompt)))
        self.core.add(request)
        return request

    def step(self) -> list[Request]:
        touched = self.core.step()
        self.cache.check()
        return touched

    def run(self) -> None:
        """Step until nobody is left."""
        while self.core.can_step:
            self.step()
            assert len(self.runner.launched) < 1000

    def text(self, request: Request, index: int = 0) -> str:
        return request.sequences[index].completion.output().text

    @property
    def idle(self) -> bool:
        """Whether nobody is known and every block is free."""
        free = self.cache.num_free == self.cache.num_blocks - 1
        return free and not self.core.requests and self.core.scheduler.num_unfinished == 0
