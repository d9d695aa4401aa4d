"""The file a report goes to: looked at before the long work, replaced in one step after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torpor.errors import ArgumentError, TorporError


def check_report_file(path: Path) -> None:
    """Refuse a path that cannot be written, before anything else is done.

    Raises:
        ArgumentError: its folder is missing or read-only, or it is a folder itself.
    """
    if path.is_dir():
        raise ArgumentError(f"the report cannot be written to {path}: it is a folder; name a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ArgumentError(
            f"the report cannot be written to {path}: there is no folder {folder}; make it first"
        )
    try:
        if _is_special(path):
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError(
            f"the report cannot be written to {path}: {error.strerror}; choose another path"
        ) from error


def write_report_file(path: Path, text: str) -> None:
    """Write a report; a reader finds the old file or the new one, never half of one.

    Raises:
        TorporError: the file system refuses; an earlier report is still there.
    """
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if _is_special(target):
            # A device or a pipe is written to, not replaced.
            target.write_text(text, encoding="utf-8")
            return
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise TorporError(
            f"the report could not be written to {path}: {error.strerror}; choose another path"
        ) from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
