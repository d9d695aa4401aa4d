from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.engine.sampling.sampler import (
    LogprobsMode,
    SampledToken,
    SamplingRow,
    child_seed,
    sample_rows,
)
from torpor.errors import RequestError
from torpor.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    forbidden: Collection[int] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar_mask_V: torch.Tensor | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> SampledToken:
    """One row; its error is raised."""
    row = SamplingRow(
        params=params,
        seed=seed,
        position=position,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        forbidden=forbidden,
        bad_words=bad_words,
        grammar_mask_V=grammar_mask_V,
    )
    [result] = sample_rows(logits[None], [row], logprobs_mode=logprobs_mode)
    if isinstance(result, RequestError):
        raise result
    return result


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 2000) -> torch.Tensor:
    """How often each token is drawn over positions 0 to ``count``."""
    ids = [sample(logits, params, seed=5, position=p).token_id for p in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5])
    counts = draw(logits, SamplingParams(), 4000)
    # 5 degrees of freedom: a value above 26 has a probability of about 1e-4.
    assert chi_square(counts, logits.softmax(0)) < 26


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    counts = draw(logits, SamplingParams(temperature=2.0), 4000)
    assert chi_square(counts, (logits / 2).softmax(0)) < 22
    assert chi_square(counts, logits.softmax(0)) > 100


def test_a_draw_is_a_pure_function_of_seed_and_position() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    cases = list(itertools.product(range(5), range(20)))
    first = [sample(logits, SamplingParams(), seed=s, position=p) for s, p in cases]
    torch.rand(100)  # torch's own generator has no say
    again = [sample(logits, SamplingParams(), seed=s, position=p) for s, p in reversed(cases)]
    assert first == again[::-1]
    assert len({token.token_id for token in first}) > 50


def test_a_draw_leaves_the_logits_alone() -> None:
    logits = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2, logprobs=3)
    sample(logits, params, seed=0, position=0, prompt_token_ids=[1], forbidden=[2])
    assert torch.equal(logits, before)


def test_completions_of_one_request_have_seeds_of_their_own() -> None:
    seeds = [child_seed(42, index) for index in range(100)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 100
    assert child_seed(-3, 0) == 2**64 - 3


@pytest.mark.parametrize("places", [(3, 9), (0, 49_151), (17, 18), (40_000, 40_001)])
def test_greedy_ties_go_to_the_lowest_id(places: tuple[int, int]) -> None:
    logits = torch.zeros(49_152)
    logits[list(places)] = 1.0
    assert sample(logits, GREEDY, seed=0, position=0).token_id == places[0]


def test_greedy_does_not_depend_on_the_seed() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = int(logits.argmax())
    assert {sample(logits, GREEDY, seed=s, position=s).token_id for s in range(20)} == {expected}


def test_top_k_keeps_exactly_k_and_ties_by_id() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5])
    counts = draw(logits, SamplingParams(top_k=2), 500)
    assert counts.nonzero().flatten().tolist() == [1, 2]


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2))
    assert draw(logits, SamplingParams(top_k=1), 50)[int(logits.argmax())] == 50


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 10**9])
def test_top_k_of_the_whole_vocabulary_changes_nothing(top_k: int) -> None:
    logits = torch.tensor([0.0, 1.0, 0.3, 0.2, 0.5])
    assert torch.equal(
        draw(logits, SamplingParams(top_k=top_k), 200), draw(logits, SamplingParams(), 200)
    )


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [0]), (0.51, [0, 1]), (0.8, [0, 1]), (0.81, [0, 1, 2]), (1e-9, [0])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    counts = draw(logits, SamplingParams(top_p=top_p), 500)
    assert counts.nonzero().flatten().tolist() == kept


def test_top_p_looks_at_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # Of the first two, renormalised to 4/7 and 3/7, the first alone reaches 0.5.
    counts = draw(logits, SamplingParams(top_k=2, top_p=0.5), 300)
    assert counts.nonzero().flatten().tolist() == [0]


def test_min_p_drops_what_is_far_below_the_likeliest() -> None:
    logits = torch.tensor([0.6, 0.3, 0.06, 0.04], dtype=torch.float64).log()
    counts = draw(logits, SamplingParams(min_p=0.4), 300)
    assert counts.nonzero().flatten().tolist() == [0, 1]


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    counts = draw(logits, SamplingParams(top_k=3), 3000)[:3]
    assert chi_square(counts, torch.tensor([4, 3, 2]) / 9) < 19


