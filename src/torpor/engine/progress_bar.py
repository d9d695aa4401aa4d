"""A bar of finished prompts on standard error."""

from __future__ import annotations

import sys
from typing import Any


class ProgressBar:
    """Drawn by tqdm when it is wanted and somebody looks: standard error is a terminal."""

    def __init__(self, total: int, *, wanted: bool) -> None:
        """Draw an empty bar for ``total`` prompts."""
        self._bar: Any = None
        if wanted and total and sys.stderr is not None and sys.stderr.isatty():
            # Imported here: making a bar starts a thread, even a bar that draws nothing.
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="generate", unit="prompt")

    def update(self, num_prompts: int) -> None:
        """Count prompts as finished."""
        if self._bar is not None and num_prompts:
            self._bar.update(num_prompts)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
