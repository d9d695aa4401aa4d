"""What every test gets: poison on, two threads, fixed examples, and a check that nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before torch is imported and before any fixture of a wider scope is built.
os.environ.setdefault("TORPOR_POISON", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from hypothesis import settings
from tqdm import tqdm

from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.library import load_library

# One thread: small tensors gain nothing from two, and a busy machine makes the second one wait.
torch.set_num_threads(1)
# Whoever draws the first bar of a process would be charged with tqdm's thread, which stays.
tqdm.monitor_interval = 0
settings.register_profile("torpor", deadline=None, derandomize=True)
settings.load_profile("torpor")

_GRACE_S = 2.0


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _children() -> set[int]:
    """Process ids of this process's children, less the one that multiprocessing keeps for good."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # the thread has just ended
    tracker = multiprocessing.resource_tracker._resource_tracker
    return found - {getattr(tracker, "_pid", None)}


def _descriptors() -> set[tuple[int, str]]:
    """Open descriptors and what they point at, less devices and what multiprocessing keeps."""
    found: set[tuple[int, str]] = set()
    kept = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
        if not target.startswith("/dev/") and int(name) != kept:
            found.add((int(name), target))
    return found


def _leaks(before: tuple[set[object], ...]) -> list[object]:
    after: tuple[set[object], ...] = (set(_threads()), set(_children()), set(_descriptors()))
    return [item for old, new in zip(before, after, strict=True) for item in new - old]


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled() -> None:
    """Compile the CPU kernels, if they can be, into the cache that stays between runs.

    Before a test points the cache elsewhere, and before one for which seconds count.
    """
    with contextlib.suppress(KernelsUnavailableError):
        load_library()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Commands and engines choose torch's threads for the whole process; give them back."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open file behind."""
    before: tuple[set[object], ...] = (set(_threads()), set(_children()), set(_descriptors()))
    yield
    leaks = _leaks(before)
    if not leaks:
        return
    gc.collect()
    deadline = time.monotonic() + _GRACE_S
    while (leaks := _leaks(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not leaks, f"left behind by this test: {leaks}"
