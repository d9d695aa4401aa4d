"""Host copies: by content, shared, given back, and honest about what can be read."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torpor.errors import ArgumentError, HostCopyError, HostFullError
from torpor.sleep.digest import local_digest
from torpor.sleep.host import CheckpointCopy, HostCopy, HostStore
from torpor.sleep.source import FileExtent

PAGE = 4096


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostStore]:
    made = HostStore(spill_dir=tmp_path, medium=request.param)
    yield made
    made.close()


def keep(store: HostStore, content: bytes) -> tuple[HostCopy, int]:
    return store.keep(local_digest(content), memoryview(content))


def read(copy: HostCopy) -> bytes:
    target = bytearray(copy.nbytes)
    copy.read_into(memoryview(target))
    return bytes(target)


def used(store: HostStore) -> int:
    return store.file_bytes + store.memory_bytes


@pytest.mark.parametrize("content", [b"x", b"abc" * 5000, b""], ids=["byte", "pages", "empty"])
def test_a_copy_gives_its_bytes_back(store: HostStore, content: bytes) -> None:
    copy, copied = keep(store, content)
    assert copied == len(content)
    assert (copy.nbytes, copy.digest) == (len(content), local_digest(content))
    assert copy.kind == store.medium
    assert copy.is_current()
    assert read(copy) == content


def test_equal_bytes_are_kept_once(store: HostStore) -> None:
    first, _ = keep(store, b"a" * PAGE)
    again, copied = keep(store, b"a" * PAGE)
    assert again is first
    assert copied == 0
    assert used(store) == PAGE
    assert store.find(first.digest, first.nbytes) is first
    assert store.find(first.digest, first.nbytes + 1) is None


def test_room_is_given_back_with_the_last_holder(store: HostStore) -> None:
    first, _ = keep(store, b"a" * PAGE)
    digest, nbytes = first.digest, first.nbytes
    other = first
    del first
    assert used(store) == PAGE
    del other
    assert used(store) == 0
    assert store.find(digest, nbytes) is None


def test_a_copy_in_a_forgotten_cycle_gives_its_room_back_too(store: HostStore) -> None:
    cycle: list[Any] = [keep(store, b"a" * PAGE)[0]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert used(store) == 0


def test_nothing_is_opened_before_the_first_copy(tmp_path: Path) -> None:
    store = HostStore(spill_dir=tmp_path / "missing")
    assert store.file_bytes == 0
    with pytest.raises(HostCopyError, match="missing"):
        keep(store, b"x")
    store.close()


def test_memory_has_a_limit_that_counts_what_is_held_now(tmp_path: Path) -> None:
    store = HostStore(medium="memory", host_memory_limit=2 * PAGE)
    first, _ = keep(store, b"a" * PAGE)
    keep(store, b"b" * PAGE)
    second, _ = keep(store, b"c" * PAGE)
    with pytest.raises(HostFullError, match="host_memory_limit=8192") as caught:
        keep(store, b"d")
    assert "8192 are in use" in str(caught.value)
    assert read(first) == b"a" * PAGE
    del first
    keep(store, b"d")
    assert store.memory_bytes == PAGE
    assert read(second) == b"c" * PAGE


def test_memory_that_the_system_refuses_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    store = HostStore(medium="memory")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(HostFullError, match="Cannot allocate memory"):
        keep(store, b"x")
    assert store.memory_bytes == 0


@pytest.mark.parametrize(
    ("options", "said"), [({"medium": "tape"}, "'tape'"), ({"host_memory_limit": -1}, "=-1 must")]
)
def test_impossible_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        HostStore(**options)


def test_after_close_a_file_copy_says_that_it_is_gone(tmp_path: Path) -> None:
    store = HostStore(spill_dir=tmp_path)
    copy, _ = keep(store, b"a" * PAGE)
    store.close()
    store.close()
    assert not copy.is_current()
    with pytest.raises(HostCopyError, match="spill file"):
        read(copy)
    # A store that is used again must not hand the dead copy out.
    again, copied = keep(store, b"a" * PAGE)
    assert copied == PAGE
    assert read(again) == b"a" * PAGE
    store.close()


@pytest.fixture
def extents(tmp_path: Path) -> list[FileExtent]:
    """Two parts of a tensor in two files, with other bytes around them."""
    (tmp_path / "a").write_bytes(b"....hello")
    (tmp_path / "b").write_bytes(b"world....")
    uint8 = torch.uint8
    return [
        FileExtent(path=tmp_path / "a", offset=4, nbytes=5, dtype=uint8),
        FileExtent(path=tmp_path / "b", offset=0, nbytes=5, dtype=uint8),
    ]


def test_a_checkpoint_copy_joins_its_extents(extents: list[FileExtent]) -> None:
    copy = CheckpointCopy(extents, local_digest(b"helloworld"))
    assert copy.nbytes == 10
    assert copy.is_current()
    assert copy.is_exact()
    assert read(copy) == b"helloworld"


def test_a_checkpoint_copy_notices_that_the_bytes_are_others(extents: list[FileExtent]) -> None:
    copy = CheckpointCopy(extents, local_digest(b"hello_orld"))
    assert copy.is_current()
    assert not copy.is_exact()


def _touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(beside, ns=(status.st_atime_ns, status.st_mtime_ns))
    beside.replace(path)


@pytest.mark.parametrize(
    "change", [_touch, _replace, Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_a_changed_file_is_not_current(extents: list[FileExtent], change: Any) -> None:
    copy = CheckpointCopy(extents, local_digest(b"helloworld"))
    change(extents[1].path)
    assert not copy.is_current()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, "cannot open"),
        (lambda path: path.write_bytes(b"wo"), "ends at byte 2; 3 more were expected"),
    ],
)
def test_a_file_that_is_gone_or_short_is_typed(
    extents: list[FileExtent], change: Any, said: str
) -> None:
    copy = CheckpointCopy(extents, local_digest(b"helloworld"))
    change(extents[1].path)
    with pytest.raises(HostCopyError, match=said):
        read(copy)
    assert not copy.is_exact()


def test_a_checkpoint_copy_of_a_missing_file_cannot_be_made(tmp_path: Path) -> None:
    extent = FileExtent(path=tmp_path / "none", offset=0, nbytes=1, dtype=torch.uint8)
    with pytest.raises(HostCopyError, match="none"):
        CheckpointCopy([extent], "0")


def test_many_extents_are_digested_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.sleep.host._CHUNK_BYTES", 3)
    content = bytes(range(100))
    (tmp_path / "a").write_bytes(content)
    extents = [
        FileExtent(path=tmp_path / "a", offset=start, nbytes=10, dtype=torch.uint8)
        for start in range(0, 100, 10)
    ]
    assert CheckpointCopy(extents, local_digest(content)).is_exact()
