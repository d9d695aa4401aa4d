"""Chats with openPangu models: the family's template and its thinking switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torpor.errors import RequestError, shown

ARCHITECTURES = frozenset(
    {
        "PanguEmbeddedForCausalLM",
        "PanguProMoEForCausalLM",
        "PanguProMoEV2ForCausalLM",
        "PanguUltraMoEForCausalLM",
    }
)
"""Those whose chats are written this way."""

TURN, END = "[unused9]", "[unused10]"
"""The tokens around each turn."""

TEMPLATE = (
    "{% set names = {'system': '系统', 'user': '用户', 'assistant': '助手', 'tool': '工具', "
    "'function': '方法'} %}"
    "{% if messages[0].role != 'system' %}[unused9]系统：[unused10]{% endif %}"  # noqa: RUF001
    "{% for message in messages %}"
    "{% if message.role not in names %}"
    "{{ raise_exception('the roles are ' + names | join(', ')) }}"
    "{% endif %}"
    "{{ '[unused9]' + names[message.role] + '：' + message.content + '[unused10]' }}"  # noqa: RUF001
    "{% endfor %}"
    "{% if add_generation_prompt %}[unused9]助手：{% endif %}"  # noqa: RUF001
)
"""For folders without one. It writes no begin token: the tokenizer adds it."""

_WORDS: Mapping[object, str] = {True: "", False: " /no_think", "auto": " /auto_think"}
"""What is said after the user's text to get fast thinking, or the model's own choice."""


def with_thinking(
    messages: Sequence[Mapping[str, Any]], enable_thinking: object
) -> list[Mapping[str, Any]]:
    """The conversation with the switch in its last user message.

    Args:
        messages: a checked conversation.
        enable_thinking: True thinks slowly, which is how the models are without a switch; False
            answers at once; "auto" leaves it to the model, if it can choose.

    Raises:
        RequestError: another value, there is no user message, or its text ends in another switch.
    """
    if not isinstance(enable_thinking, bool | str) or enable_thinking not in _WORDS:
        raise RequestError(
            f"enable_thinking is {shown(enable_thinking, 80)}; give True, False or 'auto'"
        )
    said = _WORDS[enable_thinking]
    changed = list(messages)
    for index in range(len(changed) - 1, -1, -1):
        message = changed[index]
        if message["role"] == "user":
            words = (word for word in _WORDS.values() if word and message["content"].endswith(word))
            written = next(words, "")
            if written not in ("", said):
                raise RequestError(
                    f"enable_thinking is {enable_thinking!r}, and the user's last message ends "
                    f"in {written.strip()!r}; leave one of them out"
                )
            if not written:
                changed[index] = {**message, "content": message["content"] + said}
            return changed
    if not said:
        return changed
    raise RequestError(
        f"enable_thinking is {enable_thinking!r}, and no message is a user's, which carries the "
        "switch; add one or leave enable_thinking out"
    )
