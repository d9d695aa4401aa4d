"""The engine on the embedded model: a real tokenizer, a real template, real answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torpor
from torpor.engine.llm import LLM
from torpor.engine.text import Tokenizer
from torpor.model.files import ModelFiles
from torpor.model.resolve import resolve_model
from torpor.params import SamplingParams

pytestmark = pytest.mark.embedded

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&\n\n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "日本語 🙂"},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "wizard", "content": "  spaces  "}],
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", max_model_len=256) as made:
        made.sleep(1)  # opens the spill file, which then belongs to no single test
        made.wake_up()
        yield made


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(files.folder)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c[-1]["content"][:10])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_template_renders_as_in_transformers(
    llm: LLM, reference: Any, conversation: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    ours = llm.get_tokenizer().apply_chat_template(
        conversation, add_generation_prompt=add_generation_prompt
    )
    theirs = reference.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs
    ids = reference.apply_chat_template(
        conversation, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert llm.get_tokenizer().encode(ours, add_special_tokens=False) == ids


TEMPLATES = [
    "{%- for m in messages %}\n  {{- m.role | upper }}: {{ m.content | trim }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ bos_token }}{{ eos_token }}{{ messages | tojson(indent=2) }}",
    "{{ messages | tojson }}{% if tools is none %}no tools{% endif %}"
    "{% if x is defined %}x{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}.",
    "{% for m in messages if m['role'] != 'system' %}\n{% if loop.last %}\n{{ m['content'] }}"
    "{% endif %}\n    {% endfor %}\n",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c[-1]["content"][:10])
def test_other_templates_render_as_in_transformers(
    llm: LLM, reference: Any, conversation: list[dict[str, Any]], template: str
) -> None:
    ours = llm.get_tokenizer().apply_chat_template(conversation, chat_template=template)
    theirs = reference.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, chat_template=template
    )
    assert ours == theirs


def test_tokens_of_text_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    text = "Hello, wörld! 12345 日本語 🙂\n\n\t<|im_start|>user"
    ours = llm.get_tokenizer()
    assert ours.encode(text) == reference(text)["input_ids"]
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)


def test_a_known_text_goes_on_as_known(llm: LLM) -> None:
    (output,) = llm.generate("The sky is blue because", GREEDY)
    completion = output.outputs[0]
    expected = (282, 260, 970, 260, 1205, 3323, 41993, 357, 30, 378, 2380)
    assert completion.token_ids[: len(expected)] == expected
    assert completion.text.startswith(" of the way the human eye perceives it. The color")


def test_a_question_gets_its_answer_and_an_end(llm: LLM) -> None:
    question = "What is the capital of France? Answer in one sentence."
    (output,) = llm.chat([{"role": "user", "content": question}], GREEDY)
    completion = output.outputs[0]
    assert completion.text == "The capital of France is Paris."
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == llm.get_tokenizer().eos_token_id


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_bit_equal_after_sleep(llm: LLM, level: int) -> None:
    params = [GREEDY, SamplingParams(seed=5, max_tokens=8, top_p=0.9, logprobs=2)]
    prompts = ["Once upon a time", "The sky is blue because"]
    expected = [output.outputs for output in llm.generate(prompts, params)]
    llm.sleep(level)
    report = llm.wake_up()
    assert report.verified == report.total_verifiable > 0
    assert [output.outputs for output in llm.generate(prompts, params)] == expected


def test_loading_and_chatting_never_import_transformers_or_gguf() -> None:
    code = (
        "import sys; from torpor.engine.llm import LLM; from torpor.params import SamplingParams\n"
        "with LLM('smollm2', max_model_len=64) as llm:\n"
        "    llm.chat([{'role': 'user', 'content': 'Hi'}], SamplingParams(max_tokens=1))\n"
        "print({'transformers', 'gguf', 'typer', 'rich', 'sympy'} & set(sys.modules))"
    )
    source = str(Path(torpor.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_tokenizer_stands_alone(files: ModelFiles) -> None:
    assert files.tokenizer_json is not None
    tokenizer = Tokenizer(files.tokenizer_json, files.tokenizer_config_json, files.chat_template)
    assert tokenizer.vocab_size == files.config.vocab_size
