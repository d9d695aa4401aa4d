"""Tokens to text one at a time, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torpor.engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns token ids into text as they come, and never shows part of a character.

    Three marks over the ids: what lies before ``shown`` is text already; ``context`` is where
    decoding starts again, since a token's text may depend on the one before it::

        ids:   ....................|context ...........|shown ......... end
                text, final          text, decoded again  held back while it ends in U+FFFD
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add one token; the text that became certain, often that of this token."""
        self._ids.append(token_id)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The text still held back, part of a character as U+FFFD. Call it once, at the end."""
        return self._advance(self._pending())

    def mark(self) -> tuple[int, int, int]:
        """The present state, for ``rewind``."""
        return (len(self._ids), self._context, self._shown)

    def rewind(self, mark: tuple[int, int, int]) -> None:
        """Forget what was pushed and flushed after a mark."""
        num_ids, self._context, self._shown = mark
        del self._ids[num_ids:]

    def _pending(self) -> str:
        before = self._decode(self._context, self._shown)
        return self._decode(self._context, len(self._ids))[len(before) :]

    def _advance(self, text: str) -> str:
        # A token without text (a special one) cannot serve as context for the next; nor can one of
        # spaces, since some tokenizers drop those that a text begins with.
        if text.strip(" "):
            self._context = self._shown
        if text:
            self._shown = len(self._ids)
        return text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)


class StopStrings:
    """Collects text and finds the first stop string in it, however the text is cut into pieces."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Start with no text.

        Args:
            stop: non-empty strings.
            include: keep the stop string in the text.
        """
        self._stop = tuple(stop)
        self._include = include
        self.text = ""
        """Everything pushed, cut at the stop string once there is one."""
        self._searched = 0

    def push(self, text: str, *, search: bool = True) -> str | None:
        """Add text; the stop string that completes first in it, or None.

        Args:
            text: what to add.
            search: False adds the text without ever looking for a stop string that ends in it.
        """
        old_length = len(self.text)
        self.text += text
        if not search:
            self._searched = len(self.text)
            return None
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._find(stop)) >= 0
        ]
        self._searched = old_length + len(text)
        if not found:
            return None
        end, start, stop = min(found)
        self.text = self.text[: end if self._include else start]
        return stop

    def mark(self) -> tuple[str, int]:
        """The present state, for ``rewind``."""
        return (self.text, self._searched)

    def rewind(self, mark: tuple[str, int]) -> None:
        """Forget what was pushed after a mark."""
        self.text, self._searched = mark

    def certain_length(self) -> int:
        """How many characters of ``text`` no later stop string can take away."""
        if self._include:
            return len(self.text)
        longest = max(map(len, self._stop), default=1)
        for start in range(max(0, len(self.text) - longest + 1), len(self.text)):
            tail = self.text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(self.text)

    def _find(self, stop: str) -> int:
        # A stop string must end in new text, so its start is at most its length before that.
        return self.text.find(stop, max(0, self._searched - len(stop) + 1))
