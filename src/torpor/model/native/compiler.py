"""Compiles the kernels for this processor, once, into the cache folder.

What is cached is named after everything that went into it, and compared with its digest before it
is loaded: code is the last thing to take from a damaged file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path

from torpor.errors import HostCopyError
from torpor.model.checkpoints.cache import cache_root

FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-ffp-contract=off"),
    *("-pthread", "-fPIC", "-shared", "-w"),
)
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300

_logger = logging.getLogger(__name__)


class KernelsUnavailableError(Exception):
    """There are no kernels here; the message says why and what would help."""


def compiled() -> Path:
    """The shared library, compiled now if it is not in the cache.

    A machine without a compiler takes what another compiled for a processor like its own.

    Raises:
        KernelsUnavailableError: no compiler, a compiler that fails, or no cache folder.
    """
    try:
        folder = cache_root() / "kernels"
        _check_owner(folder)
        try:
            compiler = find_compiler()
        except KernelsUnavailableError:
            for library in sorted(folder.glob(f"{_key()}-*.so")):
                if _is_whole(library):
                    return library
            raise
        library = folder / f"{_key()}-{_compiler_key(compiler)}.so"
        if not _is_whole(library):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile(compiler, library)
    except (OSError, HostCopyError) as error:
        raise KernelsUnavailableError(
            f"the cache folder cannot be used ({error}); set TORPOR_CACHE to a folder"
        ) from error
    return library


def _check_owner(folder: Path) -> None:
    """Code is taken from no folder that others can write to."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise KernelsUnavailableError(
            f"{folder} can be written by others; chmod go-w it, or set TORPOR_CACHE to a folder of "
            "your own"
        )


def find_compiler() -> tuple[str, ...]:
    """The words of ``$CXX``, or the first C++ compiler on the path.

    Raises:
        KernelsUnavailableError: there is none.
    """
    wanted = os.environ.get("CXX", "").strip()
    for name, *arguments in [_words(wanted)] if wanted else [[each] for each in COMPILERS]:
        found = shutil.which(name)
        if found:
            return found, *arguments
    looked = wanted or ", ".join(COMPILERS)
    raise KernelsUnavailableError(f"no C++ compiler found ({looked}); install g++, or set CXX")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise KernelsUnavailableError(f"CXX is {command!r} ({error}); give a command") from error


def _compile(compiler: tuple[str, ...], library: Path) -> None:
    _logger.info("compiling the CPU kernels with %s, once for this processor", compiler[0])
    with tempfile.TemporaryDirectory(dir=library.parent) as room:
        made = Path(room) / library.name
        with resources.as_file(_sources()) as sources:
            command = [*compiler, *FLAGS, str(sources / "kernels.cpp"), "-o", str(made)]
            _run(command)
        # The digest first: a library without one is made again, never used.
        digest = made.with_suffix(".digest")
        digest.write_text(_digest(made))
        digest.replace(_digest_path(library))
        made.replace(library)


def _run(command: list[str]) -> None:
    done = _call(command)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        said = [line for line in said if "error" in line][:3] or said[:3]
        raise KernelsUnavailableError(
            f"{command[0]} failed with status {done.returncode}: {' / '.join(said)}; "
            "a g++ from version 12 or clang++ from version 15 compiles them"
        )


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailableError(f"{command[0]} took more than {TIMEOUT_S} s") from error
    except OSError as error:
        raise KernelsUnavailableError(
            f"{command[0]} cannot be run ({error}); install g++, or set CXX"
        ) from error


def _is_whole(library: Path) -> bool:
    try:
        return _digest_path(library).read_text() == _digest(library)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_path(library: Path) -> Path:
    return library.with_suffix(".digest")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _sources() -> resources.abc.Traversable:
    return resources.files(__package__) / "csrc"


@cache
def _key() -> str:
    """Of the sources and the processor."""
    parts = hashlib.blake2b(digest_size=12)
    for source in sorted(_sources().iterdir(), key=lambda each: each.name):
        parts.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for text in (*FLAGS, platform.machine(), _processor()):
        parts.update(text.encode() + b"\0")
    return parts.hexdigest()


@cache
def _compiler_key(compiler: tuple[str, ...]) -> str:
    version = _call([*compiler, "--version"])
    text = "\0".join((*compiler, version.stdout))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _processor() -> str:
    """What the processor can do, as Linux lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
