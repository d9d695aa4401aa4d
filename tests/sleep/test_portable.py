from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.errors import ArgumentError
from torpor.sleep.portable import CHUNK_WORDS, portable_digest, portable_tensor_digest

MASK = (1 << 64) - 1
CONSTANTS = (
    (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    (0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)


def reference_mix(x: int, a: int, b: int) -> int:
    x &= MASK
    x ^= x >> 30
    x = (x * a) & MASK
    x ^= x >> 27
    x = (x * b) & MASK
    return x ^ (x >> 31)


def reference_words(data: bytes) -> list[int]:
    padded = data + bytes(-len(data) % 8)
    return [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]


def reference_digest(data: bytes, dtype_name: str) -> str:
    """The definition in the module's docstring, word by word."""
    digest = ""
    for p, a, b in CONSTANTS:
        total = 0
        for index, word in enumerate(reference_words(data)):
            total = (total + reference_mix(word + (index + 1) * p, a, b)) & MASK
        state = reference_mix(total, a, b)
        for word in [len(data), *reference_words(dtype_name.encode())]:
            state = reference_mix(state + p * word, a, b)
        digest += f"{state:016x}"
    return digest


def digest_of(data: bytes, dtype_name: str = "float32") -> str:
    return portable_digest(np.frombuffer(data, dtype=np.uint8), dtype_name)


@given(st.binary(max_size=200), st.sampled_from(["float32", "bfloat16", "float8_e4m3fnuz"]))
def test_digest_equals_the_slow_reference(data: bytes, dtype_name: str) -> None:
    assert digest_of(data, dtype_name) == reference_digest(data, dtype_name)


def test_chunks_join_without_a_seam() -> None:
    random = np.random.default_rng(3)
    for extra in (-1, 0, 1, 13):
        data = random.integers(0, 256, CHUNK_WORDS * 8 + extra, dtype=np.uint8)
        assert portable_digest(data, "uint8") == reference_digest(data.tobytes(), "uint8")


def test_the_value_never_changes() -> None:
    data = bytes(range(256)) + b"torpor"
    assert digest_of(data, "bfloat16") == "a15f013f0d8634767f8d61db87d7f1b4"
    assert digest_of(b"", "float32") == "b5e9c7129f903bbe2ba3ec01291de676"


def test_alignment_of_the_memory_does_not_matter() -> None:
    data = np.arange(4096, dtype=np.uint16).view(np.uint8)
    for shift in range(8):
        moved = np.empty(data.size + shift, dtype=np.uint8)[shift:]
        moved[:] = data
        assert portable_digest(moved, "int16") == portable_digest(data, "int16")


def test_length_and_dtype_are_part_of_it() -> None:
    assert len({digest_of(bytes(count)) for count in range(33)}) == 33
    names = ("float32", "int32", "float16", "float8_e4m3fn", "float8_e4m3fnuz")
    assert len({digest_of(bytes(16), name) for name in names}) == len(names)


def test_read_only_memory_is_fine_and_input_is_left_alone() -> None:
    data = np.arange(64, dtype=np.uint8)
    data.flags.writeable = False
    portable_digest(data, "uint8")
    assert (data == np.arange(64)).all()


@pytest.mark.parametrize(
    "data",
    [np.zeros(4, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]],
    ids=["floats", "two dimensions", "strided"],
)
def test_other_arrays_are_refused_with_the_remedy(data: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match=r"contiguous uint8 .*ascontiguousarray"):
        portable_digest(data, "float32")


@pytest.mark.parametrize("name", ["", "flöat32"])
def test_a_nameless_dtype_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="dtype name"):
        digest_of(bytes(8), name)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_digest_is_that_of_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    name = str(dtype).removeprefix("torch.")
    assert portable_tensor_digest(tensor) == reference_digest(data, name)


def test_strides_do_not_matter_but_values_do() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    turned = tensor.t().contiguous().t()
    assert not turned.is_contiguous()
    assert portable_tensor_digest(turned) == portable_tensor_digest(tensor)
    assert portable_tensor_digest(tensor.t()) != portable_tensor_digest(tensor)
    part = torch.zeros(4, 12)[:, ::2].copy_(tensor)
    assert portable_tensor_digest(part) == portable_tensor_digest(tensor)


def test_lazy_conjugate_and_negative_are_resolved() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    assert portable_tensor_digest(tensor.conj()) == portable_tensor_digest(tensor.conj().clone())
    negative = tensor.conj().imag
    assert negative.is_neg()
    assert portable_tensor_digest(negative) == portable_tensor_digest(negative.clone())


def test_empty_and_scalar_tensors_have_a_digest() -> None:
    assert portable_tensor_digest(torch.empty(0, 3)) == reference_digest(b"", "float32")
    assert portable_tensor_digest(torch.tensor(0.0)) == reference_digest(bytes(4), "float32")


def test_a_tensor_stays_adoptable_and_unversioned() -> None:
    tensor = torch.nn.Parameter(torch.randn(4, 4))
    version = tensor._version
    portable_tensor_digest(tensor)
    assert tensor.untyped_storage().resizable()
    assert tensor._version == version


def test_tensors_without_bytes_are_refused() -> None:
    for tensor in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(ArgumentError, match="no plain bytes"):
            portable_tensor_digest(tensor)
