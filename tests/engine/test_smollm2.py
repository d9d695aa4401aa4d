"""The engine on the embedded model: a real tokenizer, a real template, real answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.helpers import reference as reference_model
from tests.model.native_kernels import native_library

import torpor
from torpor.engine.llm import LLM
from torpor.engine.text.tokenizer import Tokenizer
from torpor.model.checkpoints.files import ModelFiles
from torpor.model.checkpoints.resolve import resolve_model
from torpor.outputs import RequestOutput
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


# -- many prompts -------------------------------------------------------------------------------

STORY = (
    "In a small town by the sea there lived a clockmaker who never slept. Every evening, when the "
    "lamps along the harbour were lit, she wound the great clock in the tower and listened to it "
    "count the hours until dawn. Sailors said that ships found their way home by its bell, and "
    "children believed that if it ever stopped, the tide would stop too. One winter night the snow "
    "fell so thick that the bell could not be heard beyond the market square, and the clockmaker, "
    "for the first time in forty years, put down her tools, closed her eyes and dreamed. She "
    "dreamed of a machine that forgot everything at dusk and remembered it all at daybreak, down "
    "to the last grain of sand. When she woke, the clock had gone on without her, and on her bench "
    "lay a tiny wheel of brass that she had never seen before. She turned it over in the light and"
)
TEXTS = [
    "The",
    STORY,
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    STORY[:500],
    "Water boils at",
    "The three primary colours are red, blue and",
    STORY[:330],
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de la France est",
    STORY[:68],
    "Question: Why do cats purr?\nAnswer:",
    "import numpy as np\n\nx = np.",
    "日本の首都は",
    f"{STORY[:200]} Then everything changed, because",
    "!",
    "To be, or not to be, that is the question: Whether",
    "<|im_start|>user\nName a planet.<|im_end|>\n<|im_start|>assistant\n",
    "An apple a day keeps the doctor away. A stitch in time saves nine. Birds of a feather",
    STORY[:612],
]
"""Of 1 to about 200 tokens; the longer ones begin alike."""
LONG = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def batch(llm: LLM) -> list[RequestOutput]:
    """All texts in one batch, on an empty prefix cache."""
    llm.reset_prefix_cache()
    return llm.generate(TEXTS, LONG)


@pytest.fixture(scope="module")
def theirs(files: ModelFiles) -> Any:
    """The model in transformers. Without an end token nothing ends early."""
    model: Any = reference_model(files.folder)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
@torch.inference_mode()
def their_logits(theirs: Any, batch: list[RequestOutput]) -> list[torch.Tensor]:
    """Per text, the logits [tokens, vocabulary] from which the reference would draw each token of
    the batch, after those before it."""
    found = []
    for output in batch:
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        found.append(theirs(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].clone())
    return found


def tie_of(logits: torch.Tensor) -> torch.Tensor:
    """Per row, how close two logits are whose order is left to rounding."""
    return 1e-5 * logits.abs().amax(-1)


def test_tokens_of_a_batch_are_those_of_transformers_one_by_one(
    batch: list[RequestOutput], their_logits: list[torch.Tensor]
) -> None:
    """Each token is the reference's own next one after those before it: by induction the same text
    as its greedy generation, but for ties."""
    lengths = [len(output.prompt_token_ids) for output in batch]
    assert (min(lengths), len(lengths)) == (1, 20)
    assert max(lengths) > 180
    for output, logits in zip(batch, their_logits, strict=True):
        tokens = output.outputs[0].token_ids
        tie = tie_of(logits)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(1) - chosen <= tie).all(), output.prompt
        pairs = zip(output.outputs[0].logprobs or (), tokens, strict=True)
        ours = torch.tensor([entry[token].logprob for entry, token in pairs])
        assert ((ours - (chosen - logits.logsumexp(1))).abs() <= tie).all(), output.prompt


def test_tokens_of_a_batch_are_those_of_transformers_generate(
    theirs: Any, batch: list[RequestOutput]
) -> None:
    for output in (batch[0], batch[3]):
        ids = torch.tensor([output.prompt_token_ids])
        options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert output.outputs[0].token_ids == tuple(out[0, ids.shape[1] :].tolist())


def test_each_text_alone_goes_on_as_in_the_batch(
    llm: LLM, batch: list[RequestOutput], their_logits: list[torch.Tensor]
) -> None:
    """Every token of every text, but for what follows a tie."""
    for text, output, logits in zip(TEXTS, batch, their_logits, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate(text, LONG)
        assert alone.num_cached_tokens == 0
        ours, together = alone.outputs[0].token_ids, output.outputs[0].token_ids
        assert len(ours) == len(together) == LONG.max_tokens
        different = [at for at in range(len(ours)) if ours[at] != together[at]]
        if different:
            row = logits[different[0]]
            assert row.max() - row[ours[different[0]]] <= tie_of(row), text


MANY = (1, 10, 0, 2, 3, 5, 6)


# Two threads wait for each other at every product when the machine is busy: little work for them.
@pytest.mark.parametrize(
    ("dtype", "num_threads", "indices"),
    [
        ("float32", 1, MANY),
        ("bfloat16", 1, MANY),
        pytest.param("float32", 2, (3, 0), marks=pytest.mark.slow),
    ],
)
def test_batch_invariant_bits_at_real_sizes(
    dtype: str, num_threads: int, indices: tuple[int, ...]
) -> None:
    params = SamplingParams(seed=1, max_tokens=2, ignore_eos=True, logprobs=3)
    chosen = [TEXTS[index] for index in indices]
    options: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "max_model_len": 256}
    with LLM("smollm2", **options, batch_invariant=True) as llm:
        expected = [llm.generate(text, params)[0].outputs for text in chosen]
        hits = llm.generate(chosen, params)
        assert hits[0].num_cached_tokens
        assert [output.outputs for output in hits] == expected
        llm.reset_prefix_cache()
        crowd = llm.generate(chosen[::-1], params)[::-1]
        assert [output.outputs for output in crowd] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_kernels_give_the_same_bits_in_any_company(dtype: str) -> None:
    """Without `batch_invariant`: alone, in a batch and with its prompt in chunks."""
    native_library()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    chosen = [" ".join(TEXTS[index] for index in MANY), *(TEXTS[index] for index in MANY)]
    chosen += [f"{number} and" for number in range(14)]
    options: dict[str, Any] = {"dtype": dtype, "num_threads": 1, "max_model_len": 512}
    options |= {"cpu_kernels": "native", "enable_prefix_caching": False}
    with LLM("smollm2", **options) as llm:
        expected = [llm.generate(text, params)[0].outputs for text in chosen]
        assert [output.outputs for output in llm.generate(chosen, params)] == expected
    with LLM("smollm2", **options, max_num_batched_tokens=50) as llm:
        crowd = llm.generate(chosen[::-1], params)[::-1]
    assert [output.outputs for output in crowd] == expected


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
