from __future__ import annotations

import contextlib
from typing import Any

import pytest
from tests.engine.conftest import TEMPLATE

from torpor.engine.text.chat_template import render
from torpor.errors import ConfigError, RequestError

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hi", "messages is 'hi'"),
        ({"role": "user", "content": "hi"}, "messages is {"),
        (None, "messages is None"),
        ([], "messages is empty"),
        (["hi"], "message 0 is 'hi'"),
        ([{"content": "hi"}], "message 0 has no 'role'"),
        ([*HI, {"role": "user"}], "message 1 has no 'content'"),
        ([{"role": "user", "content": None}], "message 0 has content None"),
        ([{"role": "user", "content": ["hi"]}], "message 0 has content"),
        ([{"role": 1, "content": "hi"}], "message 0 has role 1"),
        ([{"role": "", "content": "hi"}], "message 0 has an empty role"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, told: str) -> None:
    with pytest.raises(RequestError, match=r"give|add") as caught:
        render(TEMPLATE, messages, {})
    assert told in str(caught.value)


def test_a_role_that_the_template_rejects_is_refused() -> None:
    with pytest.raises(RequestError, match=r"roles \['wizard'\].*unknown role wizard"):
        render(TEMPLATE, [{"role": "wizard", "content": "hi"}], {})


@pytest.mark.parametrize(
    "template",
    ["{{ messages[5].content }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ messages.nothing.deeper }}"],
)
def test_a_template_that_fails_on_the_messages_is_a_request_error(template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(template, HI, {})


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% frob %}", "{{ a | nofilter }}"])
def test_a_template_that_does_not_parse_is_a_config_error(template: str) -> None:
    with pytest.raises(ConfigError, match="not valid at line 1"):
        render(template, HI, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(99999999) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages = list(HI)
    with contextlib.suppress(RequestError):
        assert render(template, messages, {}) == ""
    assert messages == HI


def test_block_tags_leave_no_blank_lines() -> None:
    template = (
        "{% for m in messages %}\n    {% if m.role %}\n{{ m.content }}\n    {% endif %}\n"
        "{% endfor %}"
    )
    assert render(template, HI, {}) == "hi\n"


def test_loop_controls_and_the_generation_tag_work() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(template, HI * 3, {}) == "hi"


def test_tojson_keeps_characters_as_they_are() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "<é>"}], {}) == (
        '{"role": "user", "content": "<é>"}'
    )


def test_the_date_is_at_hand() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", HI, {})) == 10


def test_missing_variables_read_as_nothing() -> None:
    assert render("[{{ bos_token }}]", HI, {}) == "[]"


class Surprising:
    """A value of a template that raises what it likes."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [OSError("o"), RuntimeError("r"), AttributeError("a")], ids=repr)
def test_what_a_value_raises_is_a_refusal(error: Exception) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        render("{{ x }}", HI, {"x": Surprising(error)})


def test_endless_templates_and_values_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    for template in ("{{ x|tojson }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"):
        with pytest.raises(RequestError, match=r"does not come to an end|nested too deeply"):
            render(template, HI, {"x": deep})
    with pytest.raises(ConfigError, match="nested too deeply"):
        render("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", HI, {})


def test_a_variable_may_have_any_name() -> None:
    assert render("{{ self }}{{ messages[0].content }}", HI, {"self": 1, "args": 2}).endswith("hi")
