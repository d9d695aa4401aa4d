"""The architectures torpor runs, and how the features of each are read from its config.

Each reader here follows what the transformers library (5.24) does for that ``model_type``, its
defaults for missing fields included: a missing field and a null one can mean different things.
openPangu has its own, in ``pangu.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torpor.model.config.aliases import normalised
from torpor.model.config.features import Features, MoEConfig
from torpor.model.config.fields import MAX_EXPERTS, MAX_SIZE, Fields
from torpor.model.config.pangu import read_pangu, read_pangu_pro_moe

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    model_types: tuple[str, ...]
    """Those that go with the architecture; empty for any."""
    read: Callable[[Fields, int], Features]
    """Reads the features from the config of a model of so many layers."""
    needs_kv_heads: bool = True
    """Whether ``num_key_value_heads`` must be stated, since its default is a number."""
    needs_theta: bool = False
    """Whether ``rope_theta`` must be stated, since the released models differ in it."""
    normalise: Callable[[Fields], Fields] = lambda fields: fields
    """Puts the fields under the names that `read` knows."""


def _llama(fields: Fields, layers: int) -> Features:
    bias = fields.flag("attention_bias", False)
    return Features(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        windows=(None,) * layers,
    )


def _mistral(fields: Fields, layers: int) -> Features:
    return Features(windows=(_window(fields),) * layers)


def _qwen2(fields: Fields, layers: int) -> Features:
    return Features(qkv_bias=True, windows=_qwen_windows(fields, layers))


def _qwen3(fields: Fields, layers: int) -> Features:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields, layers)
    return Features(qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128, windows=windows)


def _qwen3_moe(fields: Fields, layers: int) -> Features:
    bias = fields.flag("attention_bias", False)
    window = _switched_window(fields)
    full_layers = fields.optional_integer("max_window_layers", low=0, high=MAX_SIZE)
    if window is not None and full_layers:
        # The reference would ignore it, so what the checkpoint was trained with is unknown.
        raise fields.error(
            "max_window_layers", full_layers, "absent or 0 when use_sliding_window is true"
        )
    return Features(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        windows=(window,) * layers,
        moe=_moe(fields, layers),
    )


def _pangu(model_type: str | None, read: Callable[[Fields, int], Features]) -> Family:
    return Family(
        model_types=() if model_type is None else (model_type,),
        read=read,
        needs_kv_heads=False,
        needs_theta=True,
        normalise=normalised,
    )


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(model_types=("llama",), read=_llama, needs_kv_heads=False),
    "MistralForCausalLM": Family(model_types=("mistral",), read=_mistral),
    "Qwen2ForCausalLM": Family(model_types=("qwen2",), read=_qwen2),
    "Qwen3ForCausalLM": Family(model_types=("qwen3",), read=_qwen3),
    "Qwen3MoeForCausalLM": Family(model_types=("qwen3_moe",), read=_qwen3_moe),
    "PanguEmbeddedForCausalLM": _pangu("PanguEmbedded", read_pangu),
    "PanguProMoEForCausalLM": _pangu("PanguProMoE", read_pangu_pro_moe),
    "PanguProMoEV2ForCausalLM": _pangu(None, read_pangu),
    "PanguUltraMoEForCausalLM": _pangu("pangu_ultra_moe", read_pangu),
}
"""The architectures torpor runs, by their name in ``config.json``."""


def _window(fields: Fields) -> int | None:
    window = fields.optional_integer("sliding_window", low=1, high=MAX_SIZE)
    return window if fields.states("sliding_window") else _DEFAULT_WINDOW


def _switched_window(fields: Fields) -> int | None:
    """The window of a family in which it counts only when ``use_sliding_window`` is true."""
    window = _window(fields)
    return window if fields.flag("use_sliding_window", False) else None


def _qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """``layer_types`` decides; without it, the layers from ``max_window_layers`` on slide."""
    window = _switched_window(fields)
    full_layers = fields.integer("max_window_layers", _DEFAULT_FULL_LAYERS, low=0, high=MAX_SIZE)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return tuple(window if layer >= full_layers else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", kinds, f"a list with one entry for each of {layers}")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise fields.error("layer_types", kinds, f"a list of {_FULL!r} and {_SLIDING!r}")
    if window is None and _SLIDING in kinds:
        accepted = "free of 'sliding_attention' unless use_sliding_window and sliding_window are on"
        raise fields.error("layer_types", kinds, accepted)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _moe(fields: Fields, layers: int) -> MoEConfig:
    experts = _num_experts(fields)
    step = fields.integer("decoder_sparse_step", 1, low=1, high=MAX_SIZE)
    dense = fields.indices("mlp_only_layers", layers)
    sparse = {layer for layer in range(layers) if (layer + 1) % step == 0}
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", low=1, high=experts),
        intermediate_size=fields.integer("moe_intermediate_size", low=1, high=MAX_SIZE),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        layers=frozenset(sparse - set(dense)),
    )


def _num_experts(fields: Fields) -> int:
    """Under either of the two names that files use."""
    other = fields.optional_integer("num_local_experts", low=1, high=MAX_EXPERTS)
    experts = fields.integer("num_experts", other, low=1, high=MAX_EXPERTS)
    if other not in (None, experts):
        raise fields.error("num_local_experts", other, f"the same as num_experts, {experts}")
    return experts
