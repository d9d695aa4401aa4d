"""The spill file: private, no longer than it has to be, and typed when there is no room."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.sleep.conftest import FreshProcess

from torpor.errors import HostCopyError, HostFullError
from torpor.sleep.spill import ENVIRONMENT_VARIABLE, SpillFile, default_folder

PAGE = 4096


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    made = SpillFile(tmp_path)
    yield made
    made.close()


def data(size: int, fill: int = 7) -> memoryview:
    return memoryview(bytes([fill]) * size)


def read(spill: SpillFile, offset: int, nbytes: int) -> bytes:
    return os.pread(spill.descriptor, nbytes, offset)


def length(spill: SpillFile) -> int:
    return os.fstat(spill.descriptor).st_size


def test_the_file_has_no_name(spill: SpillFile, tmp_path: Path) -> None:
    spill.write(data(10))
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(spill.descriptor).st_nlink == 0


def test_what_was_written_is_there_and_ranges_do_not_touch(spill: SpillFile) -> None:
    offsets = [spill.write(data(size, fill)) for fill, size in enumerate((1, PAGE, PAGE + 1, 0))]
    assert offsets == [0, PAGE, 2 * PAGE, 4 * PAGE]
    assert read(spill, offsets[2], PAGE + 1) == bytes([2]) * (PAGE + 1)
    assert spill.size_bytes == 5 * PAGE


def test_a_freed_range_is_used_again_and_neighbours_join(spill: SpillFile) -> None:
    first, second, _last = (spill.write(data(PAGE)) for _ in range(3))
    spill.free(second, PAGE)
    spill.free(first, PAGE)
    assert spill.size_bytes == 3 * PAGE
    assert spill.write(data(2 * PAGE)) == first
    assert spill.size_bytes == 3 * PAGE


def test_the_rest_of_a_freed_range_stays_free(spill: SpillFile) -> None:
    first = spill.write(data(3 * PAGE))
    spill.write(data(PAGE))
    spill.free(first, 3 * PAGE)
    assert [spill.write(data(PAGE)) for _ in range(4)] == [0, PAGE, 2 * PAGE, 4 * PAGE]


def test_a_free_tail_is_cut_off_with_the_gap_before_it(spill: SpillFile) -> None:
    first, second = spill.write(data(PAGE)), spill.write(data(PAGE))
    spill.free(first, PAGE)
    assert spill.size_bytes == 2 * PAGE
    spill.free(second, PAGE)
    assert spill.size_bytes == length(spill) == 0


def test_giving_a_range_back_twice_is_harmless(spill: SpillFile) -> None:
    first, _second, third = (spill.write(data(PAGE)) for _ in range(3))
    for _ in range(2):
        spill.free(first, PAGE)
        spill.free(third, PAGE)
    assert spill.size_bytes == 2 * PAGE
    assert [spill.write(data(PAGE)) for _ in range(2)] == [first, 2 * PAGE]


def test_ranges_in_use_never_overlap_in_any_order_of_writes_and_frees(spill: SpillFile) -> None:
    dice = random.Random(1)
    held: dict[int, tuple[int, int]] = {}
    for step in range(400):
        if held and dice.random() < 0.5:
            offset = dice.choice(list(held))
            size, fill = held.pop(offset)
            assert read(spill, offset, size) == bytes([fill]) * size
            spill.free(offset, size)
        else:
            size, fill = dice.randrange(1, 5 * PAGE), step % 256
            held[spill.write(data(size, fill))] = (size, fill)
    for offset, (size, fill) in held.items():
        assert read(spill, offset, size) == bytes([fill]) * size
        spill.free(offset, size)
    assert spill.size_bytes == length(spill) == 0


def test_a_finaliser_that_runs_in_the_middle_of_a_write_disturbs_nothing(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = spill.write(data(PAGE, 1))
    kept = spill.write(data(PAGE, 2))
    pwrite = os.pwrite

    def write_and_collect(descriptor: int, part: memoryview, offset: int) -> int:
        spill.free(victim, PAGE)  # As the garbage collector may do at any moment.
        return pwrite(descriptor, part, offset)

    monkeypatch.setattr(os, "pwrite", write_and_collect)
    new = spill.write(data(2 * PAGE, 3))
    monkeypatch.undo()
    assert read(spill, kept, PAGE) == bytes([2]) * PAGE
    assert read(spill, new, 2 * PAGE) == bytes([3]) * 2 * PAGE
    assert spill.write(data(PAGE, 4)) == victim


def refuse(error: int, *, after: int = 0) -> Callable[[int, memoryview, int], int]:
    """A ``pwrite`` that writes some bytes and then fails."""
    pwrite = os.pwrite
    written = [0]

    def write(descriptor: int, part: memoryview, offset: int) -> int:
        if written[0] >= after:
            raise OSError(error, os.strerror(error))
        done = pwrite(descriptor, part[: after - written[0]], offset)
        written[0] += done
        return done

    return write


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("after", [0, 5000])
def test_a_full_disk_is_typed_and_stores_nothing(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    kept = spill.write(data(PAGE, 1))
    monkeypatch.setattr(os, "pwrite", refuse(error, after=after))
    with pytest.raises(HostFullError, match="spill_dir") as caught:
        spill.write(data(3 * PAGE, 2))
    assert str(spill.folder) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    monkeypatch.undo()
    # The disk gets back what the attempt took of it.
    assert spill.size_bytes == length(spill) == PAGE
    assert read(spill, kept, PAGE) == bytes([1]) * PAGE
    assert spill.write(data(PAGE)) == PAGE


def test_another_write_error_is_typed_too(
    spill: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", refuse(errno.EIO))
    with pytest.raises(HostCopyError, match="cannot write") as caught:
        spill.write(data(PAGE))
    assert not isinstance(caught.value, HostFullError)
    assert spill.size_bytes == 0


def test_partial_writes_are_continued(spill: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, part, offset: pwrite(fd, part[:1000], offset))
    content = bytes(range(256)) * 20
    offset = spill.write(memoryview(content))
    assert read(spill, offset, len(content)) == content


def test_a_real_limit_on_the_file_size_is_a_full_disk(fresh_process: FreshProcess) -> None:
    done = fresh_process(
        """
        import resource, signal, torch
        from torch import nn
        from torpor.errors import HostFullError
        from torpor.sleep.sleeper import Sleeper

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64))
        sleeper = Sleeper(model[1])
        before = model[1].weight.detach().clone()
        try:
            sleeper.sleep(1)
        except HostFullError as error:
            assert "8192" not in str(error) and "spill_dir" in str(error)
        else:
            raise SystemExit("no error")
        assert sleeper.tag_states == {"weights": "resident"}
        assert torch.equal(model[1].weight, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        sleeper.sleep(1)
        sleeper.wake_up()
        assert torch.equal(model[1].weight, before)
        print("fine")
        """
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_used_is_typed(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostCopyError, match=ENVIRONMENT_VARIABLE) as caught:
        SpillFile(tmp_path / folder)
    assert str(tmp_path / folder) in str(caught.value)


def test_a_closed_file_answers_with_errors_and_not_with_another_file(
    tmp_path: Path,
) -> None:
    spill = SpillFile(tmp_path)
    offset = spill.write(data(PAGE))
    number = spill.descriptor
    spill.close()
    spill.close()
    assert not spill.is_open
    taken = os.open(tmp_path, os.O_RDONLY)
    try:
        assert taken == number, "the system gives the lowest number again"
        with pytest.raises(HostCopyError, match="cannot write"):
            spill.write(data(PAGE))
        spill.free(offset, PAGE)
    finally:
        os.close(taken)


def test_the_folder_comes_from_the_environment_else_from_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert default_folder() == Path("/var/tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert default_folder().is_dir()
