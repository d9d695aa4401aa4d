"""Chats with models of the family: turns, one begin token, the thinking switch, the end token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tests.openpangu.conftest import write_words
from tests.openpangu.models import MODELS, write_model
from tests.openpangu.pieces import END, TURN, trained, write_pieces

from torpor.engine.llm import LLM
from torpor.engine.text.tokenizer import Tokenizer
from torpor.errors import CheckpointError, RequestError
from torpor.params import SamplingParams

PANGU = "PanguEmbeddedForCausalLM"
HI = [{"role": "user", "content": "hi"}]
STOCK = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '[unused9]系统：[unused10]' }}{% endif %}"  # noqa: RUF001
    "{% if message['role'] == 'user' %}"
    "{{'[unused9]用户：' + message['content'] + '[unused10]'}}{% endif %}"  # noqa: RUF001
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[unused9]助手：' }}{% endif %}"  # noqa: RUF001
)
"""As folders of the family write theirs, for one role."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pieces(tmp_path_factory.mktemp("pieces"))


def load(folder: Path, architecture: str | None = PANGU) -> Tokenizer:
    path = folder / "tokenizer.model"
    return Tokenizer(path, folder / "tokenizer_config.json", architecture=architecture)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


def with_config(folder: Path, target: Path, **config: Any) -> Tokenizer:
    model = (folder / "tokenizer.model").read_bytes()
    return load(write_pieces(target, model=model, **config))


def turn(name: str, text: str) -> str:
    return f"{TURN}{name}：{text}{END}"  # noqa: RUF001


ASSISTANT = f"{TURN}助手："  # noqa: RUF001


def test_every_role_has_its_name(tokenizer: Tokenizer) -> None:
    names = {"system": "系统", "user": "用户", "assistant": "助手", "tool": "工具"}
    names["function"] = "方法"
    messages = [{"role": role, "content": f" {role}\n"} for role in names]
    text = "".join(turn(name, f" {role}\n") for role, name in names.items())
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == text
    assert tokenizer.apply_chat_template(messages) == text + ASSISTANT


def test_an_empty_system_turn_stands_before_other_roles(tokenizer: Tokenizer) -> None:
    expected = turn("系统", "") + turn("用户", "hi") + ASSISTANT
    assert tokenizer.apply_chat_template(HI) == expected
    assert tokenizer.apply_chat_template(HI, chat_template=STOCK) == expected


def test_an_unknown_role_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"wizard.*system, user, assistant, tool, function"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "hi"}])


def test_only_the_family_gets_its_template(folder: Path, tmp_path: Path) -> None:
    assert load(folder, "LlamaForCausalLM").chat_template is None
    assert load(folder, None).chat_template is None
    assert with_config(folder, tmp_path, chat_template="own").chat_template == "own"
    model = trained(user_defined_symbols=["[unused9]"])
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "tokenizer.model").write_bytes(model)
    (tmp_path / "without" / "tokenizer_config.json").write_text("{}")
    assert load(tmp_path / "without").chat_template is None


@pytest.mark.parametrize("begin", ["", "<s>", "{{ bos_token }}"])
def test_a_chat_has_one_begin_token(tokenizer: Tokenizer, begin: str) -> None:
    ids = tokenizer.encode_chat(tokenizer.apply_chat_template(HI, chat_template=f"{begin}{STOCK}"))
    assert ids[0] == 1
    assert ids.count(1) == 1


