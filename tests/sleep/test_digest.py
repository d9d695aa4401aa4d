from __future__ import annotations

import torch
import xxhash

from torpor.sleep.digest import local_digest, local_digests


def test_digest_is_xxh3_128_of_the_bytes() -> None:
    assert local_digest(b"torpor") == xxhash.xxh3_128(b"torpor").hexdigest()
    assert len(local_digest(b"")) == 32


def test_ranges_are_digested_in_order() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    data = bytes(tensor.tolist()[0:1]) + b"\0" * 3
    ranges = [(tensor.data_ptr(), 4), (tensor.data_ptr() + 4, 8), (tensor.data_ptr(), 0)]
    expected = [data, b"\1\0\0\0\2\0\0\0", b""]
    assert local_digests(ranges) == [local_digest(part) for part in expected]


def test_one_changed_bit_changes_the_digest() -> None:
    data = bytearray(4096)
    before = local_digest(data)
    data[1234] ^= 1
    assert local_digest(data) != before
    assert local_digest(memoryview(data)) == local_digest(bytes(data))


def test_reading_a_range_does_not_mark_its_storage_as_exported() -> None:
    tensor = torch.zeros(16)
    local_digests([(tensor.data_ptr(), 64)])
    assert tensor.untyped_storage().resizable()
