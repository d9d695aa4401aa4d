"""``tokenizer.model``: SentencePiece, with the added tokens that a model folder puts before it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torpor.errors import CheckpointError, ConfigError, ModelNotFoundError
from torpor.model.config.fields import MAX_SIZE, Fields

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE = "▁"
"""How SentencePiece writes a space."""


@dataclass(frozen=True, slots=True)
class _AddedToken:
    """A text that is one token wherever it stands."""

    token_id: int
    text: str
    special: bool
    """Left out of decoded text when special tokens are."""
    pattern: str
    """What it matches: its text, and the spaces it takes with it."""


class SentencePieceModel:
    """A SentencePiece model as the tokenizers that ship with it use it.

    Added tokens cut the text first, the longest winning, and what lies between them goes through
    SentencePiece piece by piece, each with the prefix space that the model may ask for. When
    decoding, added tokens stand as they are, without spaces around them.
    """

    def __init__(self, path: Path, config: Fields, special_tokens: Mapping[str, str]) -> None:
        """Read the model.

        Args:
            path: ``tokenizer.model``.
            config: ``tokenizer_config.json``: ``added_tokens_decoder``, ``add_bos_token`` (true if
                not given) and ``add_eos_token``.
            special_tokens: those that the config names, by role.

        Raises:
            ModelNotFoundError: the package sentencepiece is not installed.
            CheckpointError: the file cannot be read or is damaged.
            ConfigError: an added token is not one, ``legacy`` is false, or a token that is to be
                added is none.
        """
        self._processor = _processor(path)
        if not config.flag("legacy", True):
            raise config.error(
                "legacy",
                False,
                "true or absent with tokenizer.model: text after a special token would get other "
                "tokens; add the model's tokenizer.json",
            )
        own = {
            f"{role}_token": self._processor.id_to_piece(token_id)
            for role in ("bos", "eos", "unk")
            if (token_id := getattr(self._processor, f"{role}_id")()) >= 0
        }
        self.special_tokens: dict[str, str] = {**own, **special_tokens}
        """By role; those that the config does not name are SentencePiece's own."""
        self._added = {token.token_id: token for token in self._added_tokens(config)}
        self._ids = {token.text: token.token_id for token in self._added.values()}
        self._special = frozenset(token.token_id for token in self._added.values() if token.special)
        # The longest first, so that no token hides one that it begins.
        self._tried = sorted(self._added.values(), key=lambda token: -len(token.text))
        self._pattern = re.compile("|".join(f"({token.pattern})" for token in self._tried))
        self._before = self._role(config, "bos", config.flag("add_bos_token", True))
        self._after = self._role(config, "eos", config.flag("add_eos_token", False))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max([self._processor.get_piece_size(), *(token_id + 1 for token_id in self._added)])

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text, or None."""
        if token in self._ids:
            return self._ids[token]
        token_id: int = self._processor.piece_to_id(token)
        # SentencePiece answers with the unknown token.
        return token_id if self._processor.id_to_piece(token_id) == token else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; a begin token that the text has already is not added again."""
        token_ids = self._encode(text)
        if not add_special_tokens:
            return token_ids
        return self._begun(token_ids) + self._after

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what a chat template made: one begin token, whether it wrote it or not."""
        return self._begun(self._encode(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text; ids that are unknown count for nothing."""
        texts: list[str] = []
        run: list[int] = []
        size = self._processor.get_piece_size()
        for token_id in token_ids:
            if token_id in self._added:
                if skip_special_tokens and token_id in self._special:
                    continue
                texts += [self._processor.decode(run), self._added[token_id].text]
                run = []
            elif 0 <= token_id < size:
                run.append(token_id)
        return "".join([*texts, self._processor.decode(run)])

    def for_grammar(self) -> GrammarVocabulary:
        """What a grammar library needs to know of the tokens."""
        ids = range(self.vocab_size)
        tokens = [self._bytes_of(token_id) for token_id in ids]
        roles = {role: self.token_to_id(token) for role, token in self.special_tokens.items()}
        return GrammarVocabulary(
            tokens=tokens,
            special_token_ids=sorted(self._special),
            bos_token_id=roles.get("bos_token"),
            eos_token_id=roles.get("eos_token") or 0,
        )

    def _begun(self, token_ids: list[int]) -> list[int]:
        return token_ids if token_ids[:1] == self._before else self._before + token_ids

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text) if self._tried else ():
            assert match.lastindex is not None, "each alternative is a group"
            token_ids += self._processor.encode(text[start : match.start()])
            token_ids.append(self._tried[match.lastindex - 1].token_id)
            start = match.end()
        token_ids += self._processor.encode(text[start:])
        return token_ids

    def _role(self, config: Fields, role: str, wanted: bool) -> list[int]:
        text = self.special_tokens.get(f"{role}_token", "")
        if not wanted or not text:
            return []
        token_id = self.token_to_id(text)
        if token_id is None:
            raise config.error(
                f"{role}_token", text, "a token of the vocabulary, since texts get it added"
            )
        return [token_id]

    def _added_tokens(self, config: Fields) -> list[_AddedToken]:
        """Those of the config, and the tokens that have a role."""
        listed = config.raw("added_tokens_decoder")
        if not isinstance(listed, dict | None):
            raise config.error("added_tokens_decoder", listed, "an object of tokens by id")
        tokens = [_added_token(config, key, entry) for key, entry in (listed or {}).items()]
        known = {token.text for token in tokens}
        for text in dict.fromkeys(self.special_tokens.values()):
            token_id = self._processor.piece_to_id(text)
            if text not in known and self._processor.id_to_piece(token_id) == text:
                tokens.append(_AddedToken(token_id, text, True, re.escape(text)))
        return tokens

    def _bytes_of(self, token_id: int) -> bytes:
        processor = self._processor
        if token_id in self._added:
            return self._added[token_id].text.encode()
        if token_id >= processor.get_piece_size() or processor.is_control(token_id):
            return b""
        if processor.is_unknown(token_id) or processor.is_unused(token_id):
            return b""
        piece: str = processor.id_to_piece(token_id)
        if processor.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(_SPACE, " ").encode()