@pytest.mark.parametrize("template", [None, STOCK])
@pytest.mark.parametrize(
    ("switch", "said"), [(True, ""), (False, " /no_think"), ("auto", " /auto_think")]
)
def test_the_switch_stands_after_the_last_user_text(
    tokenizer: Tokenizer, template: str | None, switch: bool | str, said: str
) -> None:
    messages = [*HI, {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    asked = [*HI, {"role": "user", "content": f"why?{said}"}, messages[2]]

    def text(conversation: list[dict[str, str]], **kwargs: object) -> str:
        return tokenizer.apply_chat_template(
            conversation, chat_template=template, chat_template_kwargs=kwargs
        )

    assert text(messages, enable_thinking=switch) == text(asked)
    assert text(asked, enable_thinking=switch) == text(asked), "it is not said twice"
    assert messages[1] == {"role": "user", "content": "why?"}


@pytest.mark.parametrize("switch", [None, 1, 0, "no", [True]], ids=str)
def test_another_switch_is_refused(tokenizer: Tokenizer, switch: object) -> None:
    with pytest.raises(RequestError, match=r"enable_thinking is .*give True, False or 'auto'"):
        tokenizer.apply_chat_template(HI, chat_template_kwargs={"enable_thinking": switch})


@pytest.mark.parametrize(
    ("switch", "word"),
    [(False, "/auto_think"), ("auto", "/no_think"), (True, "/no_think"), (True, "/auto_think")],
)
def test_two_switches_that_disagree_are_refused(
    tokenizer: Tokenizer, switch: bool | str, word: str
) -> None:
    messages = [{"role": "user", "content": f"why? {word}"}]
    with pytest.raises(RequestError, match=f"ends in '{word}'; leave one of them out"):
        tokenizer.apply_chat_template(messages, chat_template_kwargs={"enable_thinking": switch})


def test_a_switch_needs_a_user_message(tokenizer: Tokenizer) -> None:
    system = [{"role": "system", "content": "be kind"}]
    with pytest.raises(RequestError, match="no message is a user's"):
        tokenizer.apply_chat_template(system, chat_template_kwargs={"enable_thinking": False})


def test_a_template_that_reads_the_switch_gets_it(folder: Path, tmp_path: Path) -> None:
    template = (
        "{{ messages[0].content }}"
        "{% if enable_thinking is defined and not enable_thinking %}</think>"
        "{% else %}<think>{% endif %}"
    )
    tokenizer = with_config(folder, tmp_path, chat_template=template)
    assert tokenizer.apply_chat_template(HI) == "hi<think>"
    off = tokenizer.apply_chat_template(HI, chat_template_kwargs={"enable_thinking": False})
    assert off == "hi</think>"


def test_templates_get_what_they_read_and_nothing_reserved(tokenizer: Tokenizer) -> None:
    given = {"tools": ["t"], "mood": "glad"}
    text = tokenizer.apply_chat_template(
        HI, chat_template="{{ tools[0] }} {{ mood }}", chat_template_kwargs=given
    )
    assert text == "t glad"
    for wrong in ({"messages": HI}, {"add_generation_prompt": True}, ["mood"], {1: 2}):
        with pytest.raises(RequestError, match="chat_template_kwargs"):
            tokenizer.apply_chat_template(HI, chat_template_kwargs=wrong)  # type: ignore[arg-type]


def write_talker(folder: Path, **generation: Any) -> Path:
    """A whole folder of the family without tokenizer.json and without template."""
    data = trained()
    end = sentencepiece.SentencePieceProcessor(model_proto=data).piece_to_id(END)
    config = MODELS["embedded"] | {"vocab_size": 384, "eos_token_id": end}
    write_pieces(write_model(folder, config), model=data, eos_token=None)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_talker(tmp_path_factory.mktemp("talker")), max_model_len=256) as llm:
        yield llm


def test_chats_and_prompts_begin_with_one_begin_token(talker: LLM) -> None:
    tokenizer = talker.get_tokenizer()
    params = SamplingParams(max_tokens=1)
    (plain,) = talker.generate("the dog", params)
    assert plain.prompt_token_ids == tuple(tokenizer.encode("the dog"))
    (chat,) = talker.chat(HI, params, chat_template_kwargs={"enable_thinking": False})
    assert chat.prompt == turn("系统", "") + turn("用户", "hi /no_think") + ASSISTANT
    assert list(chat.prompt_token_ids) == tokenizer.encode_chat(chat.prompt)
    assert chat.prompt_token_ids.count(1) == 1
    stream = talker.stream_chat(HI, params, chat_template_kwargs={"enable_thinking": "auto"})
    list(stream)


def test_the_end_token_ends_an_answer(talker: LLM) -> None:
    end = talker.get_tokenizer().encode(END, add_special_tokens=False)[0]
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    biased = SamplingParams(temperature=0, max_tokens=8, min_tokens=3, logit_bias={end: 100.0})
    (answer,) = talker.chat(HI, biased)
    assert answer.outputs[0].token_ids[-1] == end
    assert len(answer.outputs[0].token_ids) == 4
    assert answer.outputs[0].finish_reason == "stop"
    assert END not in answer.outputs[0].text
    (longer,) = talker.chat(HI, free)
    ids = longer.outputs[0].token_ids
    assert len(ids) == 8
    assert longer.outputs[0].text == talker.get_tokenizer().decode(ids)


@pytest.mark.parametrize("ending", [101, 102])
def test_each_of_several_end_tokens_ends_an_answer(tmp_path: Path, ending: int) -> None:
    folder = write_talker(tmp_path, eos_token_id=[101, 102])
    with LLM(folder, max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, logit_bias={ending: 100.0})
        (answer,) = llm.generate("the dog", params)
    assert answer.outputs[0].token_ids == (ending,)
    assert answer.outputs[0].finish_reason == "stop"


def test_tokenizer_json_wins(tmp_path: Path) -> None:
    folder = write_talker(tmp_path)
    write_words(folder, 384)
    with LLM(folder, max_model_len=64) as llm:
        assert llm.get_tokenizer().encode("w5 w7") == [5, 7]
        assert llm.get_tokenizer().chat_template is None
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.json and no tokenizer.model"):
        LLM(folder)
