"""The products under attention, whichever way they are computed."""

from __future__ import annotations

import pytest
import torch

from torpor.model.attention.partial import (
    HIDDEN,
    _plain,
    attend_pairs,
    attend_pairs_fused,
    attend_tokens,
    fused,
    merge,
)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Results and log-sum-exps agree to float32's rounding."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_other_devices_compute_the_same(causal: bool, masked: bool) -> None:
    q, k, v = (drawn(2, 3, 5, 8, seed=seed) for seed in range(3))
    mask = None
    if masked:
        mask = torch.zeros(2, 1, 5, 5)
        mask[0, :, :, 3:] = HIDDEN
    close(
        _plain(q, k, v, 0.3, mask, causal=causal),
        fused(q, k, v, 0.3, mask, causal=causal),
    )


def test_one_token_of_each_row_is_the_last_of_many() -> None:
    q, k, v = drawn(7, 6, 16), drawn(7, 2, 16, seed=1), drawn(7, 2, 24, seed=2)
    out_THD, lse_TH = attend_tokens(q, k, v, 0.25, causal=True)
    for attend in (attend_pairs, attend_pairs_fused):
        out, lse = attend(
            q[-1].view(2, 3, 16), k.transpose(0, 1), v.transpose(0, 1), 0.25, None, with_lse=True
        )
        assert lse is not None
        close((out.reshape(6, 24), lse.reshape(6)), (out_THD[-1], lse_TH[-1]))


def test_merging_parts_equals_the_whole() -> None:
    q, k, v = drawn(4, 6, 16), drawn(9, 3, 16, seed=1), drawn(9, 3, 16, seed=2)
    whole = attend_tokens(q, k, v, 0.25)
    parts = [attend_tokens(q, k[part], v[part], 0.25) for part in (slice(0, 2), slice(2, 9))]
    close(merge(*parts[0], *parts[1]), whole)


def test_a_part_that_is_all_hidden_counts_for_exactly_nothing() -> None:
    q, k, v = drawn(4, 2, 16), drawn(5, 2, 16, seed=1), drawn(5, 2, 16, seed=2)
    seen = attend_tokens(q, k, v, 0.25)
    hidden = attend_tokens(q, k, v, 0.25, mask_TS=torch.full((4, 5), HIDDEN))
    for merged in (merge(*seen, *hidden), merge(*hidden, *seen)):
        assert torch.equal(merged[0], seen[0])
        assert torch.equal(merged[1], seen[1])
