"""Text to token ids and back, and conversations to text.

``tokenizer.json`` goes through the ``tokenizers`` library, ``tokenizer.model`` through
``sentencepiece``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from torpor.engine.text import pangu_chat
from torpor.engine.text.sentencepiece_model import SentencePieceModel
from torpor.errors import CheckpointError, ConfigError, RequestError, shown
from torpor.model.config.fields import Fields, read_json_object

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


_RESERVED = ("messages", "chat_template", "add_generation_prompt")
"""Arguments of their own; templates know them by these names too."""


class Backend(Protocol):
    """What a tokenizer library does for one model."""

    @property
    def vocab_size(self) -> int:
        """Number of ids it knows, added tokens included."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text, or None."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what a chat template made."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...

    def for_grammar(self) -> object:
        """The tokenizer as llguidance takes it."""
        ...


class JsonBackend:
    """``tokenizer.json`` through the ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            CheckpointError: it is missing, not UTF-8, or damaged.
        """
        text = _read_text(path)
        try:
            self._library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for any damage
            raise _damaged(path, error) from error
        # A file written by a trainer may ask for truncation or padding, which would change prompts.
        self._library.no_truncation()
        self._library.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of ids it knows, added tokens included."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its text, or None."""
        return self._library.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what a chat template made, which wrote every special token itself."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def for_grammar(self) -> object:
        """The content of ``tokenizer.json``."""
        return str(self._library.to_str())


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template. Immutable; thread-safe."""

    def __init__(
        self,
        path: Path,
        config_json: Path | None = None,
        chat_template: Path | None = None,
        *,
        architecture: str | None = None,
    ) -> None:
        """Read the files of a model folder.

        Args:
            path: ``tokenizer.json``, or ``tokenizer.model`` of SentencePiece.
            config_json: tokenizer_config.json with special tokens and, mostly, the chat template.
            chat_template: chat_template.jinja of newer folders; wins over the one in the config.
            architecture: of the model; decides the template of a folder that has none, and how
                the model is told to think.

        Raises:
            CheckpointError: the tokenizer or the template is missing, not UTF-8, or damaged.
            ModelNotFoundError: a tokenizer.model, and the package sentencepiece is not installed.
            ConfigError: tokenizer_config.json is missing or damaged, or a field has the wrong type.
        """
        config = read_json_object(config_json) if config_json else {}
        self.special_tokens: dict[str, str] = _special_tokens(config, config_json)
        self._backend: Backend
        if path.suffix == ".model":
            model = SentencePieceModel(path, Fields(config, str(config_json)), self.special_tokens)
            self._backend, self.special_tokens = model, model.special_tokens
        else:
            self._backend = JsonBackend(path)
        self.chat_template: str | None = (
            _read_text(chat_template) if chat_template else _chat_template(config, config_json)
        )
        # Vocabularies without the markers of turns could not say what the template writes.
        self._is_pangu = architecture in pangu_chat.ARCHITECTURES and all(
            self._backend.token_to_id(marker) is not None
            for marker in (pangu_chat.TURN, pangu_chat.END)
        )
        if self.chat_template is None and self._is_pangu:
            self.chat_template = pangu_chat.TEMPLATE

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included."""
        return self._backend.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if the model has one."""
        return self._special_id("eos_token")

    def for_grammar(self) -> object:
        """The tokenizer as llguidance takes it."""
        return self._backend.for_grammar()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text that UTF-8 can hold.
            add_special_tokens: let the tokenizer add what it adds to a plain text, such as a
                begin token.

        Raises:
            RequestError: not a string, or one with lone surrogates.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of what ``apply_chat_template`` made: nothing that it wrote is added again.

        Raises:
            RequestError: as ``encode``.
        """
        _check_text(text)
        return self._backend.encode_chat(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete characters read as U+FFFD, unknown ids as nothing.

        Raises:
            RequestError: not a sequence of numbers that ids can be.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError, ValueError) as error:
            raise RequestError(
                f"token_ids is {shown(token_ids, 80)} ({error}); give a list of token ids"
            ) from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text for a conversation, for ``encode_chat``.

        Args:
            messages: mappings with ``role`` and ``content``, oldest first.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: end with the header of the assistant's turn.
            chat_template_kwargs: what else the template reads. ``enable_thinking`` (True, False or
                "auto") reaches openPangu models whose template does not read it too, as words
                after the last user message.

        Raises:
            RequestError: bad messages, bad values, or the model has no template.
            ConfigError: the template is not valid.
        """
        # Jinja takes longer to import than a tokenizer to load, and only chats need it.
        from torpor.engine.text.chat_template import check_messages, render

        check_messages(messages)
        template = chat_template or self.chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; pass chat_template, or use generate with a prompt"
            )
        given = _template_kwargs(chat_template_kwargs)
        if self._is_pangu and "enable_thinking" in given and "enable_thinking" not in template:
            messages = pangu_chat.with_thinking(messages, given["enable_thinking"])
        variables: dict[str, object] = dict(self.special_tokens)
        variables.update(add_generation_prompt=add_generation_prompt, tools=None, documents=None)
        return render(template, messages, variables | given)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"the text is {shown(text, 80)}; give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds a lone surrogate {text[error.start]!r} at character "
            f"{error.start}; remove it or decode the input with errors='replace'"
        ) from error


def _template_kwargs(given: object) -> dict[str, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise RequestError(
            f"chat_template_kwargs is {shown(given, 80)}; give a mapping of names to values"
        )
    for name in _RESERVED:
        if name in given:
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which is an argument; pass it as that"
            )
    return dict(given)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 (byte {error.start}); fetch the file again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch the file again") from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {error}; fetch the file again")


def _special_tokens(config: dict[str, object], path: Path | None) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{path} has {name} {value!r}; it must be a string")
        tokens[name] = value
    return tokens


def _chat_template(config: dict[str, object], path: Path | None) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry for entry in template if isinstance(entry, dict)}
        template = named.get("default", {}).get("template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path} has chat_template {template!r}; it must be a string")
    return template
