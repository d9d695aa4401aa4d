"""Random weights for a model whose checkpoint is not at hand: of its shapes, the same each time."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import xxhash

from torpor.model.checkpoints.load import checkpoint_shapes
from torpor.model.layers.decoder import DecoderForCausalLM
from torpor.sleep.source import FileExtent

_SPREAD = 0.02
"""Standard deviation; with it, activations of any depth stay finite in every dtype."""


class DummySource:
    """What a checkpoint of the model would hold, with random content; a `WeightSource`."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        """Take names, shapes and dtypes from a model."""
        parameters = dict(model.named_parameters())
        self._shapes = checkpoint_shapes(model)
        self._dtypes = {
            entry.name: parameters[entry.parameter].dtype for entry in model.slice_table()
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        sizes = (
            torch.Size(shape).numel() * self._dtypes[name].itemsize
            for name, shape in self._shapes.items()
        )
        return sum(sizes)

    def names(self) -> Collection[str]:
        """Every tensor name, in layer order."""
        return self._shapes.keys()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor; a name's content is the same in every process."""
        for name, shape in self._shapes.items():
            random = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
            values = _SPREAD * torch.randn(shape, generator=random)
            if name.endswith("norm.weight"):
                values += 1
            yield name, values.to(self._dtypes[name])

    def extent(self, name: str) -> FileExtent | None:
        """None: no file holds them."""
        return None
