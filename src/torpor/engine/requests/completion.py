"""One completion while it grows: its tokens, its text, its log probabilities, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torpor.engine.text.detokenizer import Detokenizer, StopStrings
from torpor.outputs import CompletionOutput, FinishReason, Logprob

if TYPE_CHECKING:
    from torpor.engine.sampling.bad_words import TokenSequences
    from torpor.engine.sampling.grammar import Grammar
    from torpor.engine.sampling.sampler import SampledToken
    from torpor.engine.text.tokenizer import Tokenizer
    from torpor.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRules:
    """What ends a completion besides the request's own parameters."""

    eos_token_ids: frozenset[int]
    max_model_len: int


class Completion:
    """One completion of a request while it grows."""

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        num_prompt_tokens: int,
        *,
        tokenizer: Tokenizer,
        rules: EndRules,
        grammar: Grammar | None = None,
        bad_words: TokenSequences = (),
    ) -> None:
        """Start with no tokens.

        Args:
            params: the request's.
            index: which of its ``n`` completions this is.
            num_prompt_tokens: they leave the rest of the context to the completion.
            tokenizer: makes text of tokens.
            rules: what ends it besides the parameters.
            grammar: what the text must look like; this completion's own.
            bad_words: token sequences that must not appear.
        """
        room = rules.max_model_len - num_prompt_tokens
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.grammar = grammar
        self.bad_words = bad_words
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

    def accept(self, token: SampledToken) -> None:
        """Add one token, and end if it ends the completion.

        All or nothing: after an interrupt or an error it is as if the token had not come.

        Raises:
            RequestError: the grammar has no way on after it.
        """
        assert not self.finished, "a token for a completion that has ended"
        marks = (len(self.token_ids), self._detokenizer.mark(), self._text.mark())
        try:
            self._accept(token)
        except BaseException:
            self._rewind(*marks)
            raise

    def _accept(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)
        self._keep_logprobs(token)
        self._check_token(token.token_id)
        if self._params.detokenize:
            self._check_text(token.token_id)
        self._check_length()
        # Last, since a grammar cannot go back; what ended needs no way on.
        if self.grammar is not None and not self.finished:
            self.grammar.accept(token.token_id)

    def _rewind(
        self, num_tokens: int, detokenizer: tuple[int, int, int], text: tuple[str, int]
    ) -> None:
        del self.token_ids[num_tokens:]
        if self._logprobs is not None:
            del self._logprobs[num_tokens:]
        self._detokenizer.rewind(detokenizer)
        self._text.rewind(text)
        self.finish_reason = self.stop_reason = None

    def end(self, reason: FinishReason) -> None:
        """End without a token, as an abort or a failure does; what is held back is shown."""
        if self.finished:
            return
        self.finish_reason = reason
        self._text.push(self._detokenizer.flush(), search=False)

    def take_text(self) -> str:
        """The text that is certain by now and was not taken before."""
        end = len(self._text.text) if self.finished else self._text.certain_length()
        new = self._text.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new

    def output(self, *, since: int = 0, text: str | None = None) -> CompletionOutput:
        """The completion so far.

        Args:
            since: leave out the tokens before this index.
            text: instead of all text that is certain.
        """
        logprobs = self._logprobs
        if text is None:
            end = len(self._text.text) if self.finished else self._text.certain_length()
            text = self._text.text[:end]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=tuple(self.token_ids[since:]),
            cumulative_logprob=None if logprobs is None else self._cumulative(logprobs),
            logprobs=None if logprobs is None else tuple(logprobs[since:]),
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
