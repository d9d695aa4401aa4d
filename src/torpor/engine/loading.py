"""From arguments to the parts of an engine: files, module, sleeper, cache, runner, core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.cache.manager import Epochs, KVCacheManager
from torpor.engine.args import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineArgs
from torpor.engine.backends import choose_backends
from torpor.engine.kv_scales import SAMPLE_TEXT, KVScaleBook, resolve_kv_cache_dtype
from torpor.engine.options import (
    resolve_dtype,
    resolve_max_model_len,
    resolve_seed,
    set_num_threads,
)
from torpor.engine.requests.completion import EndRules
from torpor.engine.sampling.grammar import GrammarCompiler
from torpor.engine.steps.core import EngineCore
from torpor.engine.steps.inputs import InputBuffers
from torpor.engine.steps.kv_cache import KVCacheMemory, allocate_kv_cache
from torpor.engine.steps.pages_ahead import pages_ahead
from torpor.engine.steps.runner import ModelRunner
from torpor.engine.steps.scheduler import Scheduler, SchedulerConfig
from torpor.engine.steps.sinks import Sinks
from torpor.engine.text.tokenizer import Tokenizer
from torpor.engine.watched_source import WatchedSource
from torpor.errors import CheckpointError, WeightsIncompleteError
from torpor.model.checkpoints.dummy import DummySource
from torpor.model.checkpoints.load import build_model
from torpor.model.checkpoints.resolve import resolve_model
from torpor.model.layers.derived import own_derived
from torpor.model.layers.ops import use_ops
from torpor.sleep.building import building
from torpor.sleep.classes import OwnershipClass
from torpor.sleep.procfs import available_memory_bytes
from torpor.sleep.sleeper import Sleeper

if TYPE_CHECKING:
    from torpor.model.attention.interface import Capabilities
    from torpor.model.checkpoints.files import ModelFiles
    from torpor.model.config.config import ModelConfig
    from torpor.model.layers.decoder import DecoderForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    sleeper: Sleeper
    core: EngineCore
    cache: KVCacheManager
    memory: KVCacheMemory
    kv_scales: KVScaleBook
    tokenizer: Tokenizer
    rules: EndRules
    vocab_size: int
    grammars: Callable[[], GrammarCompiler]
    """Made on the first call: it takes a library and time that most requests do not need."""


def load_parts(args: EngineArgs, *, ready: Callable[[], None]) -> Parts:
    """Load a model and leave it awake, with everything around it.

    Args:
        args: what to load and how.
        ready: called before each step; raises unless it may run.

    Raises:
        ArgumentError, ConfigError: an argument or the model's config cannot be used.
        ModelNotFoundError, CheckpointError, WeightsError: the model cannot be loaded.
        OutOfMemoryError: it does not fit.
    """
    resolve_seed(args.seed)
    dtype = resolve_dtype(args.dtype)
    kv_dtype = resolve_kv_cache_dtype(args.kv_cache_dtype, dtype)
    set_num_threads(args.num_threads)
    dummy = args.load_format == "dummy"
    files = resolve_model(args.model, progress=args.progress, weights=not dummy)
    config = files.config
    length = resolve_max_model_len(args.max_model_len, config.max_position_embeddings)
    _require_room(args, length)
    tokenizer = _tokenizer(files)
    with building() as records:
        module = build_model(files, dtype, kv_dtype=kv_dtype)
    source = WatchedSource(DummySource(module) if dummy else files.source, args.progress)
    slices = module.slice_table(source.names())
    sleeper = Sleeper(
        module,
        reload=source,
        slices=slices,
        records=records,
        spill_dir=args.spill_dir,
        poison=args.poison,
        strict=args.strict,
        on_foreign_write=args.on_foreign_write,
        host_copy=args.host_copy,
        check_nan=args.check_nan,
    )
    try:
        own_derived(sleeper, module.derived())
        sinks = Sinks(module.static_sinks(), args)
        memory = allocate_kv_cache(
            sleeper,
            args,
            module.attention_specs(),
            max_model_len=length,
            dtype=kv_dtype,
            sinks=sinks,
            scales=module.kv_scales(),
        )
        kv_scales = KVScaleBook(module, sleeper, slices, sinks.reserved)
        core, cache = _core(args, module, sleeper, memory, length, ready, sinks, kv_scales)
        _read_weights(sleeper, files)
        sample = tokenizer.encode(SAMPLE_TEXT)[:length] or [0]
        kv_scales.settle(source.names(), sample if args.calculate_kv_scales else None)
        source.unwatch()
    except BaseException:
        sleeper.close(discard=True)
        raise
    eos = _end_tokens(config, tokenizer)
    return Parts(
        sleeper=sleeper,
        core=core,
        cache=cache,
        memory=memory,
        kv_scales=kv_scales,
        tokenizer=tokenizer,
        rules=EndRules(eos_token_ids=eos, max_model_len=length),
        vocab_size=config.vocab_size,
        grammars=functools.cache(lambda: GrammarCompiler(tokenizer, config.vocab_size, eos)),
    )


def _read_weights(sleeper: Sleeper, files: ModelFiles) -> None:
    try:
        sleeper.reload_weights()
    except WeightsIncompleteError as error:
        missing = error.names
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise WeightsIncompleteError(
            f"the checkpoint {files.folder} lacks content of {len(missing)} weights: {shown}; "
            "fetch its files again",
            missing,
        ) from error


def _core(
    args: EngineArgs,
    module: DecoderForCausalLM,
    sleeper: Sleeper,
    memory: KVCacheMemory,
    max_model_len: int,
    ready: Callable[[], None],
    sinks: Sinks,
    kv_scales: KVScaleBook,
) -> tuple[EngineCore, KVCacheManager]:
    def scratch(shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        return sleeper.allocate(shape, dtype, name=name, cls=OwnershipClass.SCRATCH)

    ops, make_attention = choose_backends(
        args,
        memory,
        scratch,
        dtype=resolve_dtype(args.dtype),
        weights_epoch=lambda: sleeper.weights_epoch,
    )
    use_ops(module, ops)
    attention = make_attention("")
    cache = _cache(args, sleeper, memory, attention.capabilities)
    limits = _limits(args)
    max_blocks = -(-max_model_len // args.block_size)
    inputs = InputBuffers(
        scratch,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_blocks=max_blocks,
        block_size=args.block_size,
    )
    attention = sinks.reserve(
        cache,
        memory,
        attention,
        make_attention,
        scratch,
        max_num_seqs=limits.max_num_seqs,
        max_blocks=max_blocks,
    )
    runner = ModelRunner(
        module,
        attention,
        inputs,
        table=cache.table,
        clear=memory.clear,
        logprobs_mode=args.logprobs_mode,
    )
    core = EngineCore(
        Scheduler(limits, cache),
        runner,
        sleeper,
        ready=ready,
        pages=pages_ahead(memory, cache, sleeper, all_now=args.prefaults_kv_cache),
        kv_scales=lambda: kv_scales.values,
    )
    return core, cache


def _require_room(args: EngineArgs, max_model_len: int) -> None:
    """Refuse sizes that no memory holds, before anything is loaded."""
    limits = _limits(args)
    InputBuffers.require_room(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_blocks=-(-max_model_len // args.block_size),
        available=available_memory_bytes(),
    )


def _cache(
    args: EngineArgs, sleeper: Sleeper, memory: KVCacheMemory, capabilities: Capabilities
) -> KVCacheManager:
    def poison(block_ids: Sequence[int]) -> None:
        # Blocks are given back while asleep too, when there is nothing to fill.
        if sleeper.tag_states["kv_cache"] != "released":
            memory.poison(block_ids)

    return KVCacheManager(
        memory.specs,
        memory.num_blocks,
        epochs=lambda: Epochs(weights=sleeper.weights_epoch, kv=sleeper.kv_epoch),
        enable_prefix_caching=args.enable_prefix_caching,
        clear_fresh=capabilities.reads_past_length,
        on_free=poison if sleeper.poisons else None,
    )


def _limits(args: EngineArgs) -> SchedulerConfig:
    tokens = args.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, args.max_num_seqs)
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
    )


def _end_tokens(config: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """Those of the config, and the tokenizer's own."""
    own = tokenizer.eos_token_id
    return frozenset(config.eos_token_ids) | ({own} if own is not None else set())


def _tokenizer(files: ModelFiles) -> Tokenizer:
    path = files.tokenizer_json or files.tokenizer_model
    if path is None:
        raise CheckpointError(
            f"{files.folder} has no tokenizer.json and no tokenizer.model; add the file of the "
            "model's tokenizer"
        )
    return Tokenizer(
        path,
        files.tokenizer_config_json,
        files.chat_template,
        architecture=files.config.architecture,
    )
