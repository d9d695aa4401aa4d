"""What cannot be loaded is refused with a reason; threads share work in every situation."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from tests.model.native_kernels import native_library

from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.library import Library, load_library
from torpor.model.native.ops import NativeOps


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"no library")
    with pytest.raises(KernelsUnavailableError, match=r"kernels\.so cannot be loaded: "):
        Library(path)


def test_the_library_is_loaded_once_and_has_one_team_of_each_size() -> None:
    library = native_library()
    assert load_library() is library
    assert library.team(2) == library.team(2)
    assert library.team(2) != library.team(3)


def test_there_are_no_kernels_for_other_dtypes() -> None:
    library = native_library()
    with pytest.raises(KernelsUnavailableError, match=r"no CPU kernels for torch\.float16"):
        NativeOps(library, torch.float16)


def product() -> torch.Tensor:
    """A product and a norm that are large enough to be shared."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 300, generator=random), torch.randn(301, 300, generator=random)
    ops = NativeOps(native_library(), torch.float32)
    return ops.rms_norm(ops.linear(x, weight, None), weight[:, 0], 1e-5)


@pytest.mark.parametrize("threads", [2, 3, 40])
def test_more_threads_than_processors_or_pieces_of_work(threads: int) -> None:
    want = product()
    torch.set_num_threads(threads)
    for _ in range(20):
        assert torch.equal(product(), want)


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    ops, right = NativeOps(native_library(), torch.float32), []
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 512, generator=random)
    inputs = [torch.randn(rows, 512, generator=random) for rows in (8, 13, 21)]
    wants = [ops.linear(x, weight, None) for x in inputs]
    torch.set_num_threads(3)

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        # Kept, so that no result can look right by the memory of the one before.
        outs = [ops.linear(x, weight, None) for _ in range(300)]
        right.append(all(torch.equal(out, want) for out in outs))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wants, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True, True, True]


def test_a_child_without_the_teams_threads_computes_too() -> None:
    torch.set_num_threads(2)
    want = product()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for threads it does not have
        os._exit(0 if torch.equal(product(), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(product(), want)
