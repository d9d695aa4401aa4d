"""torch's switch for oneDNN, which is one for the whole process, and who may rely on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch


class OneDnnSwitch:
    """Everything whose bits depend on the switch holds the lock while it computes.

    Engines on several threads would else see the switch in the position that another one needs
    for a moment. Products in float32 do not look at it.
    """

    lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    @contextmanager
    def off(cls) -> Iterator[None]:
        """Compute without oneDNN. Other libraries' products in other threads are right meanwhile,
        but slower."""
        with cls.lock:
            before = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(False)
            try:
                yield
            finally:
                torch._C._set_mkldnn_enabled(before)
