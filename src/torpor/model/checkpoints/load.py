"""Builds the module that a config names; its weights come later, from a source."""

from __future__ import annotations

import torch

from torpor.model.checkpoints.files import ModelFiles
from torpor.model.config.config import ModelConfig
from torpor.model.layers.decoder import DecoderForCausalLM


def build_model(files: ModelFiles, dtype: torch.dtype) -> DecoderForCausalLM:
    """Build a model with parameters on meta and buffers computed for real.

    Args:
        files: a resolved model.
        dtype: dtype of all parameters.

    Returns:
        The module; its `slice_table` says which checkpoint name fills which parameter rows.
    """
    return new_model(files.config, dtype)


def new_model(config: ModelConfig, dtype: torch.dtype) -> DecoderForCausalLM:
    """As `build_model`, from a config alone."""
    return DecoderForCausalLM(config, dtype)


def checkpoint_shapes(model: DecoderForCausalLM) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this model must hold, in layer order."""
    parameters = dict(model.named_parameters())
    shapes = {}
    for entry in model.slice_table():
        whole = parameters[entry.parameter].shape
        rows = whole[0] if entry.length is None else entry.length
        shapes[entry.name] = (rows, *whole[1:])
    return shapes
