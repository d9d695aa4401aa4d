"""Causal attention equals the textbook formula, whatever lies before the new tokens."""

from __future__ import annotations

import pytest
import torch

from torpor.model.attention import attend


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v in float64, one query at a time."""
    q, k, v = q.double(), k.double(), v.double()
    group, before = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    for token in range(q.shape[0]):
        seen = before + token + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group] @ q[token, head] / q.shape[2] ** 0.5
            out[token, head] = scores.softmax(0) @ v[:seen, head // group]
    return out


@pytest.mark.parametrize(("num_new", "num_total"), [(1, 1), (1, 9), (6, 6), (4, 9), (2, 130)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_equals_the_formula(
    num_new: int, num_total: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_new, heads, 8)
    k, v = torch.randn(2, num_total, kv_heads, 8)
    got = attend(q, k, v)
    assert got.shape == q.shape
    torch.testing.assert_close(got.double(), reference(q, k, v), atol=1e-5, rtol=1e-5)


def test_keys_may_be_strided_views_of_a_cache() -> None:
    torch.manual_seed(0)
    cache = torch.randn(2, 32, 2, 8)
    q = torch.randn(3, 4, 8)
    k, v = cache[0, :10], cache[1, :10]
    torch.testing.assert_close(attend(q, k, v), attend(q, k.clone(), v.clone()))


def test_a_later_token_changes_nothing_before_it() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 2, 8)
    before = attend(q, k, v)
    k[4], v[4] = 100.0, -100.0
    after = attend(q, k, v)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])