def test_repetition_penalty_weakens_both_signs_of_logits() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    tokens = [
        sample(torch.tensor(logits), params, seed=0, position=0, prompt_token_ids=[0]).token_id
        for logits in ([3.0, 1.6], [3.0, 1.4], [-1.0, -1.9], [-1.0, -2.1])
    ]
    assert tokens == [1, 0, 1, 0]


def test_presence_and_frequency_penalties_look_at_the_output_alone() -> None:
    logits = torch.tensor([1.0, 0.0])

    def greedy(output: list[int], **penalties: float) -> int:
        params = SamplingParams(temperature=0, **penalties)  # type: ignore[arg-type]
        token = sample(
            logits,
            params,
            seed=0,
            position=0,
            prompt_token_ids=[0] * 9,
            output_token_ids=output,
        )
        return token.token_id

    assert greedy([], presence_penalty=2.0) == 0
    assert greedy([0], presence_penalty=1.5) == 1
    assert greedy([0], frequency_penalty=0.6) == 0
    assert greedy([0, 0], frequency_penalty=0.6) == 1
    assert greedy([0, 0], presence_penalty=0.6) == 0
    assert greedy([1], presence_penalty=-1.5) == 1


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([5.0, 0.0, 4.0, 1.0])
    tokens = {
        sample(logits, SamplingParams(), seed=0, position=p, forbidden={0, 2}).token_id
        for p in range(200)
    }
    assert tokens == {1, 3}
    assert sample(logits, GREEDY, seed=0, position=0, forbidden=[0]).token_id == 2


def test_forbidding_every_token_is_an_error() -> None:
    with pytest.raises(RequestError, match="min_tokens forbids every token"):
        sample(torch.zeros(3), GREEDY, seed=0, position=4, forbidden=[0, 1, 2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_logits_that_are_not_numbers_are_an_error(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(100)
    logits[[7, 9]] = bad
    with pytest.raises(RequestError, match="2 of 100 logits at position 12 are NaN or inf"):
        sample(logits, params, seed=0, position=12)


def test_logits_without_any_token_are_an_error() -> None:
    with pytest.raises(RequestError, match="every logit at position 1 is -inf"):
        sample(torch.full((4,), -math.inf), GREEDY, seed=0, position=1)


def test_some_impossible_tokens_are_fine() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    params = SamplingParams(top_p=0.9, min_p=0.1, top_k=2, logprobs=3)
    token = sample(logits, params, seed=0, position=0)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs[0].logprob == 0.0


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    expected = logits.log_softmax(0)
    params = SamplingParams(temperature=0.3, top_k=5, presence_penalty=1.0, logprobs=4)
    token = sample(logits, params, seed=1, position=2, output_token_ids=[3])
    assert token.logprobs is not None
    for entry in token.logprobs:
        assert entry.logprob == float(expected[entry.token_id])
        assert entry.rank == int((expected > expected[entry.token_id]).sum()) + 1
    assert token.logprobs[0].token_id == token.token_id
    ranks = {entry.rank for entry in token.logprobs}
    assert {1, 2, 3, 4} <= ranks


def test_zero_logprobs_give_the_sampled_token_alone() -> None:
    token = sample(torch.zeros(5), SamplingParams(logprobs=0), seed=0, position=0)
    assert token.logprobs is not None
    assert [entry.token_id for entry in token.logprobs] == [token.token_id]
    assert sample(torch.zeros(5), SamplingParams(), seed=0, position=0).logprobs is None


def test_equal_logprobs_have_different_ranks_by_id() -> None:
    token = sample(torch.zeros(4), SamplingParams(temperature=0, logprobs=4), seed=0, position=0)
    assert token.logprobs is not None
    assert [(entry.token_id, entry.rank) for entry in token.logprobs] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
    ]


def test_equal_tokens_of_lower_id_rank_before_the_sampled_one() -> None:
    params = SamplingParams(temperature=0, logprobs=0)
    token = sample(torch.zeros(4), params, seed=0, position=0, forbidden=[0, 1])
    assert token.logprobs is not None
    assert (token.token_id, token.logprobs[0].rank) == (2, 3)


def test_half_precision_logits_are_sampled_too() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(4)).bfloat16()
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=2)
    same = sample(logits.float(), params, seed=0, position=0, prompt_token_ids=[1])
    assert sample(logits, params, seed=0, position=0, prompt_token_ids=[1]) == same


