from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.engine.sampler import child_seed, gumbel_noise, sample, uniform_noise
from torpor.errors import RequestError
from torpor.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 2000) -> torch.Tensor:
    """How often each token is drawn over positions 0 to ``count``."""
    ids = [sample(logits, params, seed=5, position=p).token_id for p in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def reference_uniform(seed: int, position: int, index: int) -> float:
    """The definition in exact integers: splitmix64 from a key of seed and position."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z &= mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    key = mix(mix(seed) + (position + 1) * gamma)
    return ((mix(key + (index + 1) * gamma) >> 12) + 0.5) / 2**52


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(1, 70))
def test_noise_is_the_hash_it_is_defined_to_be(seed: int, position: int, size: int) -> None:
    expected = [reference_uniform(seed, position, index) for index in range(size)]
    assert uniform_noise(seed, position, size).tolist() == expected


def test_noise_of_an_index_does_not_depend_on_the_vocabulary_size() -> None:
    assert torch.equal(uniform_noise(1, 2, 50_000)[:100], uniform_noise(1, 2, 100))


def test_splitmix64_gives_its_published_first_value() -> None:
    # The first output of the generator with state 0, as in its author's test vectors.
    from torpor.engine import sampler

    assert sampler._mix(sampler._GAMMA) == 0xE220A8397B1DCDAF


def test_uniform_noise_is_uniform_and_stays_inside_the_open_interval() -> None:
    noise = torch.cat([uniform_noise(seed, p, 1000) for seed in range(10) for p in range(20)])
    assert 0 < noise.min() < 1e-4
    assert 1 - 1e-4 < noise.max() < 1
    counts = torch.histc(noise, bins=100, min=0, max=1)
    # 99 degrees of freedom: a value above 160 has a probability of about 1e-4.
    assert chi_square(counts, torch.full((100,), 0.01)) < 160


@pytest.mark.parametrize("shift", ["position", "index", "seed"])
def test_neighbouring_noise_is_independent(shift: str) -> None:
    rows = torch.stack([uniform_noise(7 + (shift == "seed") * i, i, 400) for i in range(200)])
    if shift == "seed":
        rows = torch.stack([uniform_noise(seed, 3, 400) for seed in range(200)])
    first, second = (rows[:, :-1], rows[:, 1:]) if shift == "index" else (rows[:-1], rows[1:])
    cells = (first * 8).long() * 8 + (second * 8).long()
    counts = torch.bincount(cells.flatten(), minlength=64)
    # 63 degrees of freedom: a value above 115 has a probability of about 1e-4.
    assert chi_square(counts, torch.full((64,), 1 / 64)) < 115


def test_gumbel_noise_is_finite() -> None:
    assert all(torch.isfinite(gumbel_noise(seed, 0, 50_000)).all() for seed in range(20))


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
