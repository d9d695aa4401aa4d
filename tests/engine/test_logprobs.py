from __future__ import annotations

import math

import pytest
import torch

from torpor.engine.sampling.logprobs import RankedToken, prompt_logprobs, ranked_tokens


def some_logits(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("count", [0, 1, 5, 29, 30, 31, -1])
def test_the_asked_token_comes_first_then_the_likeliest_by_rank(count: int) -> None:
    [logits] = some_logits(1, 30)
    expected = logits.log_softmax(0)
    order = expected.argsort(descending=True).tolist()
    for token_id in (order[0], order[3], order[-1]):
        tokens = ranked_tokens(logits, token_id, count)
        assert tokens[0] == RankedToken(
            token_id, float(expected[token_id]), order.index(token_id) + 1
        )
        listed = order if count == -1 else order[:count]
        assert [t.token_id for t in tokens[1:]] == [i for i in listed if i != token_id]
        assert all(t.logprob == float(expected[t.token_id]) for t in tokens)
        assert all(order[t.rank - 1] == t.token_id for t in tokens)


def test_tokens_of_probability_zero_are_left_out() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf])
    assert {token.token_id for token in ranked_tokens(logits, 0, -1)} == {0, 2}


def test_prompt_logprobs_speak_of_the_token_that_follows() -> None:
    logits = some_logits(3, 20)
    entries = prompt_logprobs(logits, [4, 0, 19], 2)
    assert [tokens[0].token_id for tokens in entries] == [4, 0, 19]
    for row, tokens in zip(logits, entries, strict=True):
        assert tokens == ranked_tokens(row, tokens[0].token_id, 2)


def test_prompt_logits_with_nan_give_the_token_alone() -> None:
    logits = some_logits(2, 20)
    logits[1, 3] = math.nan
    fine, bad = prompt_logprobs(logits, [4, 5], 3)
    assert len(fine) >= 3
    assert (len(bad), bad[0].token_id, bad[0].rank) == (1, 5, 1)
    assert math.isnan(bad[0].logprob)
