"""Everything that can be chosen about an engine, with names and defaults as in vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

from torpor.engine.options import check_poison, check_progress, check_spill_dir
from torpor.errors import ArgumentError, shown
from torpor.sleep.choices import FOREIGN_WRITE_POLICIES
from torpor.sleep.door import HOST_COPY_POLICIES

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from torpor.engine.sampling.logprobs import LogprobsMode
    from torpor.model.checkpoints.files import Progress


class EngineOptions(TypedDict, total=False):
    """The keywords of ``LLM`` and ``AsyncLLM``; `EngineArgs` says what they mean."""

    dtype: str | torch.dtype
    max_model_len: int | None
    seed: int
    num_threads: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    long_prefill_token_threshold: int
    block_size: int
    kv_cache_dtype: str
    calculate_kv_scales: bool
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    prefault_kv_cache: bool | None
    enable_prefix_caching: bool
    batch_invariant: bool
    cpu_kernels: str
    load_format: str
    sink_placement: str
    max_logprobs: int
    logprobs_mode: LogprobsMode
    scheduling_policy: str
    strict: bool
    spill_dir: str | Path | None
    poison: int | bool | None
    progress: Progress | None
    on_foreign_write: str
    host_copy: str
    check_nan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """How to load and run a model."""

    model: str | os.PathLike[str]
    """A name such as "smollm2", or a model folder."""
    dtype: str | torch.dtype = "auto"
    """What weights and KV cache are held and computed in; "auto" is float32."""
    max_model_len: int | None = None
    """Positions for prompt and completion together; None for the smaller of the model's context
    and 2048."""
    seed: int = 0
    """Where requests without a seed of their own get theirs from."""
    num_threads: int | None = None
    """Threads torch computes with, in the whole process; None leaves it alone."""
    max_num_seqs: int = 64
    """The most completions computed at a time."""
    max_num_batched_tokens: int | None = None
    """The most new tokens of a step; longer prompts are computed in chunks. None for 2048, or for
    ``max_num_seqs`` if that is more."""
    long_prefill_token_threshold: int = 0
    """The most tokens of one prompt in a step while others wait; 0 for half of the step."""
    block_size: int = 16
    """Positions in a block of the KV cache, the unit of sharing."""
    kv_cache_dtype: str = "auto"
    """What keys and values are stored in: "auto": as ``dtype``; "fp8" or "fp8_e4m3": eight bits, by
    a scale for each layer's keys and one for its values."""
    calculate_kv_scales: bool = False
    """For fp8, where the checkpoint holds no scales: take them from a sample text when the model is
    loaded, instead of 1.0."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; None for what ``max_num_seqs`` prompts of full length need, at most
    1 GiB, at least one prompt of full length."""
    num_gpu_blocks_override: int | None = None
    """Size of the KV cache in blocks, on any device; wins over the size in bytes."""
    prefault_kv_cache: bool | None = None
    """On a CPU, whether the model's loading gets the cache's memory from the system, and not the
    steps that fill it. None: where a size is given."""
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share what was computed for the beginning."""
    batch_invariant: bool = False
    """Compute so that the bits of an answer do not depend on what runs beside it. What
    compiled kernels compute is so always; what torch computes is slower then."""
    cpu_kernels: str = "auto"
    """On a CPU, "native": kernels that a C++ compiler makes for this processor once and the cache
    folder keeps; "torch": what torch ships, slower; "auto": the first where it can be had."""
    load_format: str = "auto"
    """Where weights come from: "auto": the model's files; "dummy": random numbers, for a folder
    that holds a config and a tokenizer alone."""
    sink_placement: str = "merged"
    """Where static attention sinks are: "merged": with the weights, merged into every attention;
    "reserved": in blocks of the KV cache, before every request's own."""
    max_logprobs: int = 20
    """The most log probabilities per token that a request may ask for; -1 for no limit."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Of the model's logits, or "processed_logprobs": of what is sampled from."""
    scheduling_policy: str = "fcfs"
    """By arrival, or "priority": by the requests' priority first."""
    strict: bool = True
    """Refuse a model with tensors that no owner declared."""
    spill_dir: str | Path | None = None
    """Folder for host copies that no checkpoint file can serve as."""
    poison: int | bool | None = None
    """Fill memory that comes back with NaN patterns before it is restored, and freed blocks too;
    None asks the environment, see ``Sleeper``."""
    progress: Progress | None = None
    """Told of the stages of loading."""
    on_foreign_write: str = "error"
    """What sleep does when a weight was written outside the door."""
    host_copy: str = "defer"
    """When changed weights are copied to the host, see ``Sleeper``."""
    check_nan: bool = True
    """Refuse weights that contain NaN."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike):
            told = shown(self.model)
            raise ArgumentError(f"model is {told}; give a name or the path of a folder")
        for name, low in _INTEGERS.items():
            _check_integer(name, getattr(self, name), low)
        for name in (
            "enable_prefix_caching",
            "batch_invariant",
            "calculate_kv_scales",
            "strict",
            "check_nan",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; give True or False")
        if not (self.prefault_kv_cache is None or isinstance(self.prefault_kv_cache, bool)):
            told = shown(self.prefault_kv_cache)
            raise ArgumentError(f"prefault_kv_cache is {told}; give True, False or None")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = " or ".join(map(repr, choices))
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; give {known}")
        if self.calculate_kv_scales and self.kv_cache_dtype == "auto":
            raise ArgumentError(
                "calculate_kv_scales is True, and a cache of kv_cache_dtype 'auto' has no scales; "
                "give kv_cache_dtype='fp8', or leave it out"
            )
        check_poison(self.poison)
        check_progress(self.progress)
        check_spill_dir(self.spill_dir)

    @property
    def prefaults_kv_cache(self) -> bool:
        """Whether the cache's memory is taken when the model is loaded."""
        if self.prefault_kv_cache is not None:
            return self.prefault_kv_cache
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None


DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
"""New tokens of a step unless asked otherwise."""

_INTEGERS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,
    "max_logprobs": -1,
}
_OPTIONAL = {"max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override"}
_CHOICES = {
    "load_format": ("auto", "dummy"),
    "sink_placement": ("merged", "reserved"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
    "cpu_kernels": ("auto", "native", "torch"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "scheduling_policy": ("fcfs", "priority"),
    "on_foreign_write": FOREIGN_WRITE_POLICIES,
    "host_copy": HOST_COPY_POLICIES,
}
MOST = 2**31 - 1
"""Of anything that is counted; of bytes as many as can be addressed."""
MOST_BYTES = 2**63 - 1


def engine_args(model: object, options: EngineOptions) -> EngineArgs:
    """Check a constructor's arguments.

    Raises:
        ArgumentError: an unknown name, or a value of the wrong type or out of range.
    """
    known = [field.name for field in fields(EngineArgs) if field.name != "model"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ArgumentError(f"unknown argument {shown(unknown[0])}; known are {', '.join(known)}")
    values: dict[str, Any] = {"model": model, **options}
    return EngineArgs(**values)


def _check_integer(name: str, value: object, low: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    told = shown(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        also = ", or None" if name in _OPTIONAL else ""
        raise ArgumentError(f"{name} is {told}; give a whole number of at least {low}{also}")
    most = MOST_BYTES if name.endswith("_bytes") else MOST
    if value > most:
        raise ArgumentError(f"{name} is {told}; give at most {most}")
