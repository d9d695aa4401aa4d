"""Chat templates: Jinja in a sandbox, with the environment that model folders are written for.

The conventions (whitespace control, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML
escapes, the ``generation`` tag) are those of Hugging Face's chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torpor.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from jinja2.parser import Parser

Message = Mapping[str, Any]
"""One turn: ``role`` and ``content``, and whatever else the model's template reads."""


def render(template: str, messages: Sequence[Message], variables: Mapping[str, object]) -> str:
    """The prompt text for one conversation.

    Args:
        template: Jinja source.
        messages: the conversation, oldest first.
        variables: what else the template may read, such as ``bos_token`` or
            ``add_generation_prompt``.

    Raises:
        RequestError: the messages are malformed, or the template refuses them.
        ConfigError: the template itself is not valid.
    """
    check_messages(messages)
    try:
        compiled = _compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid at line {error.lineno}: {error.message}; "
            "repair it in the model's folder or pass chat_template"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            "the chat template is nested too deeply; repair it in the model's folder or pass "
            "chat_template"
        ) from error
    try:
        return compiled.render({**variables, "messages": messages})
    except RecursionError as error:
        raise RequestError(
            "the model's chat template does not come to an end with these messages, or a value "
            "given to it is nested too deeply; give a flatter one or repair the template"
        ) from error
    except Exception as error:  # a template calls what it is given, which may raise anything
        roles = [message["role"] for message in messages]
        raise RequestError(
            f"the model's chat template refuses these messages (roles {roles}): {error}; "
            "give roles and an order that the model knows"
        ) from error


def check_messages(messages: object) -> None:
    """Refuse what is not a conversation.

    Raises:
        RequestError: not a non-empty list of mappings, each with text ``role`` and ``content``.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(
            f"messages is {shown(messages, 80)}; give a list of {{'role': ..., 'content': ...}}"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {index} is {shown(message, 80)}; give {{'role': ..., 'content': ...}}"
            )
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"message {index} has no {key!r}; add it")
            if not isinstance(message[key], str):
                raise RequestError(
                    f"message {index} has {key} {shown(message[key], 80)}; give a string"
                )
        if not message["role"]:
            raise RequestError(f"message {index} has an empty role; give 'user' or 'assistant'")


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for trainers; here it is
    transparent."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