VOCABULARY = 300
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {},
    {"temperature": 0.3, "logprobs": 0},
    {"top_k": 5},
    {"top_p": 0.7, "logprobs": 2},
    {"top_k": 40, "top_p": 0.9},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0},
    {"logit_bias": {3: 5.0, 9: -100.0}},
    {"allowed_token_ids": [4, 5, 6, 7]},
]


def some_rows(seed: int, count: int) -> tuple[torch.Tensor, list[SamplingRow]]:
    chosen = random.Random(seed)
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        SamplingRow(
            params=SamplingParams(**chosen.choice(PARAMS)),
            seed=chosen.randrange(2**64),
            position=chosen.randrange(1000),
            prompt_token_ids=[chosen.randrange(VOCABULARY) for _ in range(5)],
            output_token_ids=[chosen.randrange(VOCABULARY) for _ in range(4)],
            forbidden=chosen.choice([(), (1, 2)]),
            grammar_mask_V=chosen.choice([None, torch.arange(VOCABULARY) % 3 > 0]),
        )
        for _ in range(count)
    ]
    return logits, rows


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from(["raw", "processed"]))
def test_a_row_gives_the_same_alone_in_a_batch_and_in_any_order(
    seed: int, count: int, mode: str
) -> None:
    logits, rows = some_rows(seed, count)
    logprobs_mode: Any = f"{mode}_logprobs"
    batch = sample_rows(logits, rows, logprobs_mode=logprobs_mode)
    alone = [
        sample_rows(logits[i : i + 1], [row], logprobs_mode=logprobs_mode)[0]
        for i, row in enumerate(rows)
    ]
    order = random.Random(seed).sample(range(count), count)
    shuffled = sample_rows(logits[order], [rows[i] for i in order], logprobs_mode=logprobs_mode)
    assert batch == alone
    assert shuffled == [batch[i] for i in order]
    assert all(isinstance(result, SampledToken) for result in batch)


def test_a_greedy_batch_takes_each_rows_own_maximum() -> None:
    logits = torch.zeros(4, 50_000)
    for index, token_id in enumerate([49_999, 0, 17, 30_000]):
        logits[index, token_id:] = 1.0
    rows = [SamplingRow(params=GREEDY, seed=0, position=i) for i in range(4)]
    tokens = sample_rows(logits, rows)
    assert tokens == [SampledToken(i, None) for i in (49_999, 0, 17, 30_000)]


def test_no_rows_give_no_tokens() -> None:
    assert sample_rows(torch.zeros(0, 5), []) == []


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_bad_row_fails_alone(params: SamplingParams) -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(5))
    rows = [SamplingRow(params=params, seed=1, position=i) for i in range(4)]
    expected = sample_rows(logits, rows)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    results = sample_rows(logits, rows)
    assert (results[0], results[3]) == (expected[0], expected[3])
    assert isinstance(results[1], RequestError)
    assert "1 of 60 logits at position 1 are NaN or inf" in str(results[1])
    assert isinstance(results[2], RequestError)
    assert "every logit at position 2 is -inf" in str(results[2])


def test_a_row_with_nothing_left_fails_alone() -> None:
    blocked = SamplingRow(params=GREEDY, seed=0, position=0, forbidden=range(5))
    fine = SamplingRow(params=GREEDY, seed=0, position=0)
    results = sample_rows(torch.zeros(2, 5), [blocked, fine])
    assert isinstance(results[0], RequestError)
    assert results[1] == SampledToken(0, None)


def test_a_batch_leaves_the_logits_alone() -> None:
    logits, rows = some_rows(3, 12)
    before = logits.clone()
    sample_rows(logits, rows)
    assert torch.equal(logits, before)


def test_logit_bias_moves_the_logit_before_penalties() -> None:
    logits = torch.tensor([1.0, 0.0, 0.0])
    params = SamplingParams(temperature=0, logit_bias={1: 1.5})
    assert sample(logits, params, seed=0, position=0).token_id == 1
    # 0 + 1.5 is positive, so repetition divides it: 1.5 / 2 < 1.
    params = SamplingParams(temperature=0, logit_bias={1: 1.5}, repetition_penalty=2.0)
    assert sample(logits, params, seed=0, position=0, prompt_token_ids=[1]).token_id == 0


