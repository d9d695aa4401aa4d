"""Structured output: which tokens keep a text inside a schema, a pattern or a grammar.

The work is done by llguidance, an optional package. Shape letters: V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torpor.errors import RequestError, shown

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from torpor.engine.text.tokenizer import Tokenizer
    from torpor.params import StructuredOutputsParams

_MAX_KEPT = 32
"""Compiled grammars that are kept for requests to come."""
_MAX_REASON = 300
"""Characters of the library's own words in an error."""
_TOO_LARGE = ("too many expressions", "items; max is")
"""What the library says when its tables are full, which shows only as the text goes on."""


class Grammar:
    """One completion's place in its grammar. Deterministic; belongs to one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, forget: Callable[[], None] = lambda: None
    ) -> None:
        """Start with no tokens.

        Args:
            matcher: at its start.
            vocab_size: V.
            forget: called when the grammar proves too large, whose tables are then full: all
                completions share them.

        Raises:
            RequestError: the grammar allows no text at all.
        """
        self._matcher = matcher
        self._forget = forget
        self._vocab_size = vocab_size
        self._mask_V = self._next_mask()

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may come: the text is complete and cannot go on."""
        return self._matcher.is_stopped()

    def mask(self) -> torch.Tensor:
        """The tokens allowed next: bool [V], True where allowed. Do not change it.

        End tokens are allowed where the text is complete.
        """
        return self._mask_V

    def accept(self, token_id: int) -> None:
        """Go on by one token. An end token after the end changes nothing.

        Raises:
            RequestError: the token is not allowed, or no token can follow it.
        """
        if not self._matcher.consume_token(token_id):
            reason = _reason(self._matcher)
            if any(words in reason for words in _TOO_LARGE):
                self._forget()
                raise RequestError(
                    "structured_outputs is too large or too branched to be followed any further; "
                    "give a shorter pattern, schema or grammar"
                )
            raise RequestError(
                f"token {token_id} does not fit structured_outputs: {reason}; "
                "draw from the tokens that mask() allows"
            )
        self._mask_V = self._next_mask()

    def copy(self) -> Grammar:
        """Another completion at the same place."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size, self._forget)

    def _next_mask(self) -> torch.Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise RequestError(
                f"structured_outputs allows no token here: {_reason(self._matcher)}; "
                "give a constraint that some text can meet"
            )
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(allowed.view(np.bool_))


class GrammarCompiler:
    """Makes grammars for one model's tokens."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int] = ()
    ) -> None:
        """Teach the library the vocabulary; it takes tenths of a second.

        Args:
            tokenizer: of the model.
            vocab_size: number of logits; ids that the tokenizer does not know are never allowed.
            eos_token_ids: what ends a text; the tokenizer's own end token when empty.

        Raises:
            RequestError: llguidance is not installed or cannot use this tokenizer, or the model
                has no end token.
        """
        self._library = _library()
        own = tokenizer.eos_token_id
        self._eos = frozenset(eos_token_ids) or frozenset(() if own is None else (own,))
        self._vocab_size = vocab_size
        self._tokenizer = self._adapted(tokenizer)
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """A grammar at its start.

        Raises:
            RequestError: the schema, pattern or grammar is invalid, uses what the library does not
                know, is too large, or allows no text.
        """
        grammar = self._kept.get(params)
        if grammar is None:
            grammar = self._kept[params] = self._compiled(params)
        # Another thread may forget it, or all of them, at any time.
        with contextlib.suppress(KeyError):
            self._kept.move_to_end(params)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar.copy()

    def forget_all(self) -> None:
        """Give back what compiled grammars take; requests that follow one keep theirs. From any
        thread."""
        self._kept.clear()

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        try:
            text = self._text(params)
            limits = self._library.LLParserLimits(verbose_errors=False)
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise _refused(params, str(error)) from error
        if matcher.is_error():
            raise _refused(params, _reason(matcher))

        def forget() -> None:
            self._kept.pop(params, None)

        return Grammar(matcher, self._vocab_size, forget)

    def _text(self, params: StructuredOutputsParams) -> str:
        """The grammar in the library's own form."""
        matcher = self._library.LLMatcher
        if params.regex is not None:
            return str(matcher.grammar_from_regex(params.regex))
        if params.choice is not None:
            choices = " | ".join(map(_quoted, params.choice))
            return str(matcher.grammar_from_lark(f"start: {choices}"))
        if params.grammar is not None:
            return str(self._library.grammar_from("grammar", params.grammar))
        options: dict[str, Any] = {}
        if params.disable_any_whitespace:
            options["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
        return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=options or None))

    def _adapted(self, tokenizer: Tokenizer) -> LLTokenizer:
        # The library takes a larger vocabulary than the tokenizer's, but end tokens only of its.
        eos = sorted(token_id for token_id in self._eos if token_id < tokenizer.vocab_size)
        if not eos:
            raise RequestError(
                f"structured_outputs needs an end token, and of {sorted(self._eos)} the tokenizer "
                f"knows none; set eos_token_id in the model's config.json below "
                f"{tokenizer.vocab_size}, or leave structured_outputs out"
            )
        size = max(self._vocab_size, tokenizer.vocab_size)
        form = tokenizer.for_grammar()
        try:
            adapted: LLTokenizer = self._library.LLTokenizer(form, n_vocab=size, eos_token=eos)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs cannot be followed with this model's tokenizer: {error}; "
                "leave it out"
            ) from error
        return adapted


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs needs the package llguidance, which is not installed; run: "
            'pip install "torpor[structured]"'
        ) from error
    return llguidance


def _quoted(text: str) -> str:
    # JSON leaves the delete character as it is, and the library's lexer stops at it.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _reason(matcher: LLMatcher) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()


def _refused(params: StructuredOutputsParams, reason: str) -> RequestError:
    names = ("json", "regex", "choice", "grammar", "json_object")
    name = next(name for name in names if getattr(params, name) not in (None, False))
    words = " ".join(reason.split())
    words = words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]}..."
    return RequestError(
        f"structured_outputs.{name} is {shown(getattr(params, name), 80)}, which cannot be "
        f"followed: {words}; correct it or leave that part out"
    )
