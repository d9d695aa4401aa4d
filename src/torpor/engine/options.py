"""What callers may pass to ``LLM``, brought into one checked form."""

from __future__ import annotations

import inspect
import math
import os
import tempfile

import torch

from torpor.errors import ArgumentError, shown
from torpor.params.checks import SEED
from torpor.sleep.poison import PATTERNS
from torpor.sleep.spill import ENVIRONMENT_VARIABLE

LEVELS = (0, 1, 2)
"""Sleep levels: 0 pauses generation, 1 keeps host copies of the weights, 2 discards them."""

MODES = ("abort", "wait", "keep")
"""What vLLM's sleep does with requests in flight."""

MAX_NUM_THREADS = 1024
"""More would cost the process its stacks before they helped anyone."""

DEFAULT_MAX_MODEL_LEN = 2048
"""Positions held unless asked otherwise; longer contexts cost memory that few prompts use."""

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(dtype: object) -> torch.dtype:
    """The dtype to run in; "auto" is float32, the fastest and most exact on a CPU.

    Raises:
        ArgumentError: an unknown name, or a dtype that weights cannot have.
    """
    if dtype == "auto":
        return torch.float32
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ArgumentError(f"dtype is {shown(dtype)}; give 'auto', {', '.join(map(repr, _DTYPES))}")


def resolve_max_model_len(requested: object, model_context: int) -> int:
    """How many positions the KV cache holds.

    Args:
        requested: what the caller asked for, None for the smaller of the model's context and
            ``DEFAULT_MAX_MODEL_LEN``.
        model_context: positions that the model was made for.

    Raises:
        ArgumentError: not a whole number of at least 2, or more than the model's context.
    """
    if requested is None:
        return min(model_context, DEFAULT_MAX_MODEL_LEN)
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 2:
        told = shown(requested)
        raise ArgumentError(f"max_model_len is {told}; give a whole number of at least 2")
    if requested > model_context:
        raise ArgumentError(
            f"max_model_len is {shown(requested)}, but the model's context is {model_context}; "
            f"give at most {model_context}"
        )
    return requested


def resolve_seed(seed: object) -> int:
    """Check the engine's seed.

    Raises:
        ArgumentError: not a whole number, or one that a request could not have either.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not SEED.holds(seed):
        raise ArgumentError(f"seed is {shown(seed)}; give a whole number {SEED}")
    return seed


def check_poison(poison: object) -> None:
    """Check what memory that comes back is filled with.

    Raises:
        ArgumentError: none of the patterns, nor True, False or None.
    """
    if poison is None or isinstance(poison, bool):
        return
    if not isinstance(poison, int) or poison not in PATTERNS:
        known = ", ".join(f"{pattern:#04x}" for pattern in PATTERNS)
        raise ArgumentError(f"poison is {shown(poison)}; give True, False, None, {known}")


def check_progress(progress: object) -> None:
    """Check whom the stages of loading are told.

    Raises:
        ArgumentError: not something to call with a stage and two numbers.
    """
    if progress is None:
        return
    fits = callable(progress)
    if callable(progress):
        try:
            inspect.signature(progress).bind("load", 0, 1)
        except TypeError:
            fits = False
        except ValueError:
            pass  # in C, and silent about what it takes
    if not fits:
        raise ArgumentError(
            f"progress is {shown(progress)}; give a function of (stage, done, total), or None"
        )


def check_spill_dir(spill_dir: object) -> None:
    """Check that host copies can be kept where the caller, or the environment, wants them.

    The folder that is taken unless anyone chose one is not looked at: most engines never need it.

    Raises:
        ArgumentError: not a folder that a file can be made in; one was tried.
    """
    name, given = "spill_dir", spill_dir
    if given is None:
        name, given = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or None
    if given is None:
        return
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ArgumentError(f"{name} is {shown(given)}; give the path of a folder, or None")
    try:
        with tempfile.TemporaryFile(dir=os.fspath(given)):
            pass
    except (OSError, ValueError) as error:  # ValueError: no path can be spelled so
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"{name} is {str(given)!r}, where no file can be made ({reason}); give a folder that "
            "can be written to"
        ) from error


def resolve_level(level: object) -> int:
    """A sleep level as a number; digits in a string are accepted, as trainers pass them.

    Raises:
        ArgumentError: not one of ``LEVELS``.
    """
    number = isinstance(level, str) and len(level) < 10 and level.isdecimal()
    value = int(str(level)) if number else level
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        raise ArgumentError(
            f"level is {shown(level)}; give 0 (pause), 1 (keep host copies) or 2 (discard weights)"
        )
    return value


def check_mode(mode: object) -> None:
    """Check what ``sleep`` is to do with requests in flight.

    Raises:
        ArgumentError: not one of ``MODES``.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode is {shown(mode)}; give one of {', '.join(map(repr, MODES))}")


ON_ASLEEP = ("queue", "reject", "wake")
"""What becomes of a request that comes while the model is asleep."""


def check_on_asleep(policy: object) -> str:
    """Check what becomes of requests that come while the model is asleep.

    Raises:
        ArgumentError: not one of ``ON_ASLEEP``.
    """
    if policy not in ON_ASLEEP:
        raise ArgumentError(
            f"on_asleep is {shown(policy)}; give one of {', '.join(map(repr, ON_ASLEEP))}"
        )
    return str(policy)


def check_timeout(name: str, seconds: object) -> float:
    """Check a length of time in seconds.

    Raises:
        ArgumentError: not a number above 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ArgumentError(f"{name} is {shown(seconds)}; give a number of seconds above 0")
    try:
        return float(seconds)
    except OverflowError:
        return math.inf


def set_num_threads(num_threads: object) -> None:
    """Set torch's number of threads, for the whole process; None leaves it alone.

    Raises:
        ArgumentError: not a whole number of at least 1.
    """
    if num_threads is None:
        return
    told = shown(num_threads)
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ArgumentError(f"num_threads is {told}; give a whole number of at least 1")
    if num_threads > MAX_NUM_THREADS:
        raise ArgumentError(f"num_threads is {told}; give at most {MAX_NUM_THREADS}")
    torch.set_num_threads(num_threads)
