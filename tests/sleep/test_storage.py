"""Storages as memory: who can move, how much it is, and moving every alias."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.sleep.samples import Opaque, Wrapper, bits
from torch import nn

from torpor.sleep.storage import (
    aliases_by_storage,
    alive,
    living_tensors,
    nbytes_of,
    plain_tensors,
    rebind,
    refusal,
    relocate,
    storage_of,
    swap_available,
    weak,
)

CPU = torch.device("cpu")


def a_wrapper() -> Wrapper:
    return Wrapper(torch.arange(6, dtype=torch.int8), torch.tensor(0.5))


def test_bytes_of_sparse_tensors_are_those_they_hold() -> None:
    dense = torch.zeros(1000, 1000)
    dense[3, 4] = dense[7, 8] = 1.0
    coo = dense.to_sparse()
    assert nbytes_of(coo) == 2 * (8 + 8 + 4)
    with pytest.warns(UserWarning, match="beta state"):
        csr = dense.to_sparse_csr()
    assert nbytes_of(csr) == 1001 * 8 + 2 * 8 + 2 * 4
    assert nbytes_of(dense) == 4_000_000


def test_a_parameter_that_is_not_initialised_has_no_bytes_and_no_storage() -> None:
    lazy = nn.LazyLinear(3).weight
    assert nbytes_of(lazy) == 0
    assert storage_of(lazy) is None


def test_a_wrapper_is_its_inner_tensors() -> None:
    tensor = a_wrapper()
    found = dict(plain_tensors("weight", tensor))
    assert found == {"weight.inner": tensor.inner, "weight.scale": tensor.scale}
    assert dict(plain_tensors("x", tensor.inner)) == {"x": tensor.inner}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo has no single storage"),
        (lambda: torch.eye(3, device="meta"), "lives on meta, not on cpu"),
        (lambda: Opaque(torch.ones(3)), "Opaque has no storage that can be moved"),
        (lambda: nn.LazyLinear(3).weight, "not initialised yet; run a forward"),
    ],
    ids=["sparse", "meta", "opaque", "lazy"],
)
def test_what_cannot_move_says_why(make: Callable[[], torch.Tensor], reason: str) -> None:
    found = refusal(make(), CPU)
    assert found is not None
    assert re.search(reason, found)


def test_ordinary_and_empty_tensors_can_move() -> None:
    for tensor in (torch.ones(3), torch.empty(0), torch.ones(()), torch.ones(4, 4).T):
        assert refusal(tensor, CPU) is None


def test_a_weak_reference_finds_its_storage_while_it_lives() -> None:
    tensor = torch.ones(3)
    reference = weak(tensor.untyped_storage())
    found = alive(reference)
    assert found is not None
    assert found.data_ptr() == tensor.data_ptr()
    del found, tensor
    assert alive(reference) is None


def test_living_tensors_are_found_without_running_their_code() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("a proxy was asked for its class")

    tensor, proxy = torch.ones(3), Proxy()
    assert any(item is tensor for item in living_tensors())
    del proxy


@pytest.fixture(params=["swap", "rebind"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's swap of data pointers, and as on a torch that has none."""
    if request.param == "rebind":
        monkeypatch.setattr("torpor.sleep.storage.swap_available", lambda: False)


def moved(tensor: torch.Tensor) -> bool:
    """Move a tensor's storage to new memory."""
    old = tensor.untyped_storage()
    new = torch.UntypedStorage(old.nbytes()).copy_(old)
    return relocate(old, new, aliases_by_storage())


@pytest.mark.usefixtures("way")
def test_every_alias_follows_its_storage() -> None:
    base = torch.arange(24, dtype=torch.float32)
    parameter = nn.Parameter(base.view(4, 6))
    column, scalar, strided = base[::2], base[5], base.as_strided((3, 2), (1, 5), 4)
    complex_view = torch.view_as_complex(base.view(12, 2))
    aliases = [base, parameter, column, scalar, strided, complex_view]
    before = [(bits(t), t.shape, t.stride(), t.storage_offset(), t._version) for t in aliases]
    address = base.data_ptr()
    assert moved(scalar)
    after = [(bits(t), t.shape, t.stride(), t.storage_offset(), t._version) for t in aliases]
    assert after == before
    addresses = {t.untyped_storage().data_ptr() for t in aliases}
    assert len(addresses) == 1
    assert address not in addresses
    base[5] = 99
    assert scalar.item() == 99
    assert parameter.detach()[0, 5] == 99


@pytest.mark.usefixtures("way")
def test_autograd_goes_on_after_a_move() -> None:
    parameter = nn.Parameter(torch.ones(4))
    assert moved(parameter)
    (parameter * 3).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0] * 4
    assert parameter.is_leaf


def test_rebinding_notices_an_alias_that_only_autograd_knows() -> None:
    given_x = torch.ones(4, requires_grad=True)
    result = given_x.exp()  # saves its result, as a tensor that no Python object stands for
    old = result.untyped_storage()
    address = old.data_ptr()
    assert not rebind(old, torch.UntypedStorage(16).copy_(old), [result])
    assert result.data_ptr() == address, "all aliases look at the old memory again"
    result.sum().backward()
    assert given_x.grad is not None
    assert torch.equal(given_x.grad, result.detach())


def test_odd_tensors_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.sleep.storage.swap_available", lambda: False)
    mine, stranger = torch.ones(4), torch.from_numpy(np.zeros(4, dtype=np.float32))
    odd = [nn.LazyLinear(3), a_wrapper(), Opaque(torch.ones(2)), torch.eye(3).to_sparse()]
    address = stranger.data_ptr()
    assert moved(mine)
    assert stranger.data_ptr() == address
    assert len(odd) == 4


@pytest.mark.skipif(not swap_available(), reason="this torch cannot swap a storage's memory")
def test_where_there_is_a_swap_nobody_looks_for_aliases() -> None:
    assert aliases_by_storage() == {}
