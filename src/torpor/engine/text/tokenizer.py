"""Text to token ids and back: tokenizer.json through the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from torpor.errors import CheckpointError, ConfigError, RequestError
from torpor.model.config.fields import read_json_object

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template. Immutable; thread-safe."""

    def __init__(
        self,
        tokenizer_json: Path,
        config_json: Path | None = None,
        chat_template: Path | None = None,
    ) -> None:
        """Read the files of a model folder.

        Args:
            tokenizer_json: the tokenizer itself.
            config_json: tokenizer_config.json with special tokens and, mostly, the chat template.
            chat_template: chat_template.jinja of newer folders; wins over the one in the config.

        Raises:
            CheckpointError: tokenizer.json or the template is missing, not UTF-8, or damaged.
            ConfigError: tokenizer_config.json is missing or damaged, or a field has the wrong type.
        """
        text = _read_text(tokenizer_json)
        try:
            self._backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for any damage
            raise _damaged(tokenizer_json, error) from error
        # A file written by a trainer may ask for truncation or padding, which would change prompts.
        self._backend.no_truncation()
        self._backend.no_padding()
        config = read_json_object(config_json) if config_json else {}
        self.special_tokens: dict[str, str] = _special_tokens(config, config_json)
        self.chat_template: str | None = (
            _read_text(chat_template) if chat_template else _chat_template(config, config_json)
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if the model has one."""
        return self._special_id("eos_token")

    def to_json(self) -> str:
        """The tokenizer itself, as tokenizer.json holds it."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text that UTF-8 can hold.
            add_special_tokens: let the tokenizer add what it adds to a plain text, such as a
                begin token.

        Raises:
            RequestError: not a string, or one with lone surrogates.
        """
        if not isinstance(text, str):
            raise RequestError(f"the text is {text!r}; give a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate {text[error.start]!r} at character "
                f"{error.start}; remove it or decode the input with errors='replace'"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete characters read as U+FFFD, unknown ids as nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text for a conversation; encode it with ``add_special_tokens=False``.

        Args:
            messages: mappings with ``role`` and ``content``, oldest first.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: end with the header of the assistant's turn.

        Raises:
            RequestError: bad messages, or the model has no template.
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
        variables: dict[str, object] = dict(self.special_tokens)
        variables.update(add_generation_prompt=add_generation_prompt, tools=None, documents=None)
        return render(template, messages, variables)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


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
