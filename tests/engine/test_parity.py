"""Whatever the schedule, the engine's log probabilities and tokens are those of transformers.

Tolerance: float32 log probabilities differ by at most 1e-5 of the largest logit. A greedy token may
differ from the reference's only where the reference's two largest logits are closer than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tests.model.helpers import (
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TINY,
    random_weights,
    reference,
    write_folder,
)
from tests.openpangu.models import MODELS

from torpor.engine.llm import LLM
from torpor.model.config.config import ARCHITECTURES
from torpor.outputs import Logprob, RequestOutput
from torpor.params import SamplingParams

VOCAB = 96
NUM_TOKENS = 10
MOE = {**QWEN3_MOE, "head_dim": 8, "num_experts": 6, "norm_topk_prob": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 6}
HALF = {**QWEN2, **SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
KINDS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral, window": {**MISTRAL, "sliding_window": 11},
    "qwen2": {**QWEN2, "tie_word_embeddings": False},
    "qwen2, one layer slides": HALF,
    "qwen3": {**QWEN3, "head_dim": 10},
    "qwen3 moe": MOE,
}
FULL: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 17}
"""Just enough blocks for one sequence of 64 tokens."""
CASES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "block size 1": {"block_size": 1, "max_num_batched_tokens": 24},
    "block size 8": {"block_size": 8},
    "full cache": FULL,
    "full cache, chunks": {**FULL, "max_num_batched_tokens": 19},
    "invariant": {"batch_invariant": True},
    "invariant, full cache, chunks": {
        **FULL,
        "batch_invariant": True,
        "max_num_batched_tokens": 19,
    },
}


def some_prompts() -> list[list[int]]:
    """Of 1 to 48 tokens, out of order; some begin alike, by more and by less than a block."""
    ids = torch.randint(3, VOCAB, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    other = ids[::-1]
    return [
        ids[:30],
        ids[:1],
        [*ids[:20], *other[:6]],
        ids,
        other[:9],
        [*ids[:16], *other[:2]],
        ids[5:7],
        [*other[:18], *ids[:11]],
        ids[10:15],
    ]


PROMPTS = some_prompts()


def params(**options: Any) -> SamplingParams:
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return SamplingParams(**{"logprobs": -1, **options})


MANY = [*PROMPTS, *(PROMPTS[3][start : start + 5] for start in range(15, 40, 5))]
"""More than fit at a time, even where a window gives blocks back."""
MIXED = [params(prompt_logprobs=-1 if i % 2 else None) for i in range(len(MANY))]
"""Prompts whose log probabilities are wanted are never served from the prefix cache."""


@dataclass
class Model:
    """A folder, and what transformers says about it."""

    folder: Path
    theirs: Any
    _logits: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _tokens: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T, V] of one sequence, in one go."""
        key = tuple(ids)
        if key not in self._logits:
            self._logits[key] = self.theirs(torch.tensor([ids])).logits[0].float()
        return self._logits[key]

    def generated(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The greedy completion, alone and with their cache."""
        key = tuple(prompt)
        if key not in self._tokens:
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": 0}
            out = self.theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            self._tokens[key] = tuple(out[0, len(prompt) :].tolist())
        return self._tokens[key]


def write_words(folder: Path) -> None:
    """A tokenizer of one word per id."""
    words = {f"w{index}": index for index in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = {**KINDS[request.param], "eos_token_id": None}
    folder = write_folder(tmp_path_factory.mktemp("parity"), **config)
    write_words(folder)
    # Three times the usual weights: attention that looks at something, texts that vary.
    weights = random_weights({**TINY, **config})
    large = {name: w if "norm" in name else 3 * w for name, w in weights.items()}
    save_file(large, folder / "model.safetensors", metadata={"format": "pt"})
    return Model(folder, reference(folder))


def whole(entries: Sequence[dict[int, Logprob] | None]) -> torch.Tensor:
    """Log probabilities [T, V] of every token at every position."""
    rows = []
    for entry in entries:
        assert entry is not None
        assert len(entry) == VOCAB
        rows.append([entry[token_id].logprob for token_id in range(VOCAB)])
    return torch.tensor(rows)


def deviation(model: Model, output: RequestOutput) -> float:
    """The largest one of any log probability, in units of the largest logit."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    assert completion.logprobs is not None
    logits = model.logits([*prompt, *completion.token_ids])
    want = logits.double().log_softmax(1)
    got = whole(completion.logprobs)
    worst = (got - want[len(prompt) - 1 : -1]).abs().max()
    if output.prompt_logprobs is not None and len(prompt) > 1:
        assert output.prompt_logprobs[0] is None
        got = whole(output.prompt_logprobs[1:])
        worst = worst.maximum((got - want[: len(prompt) - 1]).abs().max())
    return float(worst / logits.abs().max())


@torch.inference_mode()
def own_deviation(exact: Model, theirs: Any, output: RequestOutput) -> float:
    """The same of the reference in another precision."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    logits = exact.logits(ids)
    got = theirs(torch.tensor([ids])).logits[0].double().log_softmax(1)
    worst = (got - logits.double().log_softmax(1))[:-1].abs().max()
    return float(worst / logits.abs().max())


def first_difference(model: Model, output: RequestOutput) -> str | None:
    """Where greedy tokens part from the reference's without a tie; None when nowhere."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    expected = model.generated(prompt)
    assert len(tokens) == len(expected) == NUM_TOKENS
    for index, pair in enumerate(zip(tokens, expected, strict=True)):
        if pair[0] != pair[1]:
            logits = model.logits([*prompt, *expected])[len(prompt) + index - 1]
            top, second = logits.topk(2).values.tolist()
            chosen = float(logits[pair[0]])
            tie = 1e-5 * float(logits.abs().max())
            tied = top - second <= tie and top - chosen <= tie
            return None if tied else f"token {index}: {pair}, {top - chosen} below the best"
    return None


def check(model: Model, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        name = f"prompt of {len(output.prompt_token_ids)} tokens"
        assert deviation(model, output) <= 1e-5, name
        assert first_difference(model, output) is None, name


def num_preemptions(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs if output.metrics)


def test_every_architecture_is_tested() -> None:
    tested = {str(kind.get("architectures", TINY["architectures"])) for kind in KINDS.values()}
    others = {str(model["architectures"]) for model in MODELS.values()}  # see tests/openpangu
    assert tested | others == {str([name]) for name in ARCHITECTURES}


def test_the_reference_has_something_to_say(model: Model) -> None:
    texts = [model.generated(prompt) for prompt in PROMPTS]
    assert len(set(texts)) == len(texts)
    assert len({token for text in texts for token in text}) > 10
    assert model.logits(PROMPTS[0]).abs().max() > 1


@pytest.mark.parametrize("case", CASES)
def test_any_schedule_gives_their_log_probabilities_and_tokens(model: Model, case: str) -> None:
    with LLM(model.folder, max_model_len=64, max_logprobs=-1, **CASES[case]) as llm:
        prompts = MANY if "full" in case else PROMPTS
        outputs = llm.generate(prompts, MIXED[: len(prompts)])
        llm.cache.check()
    check(model, outputs)
    assert (num_preemptions(outputs) > 0) == ("full" in case)


def test_one_prompt_after_another(model: Model) -> None:
    with LLM(model.folder, max_model_len=64, max_logprobs=-1) as llm:
        outputs = [llm.generate([prompt], MIXED[1])[0] for prompt in PROMPTS]
    check(model, outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_bits_are_the_same_alone_and_in_a_crowd(model: Model, dtype: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 64, "batch_invariant": True}
    chosen = [SamplingParams(seed=4, logprobs=9, prompt_logprobs=9, max_tokens=8)] * len(MANY)
    with LLM(model.folder, **options, max_logprobs=-1) as llm:
        alone = [llm.generate([prompt], chosen[0])[0] for prompt in MANY]
    with LLM(model.folder, **options, **FULL, max_num_batched_tokens=19) as llm:
        crowd = llm.generate(MANY, chosen)
    assert num_preemptions(crowd) > 0
    for one, other in zip(alone, crowd, strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize(("block_size", "batch_invariant"), [(4, False), (16, False), (1, True)])
def test_prefix_hits(model: Model, block_size: int, batch_invariant: bool) -> None:
    options: dict[str, Any] = {"block_size": block_size, "batch_invariant": batch_invariant}
    with LLM(model.folder, max_model_len=64, max_logprobs=-1, **options) as llm:
        cold = llm.generate(PROMPTS, params())
        warm = llm.generate(PROMPTS, params())
        longer = [[*out.prompt_token_ids, *out.outputs[0].token_ids][:54] for out in cold]
        turns = llm.generate(longer, params())
    for prompt, output in zip([*PROMPTS, *longer], [*warm, *turns], strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
    check(model, [*warm, *turns])


@pytest.mark.parametrize(
    ("dtype", "batch_invariant"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
)
def test_half_precision_is_as_close_to_the_exact_answer_as_theirs(
    model: Model, dtype: torch.dtype, batch_invariant: bool
) -> None:
    """Exact is float32 with the same rounded weights. The measure is the mean, over prompts, of the
    largest deviation: a single maximum is luck, and an expert more or less is a leap."""
    theirs = reference(model.folder, dtype)
    exact = Model(model.folder, reference(model.folder, dtype).float())
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": batch_invariant, **FULL}
    with LLM(model.folder, max_model_len=64, max_logprobs=-1, **options) as llm:
        outputs = llm.generate(MANY, MIXED)
    assert num_preemptions(outputs) > 0
    their_worst = [own_deviation(exact, theirs, output) for output in outputs]
    our_worst = [deviation(exact, output) for output in outputs]
    assert 0 < sum(our_worst) <= 1.5 * sum(their_worst)
