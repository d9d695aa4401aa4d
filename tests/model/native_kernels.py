"""The compiled kernels for tests, which skip where there are none."""

from __future__ import annotations

import functools

import pytest

from torpor.model.native.compiler import KernelsUnavailableError
from torpor.model.native.library import Library, load_library


def native_library() -> Library:
    """The kernels; the test skips with the reason where they cannot be had."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _found() -> Library | str:
    try:
        return load_library()
    except KernelsUnavailableError as error:
        return str(error)
