"""What callers may pass to ``LLM``, brought into one checked form."""

from __future__ import annotations

import torch

from torpor.errors import ArgumentError

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
    raise ArgumentError(f"dtype is {dtype!r}; give 'auto', {', '.join(map(repr, _DTYPES))}")


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
        raise ArgumentError(f"max_model_len is {requested!r}; give a whole number of at least 2")
    if requested > model_context:
        raise ArgumentError(
            f"max_model_len is {requested}, but the model's context is {model_context}; "
            f"give at most {model_context}"
        )
    return requested


def resolve_seed(seed: object) -> int:
    """Check the engine's seed.

    Raises:
        ArgumentError: not a whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed is {seed!r}; give a whole number")
    return seed


def resolve_level(level: object) -> int:
    """A sleep level as a number; digits in a string are accepted, as trainers pass them.

    Raises:
        ArgumentError: not one of ``LEVELS``.
    """
    value = int(level) if isinstance(level, str) and level.isdecimal() else level
    if isinstance(value, bool) or not isinstance(value, int) or value not in LEVELS:
        raise ArgumentError(
            f"level is {level!r}; give 0 (pause), 1 (keep host copies) or 2 (discard weights)"
        )
    return value


def check_mode(mode: object) -> None:
    """Check what ``sleep`` is to do with requests in flight.

    Raises:
        ArgumentError: not one of ``MODES``.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; give one of {', '.join(map(repr, MODES))}")


ON_ASLEEP = ("queue", "reject", "wake")
"""What becomes of a request that comes while the model is asleep."""


def check_on_asleep(policy: object) -> str:
    """Check what becomes of requests that come while the model is asleep.

    Raises:
        ArgumentError: not one of ``ON_ASLEEP``.
    """
    if policy not in ON_ASLEEP:
        raise ArgumentError(
            f"on_asleep is {policy!r}; give one of {', '.join(map(repr, ON_ASLEEP))}"
        )
    return str(policy)


def check_timeout(name: str, seconds: object) -> float:
    """Check a length of time in seconds.

    Raises:
        ArgumentError: not a number above 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ArgumentError(f"{name} is {seconds!r}; give a number of seconds above 0")
    return float(seconds)


def set_num_threads(num_threads: object) -> None:
    """Set torch's number of threads, for the whole process; None leaves it alone.

    Raises:
        ArgumentError: not a whole number of at least 1.
    """
    if num_threads is None:
        return
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ArgumentError(f"num_threads is {num_threads!r}; give a whole number of at least 1")
    if num_threads > MAX_NUM_THREADS:
        raise ArgumentError(f"num_threads is {num_threads}; give at most {MAX_NUM_THREADS}")
    torch.set_num_threads(num_threads)
