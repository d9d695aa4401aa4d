"""Exit codes, and how a command ends whatever happens in it."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from torpor.errors import (
    ArgumentError,
    ConfigError,
    ModelNotFoundError,
    TorporError,
    VerificationError,
)

if TYPE_CHECKING:
    from torpor.serve.terminal import Terminal

OK = 0
FAILED = 1
USAGE = 2
"""Something on the command line cannot be meant: an option, a value, a model that is not there."""
MISMATCH = 3
"""Tokens, log probabilities or digests differ from what they were."""
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output has gone."""

DEBUG_VARIABLE = "TORPOR_DEBUG"


def exit_code_for(error: TorporError) -> int:
    """The exit code that tells what kind of error it was."""
    if isinstance(error, VerificationError):
        return MISMATCH
    if isinstance(error, ModelNotFoundError):
        return USAGE
    # A model's own config is no fault of the command line.
    if isinstance(error, ArgumentError) and not isinstance(error, ConfigError):
        return USAGE
    return FAILED


def end(terminal: Terminal, work: Callable[[], int]) -> int:
    """Do the work of a command; its exit code, or that of the error it ended in.

    Errors of torpor are one line, an interrupt and a broken pipe are silent. Anything else is a
    fault of ours and says so; ``TORPOR_DEBUG=1`` adds the traceback.
    """
    try:
        code = work()
        sys.stdout.flush()
        return code
    except TorporError as error:
        _show_traceback()
        terminal.complain(type(error).__name__, message_of(error))
        return exit_code_for(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        mute_stdout()
        return BROKEN_PIPE
    except OSError as error:
        # A full disk behind stdout, say: no fault of ours, and nothing more can be written there.
        mute_stdout()
        terminal.complain(type(error).__name__, f"cannot read or write: {error}; look there first")
        return FAILED
    except Exception as error:
        shown = _show_traceback()
        hint = "" if shown else f"; {DEBUG_VARIABLE}=1 shows where"
        terminal.complain(
            type(error).__name__,
            f"unexpected {type(error).__name__}: {error} (a fault of torpor's, please report it"
            f"{hint})",
        )
        return FAILED


def message_of(error: TorporError) -> str:
    """The message with the notes added on its way."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def mute_stdout() -> None:
    """Let nothing more go to a pipe that nobody reads, the flush at exit included."""
    # A stream without a descriptor, as in tests, has no pipe behind it.
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(descriptor, sys.stdout.fileno())
        finally:
            os.close(descriptor)


def _show_traceback() -> bool:
    wanted = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    if wanted:
        traceback.print_exc()
    return wanted
