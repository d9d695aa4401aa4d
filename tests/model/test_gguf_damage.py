"""Every damage to a GGUF header ends in a typed error, at once and without eating memory."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.helpers import write_gguf

from torpor.errors import CheckpointError, ConfigError
from torpor.model.checkpoints.gguf_file import GgufFile
from torpor.model.checkpoints.gguf_header import read_gguf_header
from torpor.model.checkpoints.gguf_tokenizer import build_tokenizer

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
HUGE = 2**64 - 1


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensors: int = 0,
    metadata: int = 0,
    rest: bytes = b"",
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, metadata) + rest


def entry(value: bytes, kind: int, key: bytes = b"key") -> bytes:
    return header(metadata=1, rest=text(key) + struct.pack("<I", kind) + value)


def tensor(
    *, dims: tuple[int, ...] = (32,), rank: int | None = None, kind: int = 0, offset: int = 0,
    name: bytes = b"t", data: int = 128,
) -> bytes:  # fmt: skip
    info = text(name) + struct.pack("<I", len(dims) if rank is None else rank)
    info += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    raw = header(tensors=1, rest=info)
    return raw + b"\0" * (-len(raw) % 32) + b"\0" * data


CASES = {
    "empty": (b"", "the magic needs 4 bytes at byte 0"),
    "short": (b"GG", "the magic needs 4 bytes"),
    "no magic": (header(magic=b"GGML"), "starts with b'GGML', not with b'GGUF'"),
    "a pointer file": (b"version https://git-lfs", "starts with b'vers'"),
    "version 0": (header(version=0), "big-endian"),
    "version 1": (header(version=1), "GGUF version 1; torpor reads 2 and 3"),
    "version 99": (header(version=99), "GGUF version 99"),
    "big-endian": (header(version=3 << 24), "is a big-endian GGUF"),
    "no counts": (b"GGUF\x03\0\0\0", "the number of tensors needs 8 bytes"),
    "tensor count": (header(tensors=HUGE), f"it states {HUGE} tensors in 8 bytes"),
    "metadata count": (header(metadata=HUGE), f"it states {HUGE} metadata entries in 0 bytes"),
    "many tensors": (header(tensors=3) + b"\0" * 40, "it states 3 tensors in 48 bytes"),
    "key length": (
        header(metadata=1, rest=struct.pack("<Q", HUGE) + b"x" * 64),
        f"a metadata key is {HUGE} bytes long",
    ),
    "key past the end": (
        header(metadata=1, rest=struct.pack("<Q", 60) + b"x" * 20),
        "a metadata key needs 60 bytes",
    ),
    "key not UTF-8": (entry(b"\0" * 4, UINT32, key=b"\xff\xfe"), "a metadata key is not UTF-8"),
    "key twice": (
        header(metadata=2, rest=(text(b"a") + struct.pack("<II", UINT32, 1)) * 2),
        "metadata key 'a' appears twice",
    ),
    "value type": (entry(b"\0" * 8, 77), "'key' has the unknown value type 77"),
    "value past the end": (entry(b"\0", UINT32), "1 values of 'key' needs 4 bytes"),
    "string length": (
        entry(struct.pack("<Q", 2**40), STRING),
        "the value of 'key' is 1099511627776 bytes long",
    ),
    "string not UTF-8": (entry(text(b"\xc3\x28"), STRING), "the value of 'key' is not UTF-8"),
    "boolean": (entry(b"\x02", 7), "a boolean that is neither 0 nor 1"),
    "array length": (
        entry(struct.pack("<IQ", UINT32, HUGE), ARRAY),
        f"it states {HUGE} elements of 'key'",
    ),
    "array past the end": (
        entry(struct.pack("<IQ", UINT32, 100) + b"\0" * 200, ARRAY),
        "100 values of 'key' needs 400 bytes",
    ),
    "array of strings past the end": (
        entry(struct.pack("<IQ", STRING, 3) + text(b"a") + b"\0" * 4, ARRAY),
        "the length of an element of 'key' needs 8 bytes",
    ),
    "array of arrays": (
        entry(struct.pack("<IQ", ARRAY, 1) + b"\0" * 20, ARRAY),
        "the unknown value type 9",
    ),
    "alignment zero": (
        entry(struct.pack("<I", 0), UINT32, b"general.alignment"),
        "general.alignment is 0, not a power of two",
    ),
    "alignment odd": (
        entry(struct.pack("<I", 48), UINT32, b"general.alignment"),
        "alignment is 48",
    ),
    "alignment huge": (
        entry(struct.pack("<I", 2**31), UINT32, b"general.alignment"),
        "alignment is 2147483648",
    ),
    "alignment text": (entry(text(b"x"), STRING, b"general.alignment"), "alignment is 'x'"),
    "rank zero": (tensor(dims=(), data=64), "tensor 't' has 0 dimensions"),
    "rank huge": (tensor(rank=2**31), "tensor 't' has 2147483648 dimensions"),
    "dimension zero": (tensor(dims=(0,)), r"tensor 't' has the impossible shape \(0,\)"),
    "dimension huge": (tensor(dims=(2**63, 4)), "tensor 't' has the impossible shape"),
    "product huge": (tensor(dims=(2**40, 2**40)), "ends at byte .* of a file of"),
    "tensor type": (tensor(kind=4242), "tensor 't' has the unknown type 4242"),
    "removed tensor type": (tensor(kind=4), "tensor 't' has the unknown type 4"),
    "part of a block": (tensor(dims=(31,), kind=8), "rows of 31 values, not whole blocks of 32"),
    "offset past the end": (tensor(offset=2**40), "ends at byte 1099511627968 of a file of"),
    "offset not aligned": (tensor(offset=4), "offset 4, which is not a multiple of 32"),
    "data cut": (tensor(data=124), "ends at byte .* of a file of"),
    "name not UTF-8": (tensor(name=b"\xff"), "a tensor name is not UTF-8"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_header_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    raw, problem = CASES[case]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)
    assert "again" in str(caught.value) or "convert" in str(caught.value)


def test_tensors_that_overlap_or_repeat_are_refused(tmp_path: Path) -> None:
    info = struct.pack("<I", 1) + struct.pack("<QIQ", 32, 0, 0)
    for names, problem in (((b"a", b"b"), "inside the one before"), ((b"a", b"a"), "twice")):
        raw = header(tensors=2, rest=b"".join(text(name) + info for name in names))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(raw + b"\0" * 512)
        with pytest.raises(CheckpointError, match=problem):
            read_gguf_header(path)


def test_an_absurd_number_of_strings_is_refused_before_reading_them(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    count = 4_000_001
    with path.open("wb") as file:
        file.write(entry(struct.pack("<IQ", STRING, count), ARRAY))
        file.truncate(8 * count + 1000)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="it states 4000001 elements of 'key'"):
        read_gguf_header(path)
    assert time.monotonic() - start < 1


def test_a_huge_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(entry(struct.pack("<Q", 2**45), STRING) + b"\0" * 1000)
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_gguf_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_folder_or_a_missing_file_is_a_typed_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf_header(path)


def read_all(path: Path) -> None:
    file = GgufFile(path)
    build_tokenizer(file.header)
    for _, weights in file.pairs():
        assert weights.isfinite().all()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "original.gguf"
    write_gguf(path)
    return path


@settings(max_examples=400, deadline=5000)
@given(
    flips=st.lists(st.tuples(st.integers(0, 8500), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 60_000),
)
def test_random_damage_raises_only_typed_errors(
    original: Path, flips: list[tuple[int, int]], cut: int | None
) -> None:
    raw = bytearray(original.read_bytes())
    for at, value in flips:
        raw[at] = value
    path = original.with_name("damaged.gguf")
    path.write_bytes(raw[:cut] if cut is not None else raw)
    with contextlib.suppress(CheckpointError, ConfigError):
        read_all(path)


@settings(max_examples=300, deadline=5000)
@given(
    at=st.integers(0, 1000),
    value=st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, 2**40]),
    width=st.sampled_from([4, 8]),
)
def test_extreme_numbers_anywhere_raise_only_typed_errors(
    original: Path, at: int, value: int, width: int
) -> None:
    raw = bytearray(original.read_bytes())
    raw[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path = original.with_name("damaged.gguf")
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError, ConfigError):
        read_all(path)