def test_a_bias_cannot_bring_back_a_forbidden_token() -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 100.0}, allowed_token_ids=[1, 2])
    assert sample(torch.tensor([9.0, 0.0, 1.0]), params, seed=0, position=0).token_id == 2


def test_only_allowed_tokens_are_drawn() -> None:
    params = SamplingParams(allowed_token_ids=[3, 1])
    logits = torch.tensor([5.0, 0.0, 4.0, 1.0])
    tokens = {sample(logits, params, seed=0, position=p).token_id for p in range(100)}
    assert tokens == {1, 3}
    params = SamplingParams(temperature=0, allowed_token_ids=[3, 1])
    assert sample(logits, params, seed=0, position=0).token_id == 3


def test_a_bad_word_is_blocked_at_its_last_token() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def greedy(output: list[int]) -> int:
        words = ((1, 3), (2,))
        token = sample(logits, GREEDY, seed=0, position=0, output_token_ids=output, bad_words=words)
        return token.token_id

    assert greedy([]) == 3
    assert greedy([1]) == 1
    assert greedy([1, 0]) == 3
    assert greedy([0, 1]) == 1


def test_a_grammar_mask_limits_the_draw() -> None:
    mask = torch.tensor([False, True, False, True])
    logits = torch.tensor([5.0, 0.0, 4.0, 1.0])
    drawn = {
        sample(logits, SamplingParams(), seed=0, position=p, grammar_mask_V=mask).token_id
        for p in range(100)
    }
    assert drawn == {1, 3}


@pytest.mark.parametrize(
    ("arguments", "params", "named"),
    [
        ({"grammar_mask_V": torch.zeros(3, dtype=torch.bool)}, {}, "structured_outputs forbids"),
        (
            {"forbidden": [1]},
            {"allowed_token_ids": [1]},
            "allowed_token_ids and min_tokens together forbid",
        ),
        ({"bad_words": ((0,), (1,), (2,))}, {}, "bad_words forbids"),
        (
            {"bad_words": ((2,),), "grammar_mask_V": torch.tensor([False, False, True])},
            {"temperature": 0},
            "bad_words and structured_outputs together forbid",
        ),
    ],
)
def test_what_forbids_every_token_is_named(
    arguments: dict[str, Any], params: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        sample(torch.zeros(3), SamplingParams(**params), seed=0, position=0, **arguments)


def test_processed_logprobs_are_those_of_what_is_drawn_from() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    params = SamplingParams(temperature=2.0, top_k=3, logprobs=4, logit_bias={2: 3.0})
    token = sample(logits, params, seed=0, position=0, logprobs_mode="processed_logprobs")
    kept = (torch.tensor([2.0, 1.0, 3.0]) / 2).log_softmax(0).tolist()
    assert token.logprobs is not None
    found = {entry.token_id: entry.logprob for entry in token.logprobs}
    assert found == pytest.approx({0: kept[0], 1: kept[1], 2: kept[2]}, abs=1e-6)
    ranks = {entry.token_id: entry.rank for entry in token.logprobs}
    assert ranks == {2: 1, 0: 2, 1: 3}


def test_processed_logprobs_of_greedy_rows_keep_the_temperature_out() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    plain = SamplingParams(temperature=0, logprobs=0)
    changed = SamplingParams(temperature=0, logprobs=0, logit_bias={1: 2.0})
    for params, expected in ((plain, logits), (changed, torch.tensor([2.0, 3.0, 0.0]))):
        token = sample(logits, params, seed=0, position=0, logprobs_mode="processed_logprobs")
        assert token.logprobs is not None
        assert token.logprobs[0].logprob == float(expected.log_softmax(0).max())


def test_the_whole_vocabulary_can_be_asked_for() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6))
    token = sample(logits, SamplingParams(logprobs=-1), seed=0, position=0)
    assert token.logprobs is not None
    assert {entry.token_id for entry in token.logprobs} == set(range(40))
    assert sorted(entry.rank for entry in token.logprobs) == list(range(1, 41))
