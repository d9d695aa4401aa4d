"""Where a command writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command: rich would end the process with the code of a failure."""
        raise BrokenPipeError


class Terminal:
    """Both streams of one command, for a person or as JSON."""

    def __init__(self, *, json_wanted: bool) -> None:
        """Take the streams as they are now."""
        self.json_wanted = json_wanted
        # highlight=False: colours are chosen here, never guessed from the text.
        self.out = _Console(file=sys.stdout, highlight=False, soft_wrap=False)
        self.err = _Console(file=sys.stderr, highlight=False)

    @property
    def is_watched(self) -> bool:
        """Whether a person sees stderr, and so progress."""
        return self.err.is_terminal

    @property
    def streams(self) -> bool:
        """Whether a person sees stdout, and so text as it comes."""
        return self.out.is_terminal and not self.json_wanted

    def emit(self, value: Mapping[str, Any]) -> None:
        """Write one JSON object as one line of stdout."""
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    def write(self, text: str) -> None:
        """Write text to stdout as it is."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def complain(self, type_name: str, message: str) -> None:
        """Report an error: one line of stderr, or an object on stdout where JSON is wanted."""
        if self.json_wanted:
            self.emit({"error": {"type": type_name, "message": message}})
            return
        line = Text.assemble(("torpor: ", "bold red"), " ".join(message.split()))
        self.err.print(line, soft_wrap=True)

    def bar(self, fraction: float, width: int, style: str) -> Text:
        """A bar of ``width`` cells, filled from the left to an eighth of a cell."""
        eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
        if self.out.options.ascii_only:
            filled = "#" * (eighths // 8)
        else:
            filled = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        return Text(filled.ljust(width), style=style)
