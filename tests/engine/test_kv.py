from __future__ import annotations

import pytest
import torch

from torpor.engine.kv import KVCache


def cache(num_layers: int = 2, capacity: int = 6) -> KVCache:
    return KVCache(torch.zeros(num_layers, 2, capacity, 3, 4))


def rows(num_tokens: int, value: float) -> torch.Tensor:
    return torch.full((num_tokens, 3, 4), value)


def test_append_returns_everything_so_far_per_layer() -> None:
    kv = cache()
    for layer in range(2):
        keys, values = kv.append(layer, rows(2, 1.0 + layer), rows(2, -1.0 - layer))
        assert torch.equal(keys, rows(2, 1.0 + layer))
        assert torch.equal(values, rows(2, -1.0 - layer))
    kv.advance(2)
    keys, values = kv.append(1, rows(1, 7.0), rows(1, 8.0))
    assert keys.tolist() == [*rows(2, 2.0).tolist(), *rows(1, 7.0).tolist()]
    assert values.tolist() == [*rows(2, -2.0).tolist(), *rows(1, 8.0).tolist()]


def test_append_returns_views_of_the_one_tensor() -> None:
    memory = torch.zeros(2, 2, 6, 3, 4)
    keys, values = KVCache(memory).append(1, rows(2, 1.0), rows(2, 2.0))
    assert keys.data_ptr() == memory[1, 0].data_ptr()
    assert values.data_ptr() == memory[1, 1].data_ptr()
    assert memory[0].abs().sum() == 0


def test_a_step_that_was_not_counted_is_written_over() -> None:
    kv = cache()
    kv.append(0, rows(3, 1.0), rows(3, 1.0))
    keys, _ = kv.append(0, rows(1, 2.0), rows(1, 2.0))
    assert torch.equal(keys, rows(1, 2.0))
    assert kv.length == 0


def test_rewind_and_reset_forget_positions() -> None:
    kv = cache()
    kv.append(0, rows(4, 1.0), rows(4, 1.0))
    kv.advance(4)
    kv.rewind(2)
    keys, _ = kv.append(0, rows(1, 2.0), rows(1, 2.0))
    assert keys[:, 0, 0].tolist() == [1.0, 1.0, 2.0]
    kv.reset()
    assert kv.length == 0


def test_going_past_the_end_is_a_broken_invariant() -> None:
    kv = cache(capacity=3)
    kv.append(0, rows(3, 1.0), rows(3, 1.0))
    kv.advance(3)
    with pytest.raises(AssertionError, match="4 positions in a KV cache of 3"):
        kv.append(0, rows(1, 1.0), rows(1, 1.0))
    with pytest.raises(AssertionError, match="rewind"):
        kv.rewind(4)


def test_size_is_that_of_the_tensor() -> None:
    kv = cache(num_layers=2, capacity=6)
    assert (kv.capacity, kv.nbytes) == (6, 2 * 2 * 6 * 3 * 4 * 4)
    assert kv.device == torch.device("cpu")
