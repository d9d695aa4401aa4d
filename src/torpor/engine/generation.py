"""From a request to its answer: the loop of steps, and when a completion ends."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torpor.engine.detokenizer import Detokenizer, StopStrings
from torpor.engine.sampler import SampledToken, child_seed, sample
from torpor.errors import RequestError
from torpor.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput

if TYPE_CHECKING:
    import torch

    from torpor.engine.prompts import Prompt
    from torpor.engine.runner import ModelRunner
    from torpor.engine.text import Tokenizer
    from torpor.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked prompt with its parameters."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    """The parameters' own, or one that the engine derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """What ends a completion besides the request's own parameters."""

    eos_token_ids: frozenset[int]
    max_model_len: int


class Completion:
    """One completion of a request while it grows."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer, rules: EndRules) -> None:
        """Start with no tokens."""
        params = request.params
        room = rules.max_model_len - len(request.prompt.token_ids)
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._eos = frozenset() if params.ignore_eos else rules.eos_token_ids
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._text = StopStrings(params.stop or (), include=params.include_stop_str_in_output)
        self._num_shown = 0
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []

    @property
    def finished(self) -> bool:
        """Whether no more tokens come."""
        return self.finish_reason is not None

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that must not be drawn next: whatever would end the text before ``min_tokens``."""
        if len(self.token_ids) < self._params.min_tokens:
            return self._eos | self._stop_ids
        return frozenset()

    def accept(self, token: SampledToken) -> str:
        """Add one token; the text that is now certain and was not before."""
        assert not self.finished, "a token for a completion that has ended"
        self.token_ids.append(token.token_id)
        self._keep_logprobs(token)
        self._check_token(token.token_id)
        self._check_text(token.token_id)
        self._check_length()
        return self._new_text()

    def output(self) -> CompletionOutput:
        """The completion so far."""
        logprobs = self._logprobs
        return CompletionOutput(
            index=self.index,
            text=self._text.text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if logprobs is None else self._cumulative(logprobs),
            logprobs=None if logprobs is None else tuple(logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _check_token(self, token_id: int) -> None:
        if token_id in self._eos:
            self.finish_reason = "stop"
        elif token_id in self._stop_ids:
            self.finish_reason, self.stop_reason = "stop", token_id

    def _check_text(self, token_id: int) -> None:
        # The token that ends a completion is no part of its text unless asked for.
        shown = not self.finished or self._params.include_stop_str_in_output
        text = self._detokenizer.push(token_id) if shown else ""
        if self.finished:
            text += self._detokenizer.flush()
        self._check_stop_string(text)

    def _check_length(self) -> None:
        if self.finished or len(self.token_ids) < self._max_tokens:
            return
        self.finish_reason = "length"
        self._check_stop_string(self._detokenizer.flush())

    def _check_stop_string(self, text: str) -> None:
        may_stop = len(self.token_ids) > self._params.min_tokens
        stop = self._text.push(text, search=may_stop)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop

    def _new_text(self) -> str:
        end = len(self._text.text) if self.finished else self._text.certain_length()
        new = self._text.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new

    def _keep_logprobs(self, token: SampledToken) -> None:
        if self._logprobs is None or token.logprobs is None:
            return
        self._logprobs.append(
            {
                entry.token_id: Logprob(
                    logprob=entry.logprob,
                    rank=entry.rank,
                    decoded_token=self._tokenizer.decode(
                        [entry.token_id], skip_special_tokens=False
                    ),
                )
                for entry in token.logprobs
            }
        )

    def _cumulative(self, logprobs: list[dict[int, Logprob]]) -> float:
        pairs = zip(self.token_ids, logprobs, strict=True)
        return sum(entry[token_id].logprob for token_id, entry in pairs)


class GenerationLoop:
    """Computes requests one after another with one runner."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, rules: EndRules) -> None:
        """Put the parts together."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._rules = rules

    def steps(self, request: Request) -> Generator[str, None, RequestOutput]:
        """Compute a request, one step for each item asked of this generator.

        Yields after each token the text that became certain; returns the answer. The prompt is
        computed once for all completions, and always from the start: content of the cache that
        another request or another epoch left there is never used.

        Raises:
            AsleepError, WeightsIncompleteError: a step may not run.
            StateError: between two steps somebody else used the cache, or it was dropped.
            RequestError: the logits hold NaN.
        """
        prompt = request.prompt.token_ids
        prompt_logits_V, mark = self._runner.prefill(prompt)
        completions = []
        for index in range(request.params.n):
            completion = Completion(request, index, self._tokenizer, self._rules)
            completions.append(completion)
            if index > 0:
                self._runner.rewind(len(prompt), mark)
            logits_V = prompt_logits_V
            while True:
                yield completion.accept(self._sample(logits_V, request, completion))
                if completion.finished:
                    break
                logits_V = self._runner.decode(completion.token_ids[-1], mark)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt.text,
            prompt_token_ids=prompt,
            outputs=tuple(completion.output() for completion in completions),
            finished=True,
            weights_epoch=mark.weights_epoch,
            weights_version=mark.weights_version,
        )

    def _sample(
        self, logits_V: torch.Tensor, request: Request, completion: Completion
    ) -> SampledToken:
        prompt = request.prompt.token_ids
        try:
            return sample(
                logits_V,
                request.params,
                seed=child_seed(request.seed, completion.index),
                position=len(prompt) + len(completion.token_ids),
                prompt_token_ids=prompt,
                output_token_ids=completion.token_ids,
                forbidden=completion.forbidden,
            )
        except RequestError as error:
            raise RequestError(f"request {request.request_id}: {error}") from error
