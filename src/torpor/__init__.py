"""torpor: an LLM inference engine whose models sleep, wake, and prove that they woke intact.

The public names load on first use, so that ``import torpor`` costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torpor.engine.async_llm import AsyncLLM
    from torpor.engine.llm import LLM
    from torpor.errors import (
        ArgumentError,
        AsleepError,
        CacheInUseError,
        CheckpointError,
        DoubleInitError,
        FaultedError,
        ForeignWriteError,
        GenerationError,
        HostCopyError,
        OutOfMemoryError,
        OwnershipError,
        RequestError,
        StateError,
        StepError,
        TorporError,
        VerificationError,
        WeightsError,
        WeightsIncompleteError,
    )
    from torpor.outputs import CompletionOutput, RequestOutput
    from torpor.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from torpor.sleep.building import building
    from torpor.sleep.classes import OwnershipClass
    from torpor.sleep.sleeper import Sleeper

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ArgumentError",
    "AsleepError",
    "AsyncLLM",
    "CacheInUseError",
    "CheckpointError",
    "CompletionOutput",
    "DoubleInitError",
    "FaultedError",
    "ForeignWriteError",
    "GenerationError",
    "HostCopyError",
    "OutOfMemoryError",
    "OwnershipClass",
    "OwnershipError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "Sleeper",
    "StateError",
    "StepError",
    "StructuredOutputsParams",
    "TorporError",
    "VerificationError",
    "WeightsError",
    "WeightsIncompleteError",
    "__version__",
    "building",
]

_HOMES = {
    "AsyncLLM": "torpor.engine.async_llm",
    "LLM": "torpor.engine.llm",
    "CompletionOutput": "torpor.outputs",
    "OwnershipClass": "torpor.sleep.classes",
    "RequestOutput": "torpor.outputs",
    "RequestOutputKind": "torpor.params",
    "SamplingParams": "torpor.params",
    "StructuredOutputsParams": "torpor.params",
    "Sleeper": "torpor.sleep.sleeper",
    "building": "torpor.sleep.building",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torpor' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "torpor.errors")), name)
    # Kept, so that the next look-up is an ordinary attribute and never comes here again.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
