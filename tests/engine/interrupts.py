"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def interrupted_at(line: int, call: Callable[[], object], files: Collection[str]) -> bool:
    """Call, and raise KeyboardInterrupt before the ``line``-th line that runs in some files.

    Returns:
        False when fewer lines ran, so that nothing was raised.
    """
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            num_lines += 1
            if num_lines > line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