class GrammarVocabulary:
    """The bytes of every token, in the form that llguidance takes from other libraries."""

    is_tokenizer_wrapper = True

    def __init__(
        self,
        *,
        tokens: list[bytes],
        special_token_ids: list[int],
        bos_token_id: int | None,
        eos_token_id: int,
    ) -> None:
        """Keep them under the names that the library reads."""
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        special = set(special_token_ids)
        self._ids = {
            token: token_id
            for token_id, token in enumerate(tokens)
            if token and token_id not in special
        }
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are the text, each as long as can be.

        SentencePiece itself would put its prefix space before a text that continues another.
        """
        data = text.encode()
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                return token_ids  # A byte that no token has.
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids


def _added_token(config: Fields, key: str, entry: object) -> _AddedToken:
    def wrong() -> ConfigError:
        return config.error(
            "added_tokens_decoder", {key: entry}, 'of the form {"id": {"content": "text"}}'
        )

    if not isinstance(entry, dict) or not key.isdecimal() or int(key) > MAX_SIZE:
        raise wrong()
    text = entry.get("content")
    if not isinstance(text, str) or not text:
        raise wrong()
    pattern = re.escape(text)
    if entry.get("single_word"):
        pattern = rf"(?<!\w){pattern}(?!\w)"
    if entry.get("lstrip"):
        # All the spaces before it, or none: at each of them anew takes quadratic time.
        pattern = rf"(?:(?<!\s)\s*|){pattern}"
    if entry.get("rstrip"):
        pattern = rf"{pattern}\s*"
    return _AddedToken(int(key), text, bool(entry.get("special")), pattern)


def _processor(path: Path) -> SentencePieceProcessor:
    library = _library(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the file again") from error
    processor: SentencePieceProcessor = library.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, OSError) as error:
        raise _damaged(path, "not a SentencePiece model") from error
    if processor.get_piece_size() < 1:
        raise _damaged(path, "no tokens")
    return processor


def _damaged(path: Path, words: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({words}); fetch the file again")


def _library(path: Path) -> ModuleType:
    try:
        import sentencepiece
    except ImportError as error:
        raise ModelNotFoundError(
            f"reading {path} needs the package sentencepiece ({error}); run: "
            "pip install 'torpor[sentencepiece]', or add the model's tokenizer.json"
        ) from error
    return sentencepiece
