"""The folder of converted models: made once, checked at every use, made again when damaged.

Two processes that need the same model convert it once: the second waits for the first one's lock.
A conversion is written beside its place and renamed into it, so that nothing half is ever found.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from torpor.errors import CheckpointError, HostCopyError, HostFullError, TorporError
from torpor.model.checkpoints.files import Progress
from torpor.model.checkpoints.manifest import FORMAT, open_verified
from torpor.model.checkpoints.safetensors_source import SafetensorsSource

LOCK_TIMEOUT_S = 1800.0
"""How long to wait for another process that converts the same model."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make one converted model."""

    slug: str
    """Name of its folder in the cache, without the format version."""
    origin: str
    """Identity of the source; another one makes the cached model stale."""
    make: Callable[[Path], None]
    """Writes the model into an empty folder; raises WeightsError, ConfigError or OSError."""


def cache_root() -> Path:
    """``$TORPOR_CACHE``, else ``$XDG_CACHE_HOME/torpor``, else ``~/.cache/torpor``.

    Raises:
        HostCopyError: no home folder is known.
    """
    own, shared = os.environ.get("TORPOR_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        if Path(shared).is_absolute():
            return Path(shared) / "torpor"
        return Path.home() / ".cache" / "torpor"
    except RuntimeError as error:
        raise HostCopyError(f"no home folder ({error}); set TORPOR_CACHE to a folder") from error


def cached(recipe: Recipe, progress: Progress | None = None) -> SafetensorsSource:
    """Open a converted model, making it first if it is missing, stale or damaged.

    Returns:
        The source; its folder holds the other files, all of them compared with the manifest.

    Raises:
        HostFullError: no room for the converted model; what was written is removed.
        HostCopyError: the cache folder cannot be written, or another process holds its lock.
        WeightsError, ConfigError: the source cannot be converted; nothing is left behind.
    """
    root = cache_root()
    folder = root / f"{recipe.slug}-v{FORMAT}"
    source = _open(folder, recipe.origin, progress)
    if source is not None:
        return source
    with _writing(root), _locked(root / f"{folder.name}.lock"):
        source = _open(folder, recipe.origin, progress)  # another process may have made it
        if source is not None:
            return source
        _make(folder, recipe)
    return open_verified(folder, recipe.origin, progress)


def _open(folder: Path, origin: str, progress: Progress | None) -> SafetensorsSource | None:
    if not folder.exists():
        return None
    try:
        return open_verified(folder, origin, progress)
    except CheckpointError as error:
        # As text: a log record that keeps the error keeps the mapping of the damaged file.
        _logger.warning("converting again: %s", str(error))
        return None


def _make(folder: Path, recipe: Recipe) -> None:
    partial, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        recipe.make(partial)
        if folder.exists():
            # A folder cannot be replaced in one step; another process keeps what it has open.
            folder.rename(old)
        partial.rename(folder)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise HostCopyError(
            f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s; end it, then try again"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Map what the file system refuses to errors that name the cache."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except TorporError:
        raise  # a missing package is an OSError too
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HostFullError(
                f"no room for a converted model in {root} ({_free_bytes(root)} bytes free); "
                "free some, or set TORPOR_CACHE to a folder on another disk"
            ) from error
        raise HostCopyError(
            f"the cache {root} cannot be written ({error.strerror}); set TORPOR_CACHE to a folder "
            "that can"
        ) from error


def _free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free
