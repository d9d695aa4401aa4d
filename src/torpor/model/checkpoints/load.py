"""Builds the module that a config names; its weights come later, from a source."""

from __future__ import annotations

import torch

from torpor.errors import OutOfMemoryError
from torpor.model.checkpoints.files import ModelFiles
from torpor.model.config.config import ModelConfig
from torpor.model.layers.decoder import DecoderForCausalLM
from torpor.sleep.shards import ALONE, TensorParallel


def build_model(
    files: ModelFiles,
    dtype: torch.dtype,
    tp: TensorParallel = ALONE,
    *,
    kv_dtype: torch.dtype | None = None,
) -> DecoderForCausalLM:
    """Build a model with parameters on meta and buffers computed for real.

    Args:
        files: a resolved model.
        dtype: dtype of all parameters.
        tp: the rank whose part of the model to build.
        kv_dtype: of the KV cache; each layer has the scales that float8_e4m3fn needs.

    Returns:
        The module; its `slice_table` says which checkpoint name fills which parameter rows.

    Raises:
        ConfigError: the ranks do not divide a size.
        OutOfMemoryError: there is no memory for the buffers.
    """
    return new_model(files.config, dtype, tp, kv_dtype=kv_dtype)


def new_model(
    config: ModelConfig,
    dtype: torch.dtype,
    tp: TensorParallel = ALONE,
    *,
    kv_dtype: torch.dtype | None = None,
) -> DecoderForCausalLM:
    """As `build_model`, from a config alone."""
    try:
        return DecoderForCausalLM(config, dtype, tp, kv_dtype=kv_dtype)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for this on the CPU.
        told = str(error)
        if isinstance(error, RuntimeError) and "alloc" not in told and "overflow" not in told:
            raise
        raise OutOfMemoryError(
            "the sizes in the model's config.json ask for buffers that this process has no memory "
            f"for ({told.splitlines()[0] if told else 'out of memory'}); compare the file with the "
            "published one"
        ) from error


def checkpoint_shapes(model: DecoderForCausalLM) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this model must hold, in layer order; of one
    rank those that it takes a part of."""
    parameters = dict(model.named_parameters())
    return {
        entry.name: entry.whole_shape(entry.rows_of(parameters[entry.parameter]))
        for entry in model.slice_table()
    }
