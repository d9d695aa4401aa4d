"""An engine: a loaded model with its scheduler, core and sleeper, behind one lock.

``LLM`` and ``AsyncLLM`` are two faces of it. Requests come in through ``submit``; whoever has the
turn may step.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from torpor.engine.control import NEEDED_TAGS, SleepControl
from torpor.engine.loading import load_parts
from torpor.engine.requests.answers import answer
from torpor.engine.requests.completion import Completion, EndRules
from torpor.engine.requests.prompt_logprobs import PromptLogprobs
from torpor.engine.requests.prompts import Prompt, PromptReader, check_request_options
from torpor.engine.requests.request import Request, Sequence
from torpor.engine.sampling.bad_words import TokenSequences, bad_word_sequences
from torpor.engine.sampling.sampler import child_seed
from torpor.errors import RequestError

if TYPE_CHECKING:
    from torpor.engine.args import EngineArgs
    from torpor.engine.sampling.grammar import Grammar, GrammarCompiler
    from torpor.engine.text.tokenizer import Tokenizer
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams
    from torpor.sleep.reports import UpdateReport


class Engine(SleepControl):
    """A model that computes many requests together, sleeps and wakes."""

    def __init__(self, args: EngineArgs) -> None:
        """Load a model and leave it awake; errors as ``LLM``."""
        parts = load_parts(args, ready=self._require_ready)
        super().__init__(str(args.model), parts.sleeper, parts.core, parts.cache)
        self._args = args
        self._tokenizer = parts.tokenizer
        self._rules: EndRules = parts.rules
        self._kv_cache_bytes = parts.memory.kv.nbytes
        self._kv_scales = parts.kv_scales
        self._grammars = parts.grammars
        # Requests are prepared in any thread, and the compiler keeps what it made.
        self._compiling = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self.reader = PromptReader(
            parts.tokenizer,
            parts.vocab_size,
            parts.rules.max_model_len,
            max_logprobs=args.max_logprobs,
        )
        self._numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Positions for prompt and completion together."""
        return self._rules.max_model_len

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        number: int | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Make a request of a checked prompt; it runs once it is submitted. Needs no turn.

        Args:
            prompt: what the reader made of it.
            params: checked here against this model.
            request_id: None for the request's number.
            number: its place in the order of arrival, from ``next_number``; None for the next.
            priority: lower first; ignored unless the policy is "priority".
            cache_salt: prefixes are shared only with requests of the same salt.

        Raises:
            RequestError: parameters that this model cannot follow, or an option of the wrong type.
        """
        check_request_options(request_id, priority, cache_salt)
        self.reader.check_params(params)
        grammars = [self._grammar(params) for _ in range(params.n)]
        bad_words = bad_word_sequences(self._tokenizer, params.bad_words or ())
        number = self.next_number() if number is None else number
        name = str(number) if request_id is None else request_id
        request = Request(
            request_id=name,
            number=number,
            prompt=prompt,
            params=params,
            arrival_s=time.monotonic(),
            priority=priority if self._args.scheduling_policy == "priority" else 0,
            cache_salt=cache_salt,
            prompt_logprobs=self._prompt_logprobs(prompt, params),
            weights_epoch=self.sleeper.weights_epoch,
            weights_version=self.sleeper.weights_version,
        )
        seed = child_seed(self._args.seed, number + 1) if params.seed is None else params.seed
        request.sequences = [
            self._sequence(request, index, seed, grammar, bad_words)
            for index, grammar in enumerate(grammars)
        ]
        return request

    def next_number(self) -> int:
        """The number of the next request; from any thread."""
        return next(self._numbers)

    def submit(self, request: Request) -> None:
        """Let a prepared request run, now or when the model is awake.

        Raises:
            RequestError: its id is in use.
        """
        self._require_open()
        name = request.request_id
        if self.core.knows(name):
            raise RequestError(f"request_id is {name!r}, which is in use; give another")
        self.core.add(request)

    def calibrate_kv_scales(self, prompts: object) -> UpdateReport:
        """Take the scales of an fp8 KV cache from some prompts, each computed whole.

        They stay until this is called again: sleep brings them back, updates of weights leave them.
        An update that is open is finished first, as any use of the weights does.
        Requests that run start over and keep their tokens.

        Args:
            prompts: as for ``generate``; text like that which the engine will see.

        Raises:
            ArgumentError: the cache has no scales, or there are no prompts.
            RequestError: a prompt is refused; nothing has changed.
            WeightsError: keys or values of the prompts are not finite; nothing has changed.
            AsleepError, WeightsIncompleteError: not all memory is awake, or weights are missing.
        """
        self._require_open()
        read = self.reader.read_all(prompts)
        with self.turns.take():
            self._require_open()
            # Layers compute in memory that sleeps with the cache.
            self._sleeper.require_ready(*NEEDED_TAGS)
            return self._kv_scales.calibrate([prompt.token_ids for prompt in read])

    def output(self, request: Request) -> RequestOutput:
        """A request's answer, so far or final."""
        return answer(request)

    def status(self) -> dict[str, Any]:
        """Facts about the model, its memory and its requests, JSON-able; sizes in bytes. Never
        waits for a step."""
        scheduler, cache = self.core.scheduler, self.cache
        return {
            "max_model_len": self.max_model_len,
            "kv_cache_bytes": self._kv_cache_bytes,
            "block_size": cache.block_size,
            "num_blocks": cache.num_blocks,
            "kv_cache_usage": cache.usage,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_steps": scheduler.stats.num_steps,
            "num_scheduled_tokens": scheduler.stats.num_scheduled_tokens,
            "num_prefix_hit_tokens": scheduler.stats.num_prefix_hit_tokens,
            "num_preemptions": scheduler.stats.num_preemptions,
            **super().status(),
        }

    def _sequence(
        self,
        request: Request,
        index: int,
        seed: int,
        grammar: Grammar | None,
        bad_words: TokenSequences,
    ) -> Sequence:
        prompt = request.prompt.token_ids
        return Sequence(
            seq_id=f"{request.request_id}/{request.number}/{index}",
            request=request,
            completion=Completion(
                request.params,
                index,
                len(prompt),
                tokenizer=self._tokenizer,
                rules=self._rules,
                grammar=grammar,
                bad_words=bad_words,
            ),
            seed=child_seed(seed, index),
            token_ids=list(prompt),
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        with self._compiling:
            self._compiler = self._grammars()
            return self._compiler.compile(params.structured_outputs)

    def _give_back(self) -> None:
        if self._compiler is not None:
            self._compiler.forget_all()

    def _prompt_logprobs(self, prompt: Prompt, params: SamplingParams) -> PromptLogprobs | None:
        if params.prompt_logprobs is None:
            return None
        count = params.prompt_logprobs
        return PromptLogprobs(len(prompt.token_ids), count, self._tokenizer)
