"""The scales of an fp8 KV cache in an engine: from the checkpoint, or calibrated from a sample.

Calibrated scales are content, not a function of the weights: after an update they stay as they are,
for requests that run have keys and values rounded by them. Whoever wants others calibrates again.
Scales change through the door alone; the core then lets every running request start over, and
prefixes are found under the epoch of the weights, which has moved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from torpor.errors import ArgumentError, WeightsError
from torpor.model.attention.calibration import SampleAttention
from torpor.model.attention.kv_fp8 import FP8, FP8_MAX

if TYPE_CHECKING:
    from torpor.model.attention.interface import StaticSinks
    from torpor.model.layers.decoder import DecoderForCausalLM
    from torpor.sleep.reports import UpdateReport
    from torpor.sleep.sleeper import Sleeper
    from torpor.sleep.source import SliceTable

_logger = logging.getLogger(__name__)

SAMPLE_TEXT = """\
When the last train had left, the station fell quiet; only the clock above platform 3 went on.
It was 23:47. "Is anybody there?" she called. Nobody answered.
def area(width: float, height: float) -> float:
    return width * height  # 12.5 * 8 == 100.0
Les enfants jouent dans le jardin. Der Zug hat zwanzig Minuten Verspätung.
今天天气很好。我们去公园吧。
1, 1, 2, 3, 5, 8, 13, 21, 34, 55: each number is the sum of the two before it. {"name": "torpor"}
"""
"""What scales are calibrated from when a model is loaded: prose, code, languages, numbers."""


def resolve_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are stored in: eight bits for "fp8", else as the model computes."""
    return dtype if name == "auto" else FP8


class KVScaleBook:
    """Reads and changes one engine's scales. Not thread-safe: the engine's turn protects it."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        sleeper: Sleeper,
        slices: SliceTable,
        reserved_sinks: Sequence[StaticSinks],
    ) -> None:
        """Look after the scales of a model.

        Args:
            model: with scales, or without.
            sleeper: whose door they go through.
            slices: their names there.
            reserved_sinks: those in blocks of the cache, which are rounded as keys and values are.
        """
        self._model = model
        self._sleeper = sleeper
        self._scales = model.kv_scales()
        self._reserved_sinks = reserved_sinks
        by_parameter = slices.by_parameter()
        self._names = {
            layer: tuple(
                by_parameter[f"model.layers.{layer}.self_attn.{kind}"][0].name
                for kind in ("k_scale", "v_scale")
            )
            for layer in self._scales
        }

    @property
    def values(self) -> tuple[float, ...]:
        """Every scale, layer after layer; the weights must be awake."""
        pairs = self._scales.values()
        return tuple(float(scale) for pair in pairs for scale in (pair.k_scale, pair.v_scale))

    def settle(self, held: Collection[str], sample: Sequence[int] | None) -> None:
        """Calibrate scales that the checkpoint does not hold.

        Args:
            held: every name of the checkpoint.
            sample: token ids of a sample text; None to leave the scales at 1.
        """
        if all(name in held for names in self._names.values() for name in names):
            return
        if sample is not None:
            self.calibrate([sample])
            return
        _logger.warning(
            "the checkpoint holds no scales for an fp8 KV cache: they are 1.0, and keys and values "
            "beyond 448 saturate; calculate_kv_scales=True takes them from a sample"
        )

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> UpdateReport:
        """Take the scales from the keys and values of some prompts: their largest becomes 448.

        Args:
            prompts: token ids of each, at least one.

        Raises:
            ArgumentError: the cache has no scales, or there are no prompts.
            WeightsError: keys or values are not finite; nothing has changed.
        """
        if not self._scales:
            raise ArgumentError(
                "kv_cache_dtype is 'auto', and such a cache has no scales; load the model with "
                "kv_cache_dtype='fp8' to calibrate them"
            )
        if not prompts:
            raise ArgumentError("there are no prompts to calibrate the KV cache from; give one")
        pairs = []
        for layer, largest in sorted(self._measured(prompts).items()):
            for name, each in zip(self._names[layer], largest, strict=True):
                pairs.append((name, torch.tensor([_scale(name, each)])))
        # The weights keep the name that they have.
        return self._sleeper.update_weights(pairs, self._sleeper.weights_version)

    def _measured(self, prompts: Sequence[Sequence[int]]) -> dict[int, tuple[float, float]]:
        attention = SampleAttention()
        with torch.inference_mode():
            for sinks in self._reserved_sinks:
                attention.note(sinks.spec.layer, sinks.sink_key, sinks.sink_value)
            for token_ids in prompts:
                ids_T = torch.tensor(token_ids, dtype=torch.int64)
                last_1 = torch.tensor([len(ids_T) - 1])
                self._model(ids_T, torch.arange(len(ids_T)), attention, last_1)
        return {
            layer: (float(key), float(value)) for layer, (key, value) in attention.largest.items()
        }


def _scale(name: str, largest: float) -> float:
    if not 0 <= largest < float("inf"):
        raise WeightsError(
            f"{name!r} cannot be calibrated: the largest of what it scales is {largest}; check the "
            "weights, or calibrate from other prompts"
        )
    # Zeros alone need no scale; next to zero, the quotient must not become zero.
    return max(largest / FP8_MAX, torch.finfo(torch.float32).tiny) if largest else 1.0
