"""The scales of an fp8 KV cache: buffers of each attention module, and their names in checkpoints.

They are content like weights: owned as ``BUFFER``, so that they come back from a host copy at every
level, whether they were read, calibrated or left at 1. Those that the checkpoint holds are read
again with it after level 2. Nothing but the door changes them, and nothing but construction sets
them to 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from torpor.errors import CheckpointError, WeightsError, WeightsMismatchError
from torpor.model.attention.kv_fp8 import KVScales
from torpor.sleep.source import WeightSlice

_PROJECTIONS = {"k_scale": "k_proj", "v_scale": "v_proj"}


def add_kv_scales(attention: nn.Module) -> None:
    """Register ``k_scale`` and ``v_scale``, float32 [1], as buffers of 1."""
    for kind in _PROJECTIONS:
        attention.register_buffer(kind, torch.ones(1, dtype=torch.float32, device="cpu"))


def kv_scales_of(attention: nn.Module) -> KVScales:
    """The buffers of one attention module that has them."""
    return KVScales(attention.get_buffer("k_scale"), attention.get_buffer("v_scale"))


def spellings(prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The two buffers of an attention module, and the names that checkpoints have for each.

    The first is vLLM's; the others are those of quantisers (ModelOpt, compressed-tensors, fused
    projections), which vLLM renames.
    """
    for kind, projection in _PROJECTIONS.items():
        places = ("attn.", f"{projection}.", "qkv_proj.", "")
        yield f"{prefix}{kind}", tuple(f"{prefix}{place}{kind}" for place in places)


def scale_slices(num_layers: int, held: Collection[str]) -> list[WeightSlice]:
    """Where scales come from: for each the name that the checkpoint has for it, else the first.

    Args:
        num_layers: of the model.
        held: every name of the checkpoint.

    Raises:
        CheckpointError: it holds some of the scales and not all.
    """
    slices, lacking = [], []
    for layer in range(num_layers):
        for parameter, names in spellings(f"model.layers.{layer}.self_attn."):
            found = [name for name in names if name in held]
            name = found[0] if found else names[0]
            slices.append(WeightSlice(name=name, parameter=parameter, admit=admitted_scale))
            lacking += [] if found else [name]
    if lacking and len(lacking) < len(slices):
        raise CheckpointError(
            f"the checkpoint holds scales for an fp8 KV cache, but no {lacking[0]!r} (and "
            f"{len(lacking) - 1} others); quantise it again, or leave out kv_cache_dtype"
        )
    return slices


def admitted_scale(name: str, value: torch.Tensor) -> torch.Tensor:
    """A scale of a checkpoint or an update as [1].

    Raises:
        WeightsMismatchError: not one number.
        WeightsError: it is not positive and finite in float32.
    """
    if value.is_meta or value.numel() != 1 or value.dim() > 1:
        raise WeightsMismatchError(
            f"{name!r} has shape {tuple(value.shape)}; a layer has one scale, of shape () or (1,): "
            "scales of single heads or channels are not supported"
        )
    if not value.is_floating_point():
        return value.reshape(1)  # Refused with the words for any weight.
    scale = value.reshape(1).to(torch.float32)
    # By less, quotients overflow.
    if not torch.finfo(torch.float32).tiny <= float(scale) < float("inf"):
        raise WeightsError(
            f"{name!r} is {float(value)}; a scale of the KV cache is positive and finite, and a "
            "normal number in float32: calibrate anew"
        )
    return scale
