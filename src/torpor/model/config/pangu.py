"""openPangu: what each of its architectures computes, read from the fields of its config.

Class names of published files collide, so the fields decide: those of latent attention say MLA, a
number of sinks says sink attention, else it is plain grouped-query attention; a number of routed
experts says MoE. Fields and defaults follow vLLM 0.32 and the files released by Huawei.
"""

from __future__ import annotations

from dataclasses import replace

from torpor.model.config.features import Features, MLAConfig, MoEConfig, Routing, SinkConfig
from torpor.model.config.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields

_SINK_FIELDS = ("qk_nope_dim", "qk_rope_dim", "v_channels")
_UNRELEASED = (
    "param_sink_scalar",
    "param_sink_of_head_num",
    "param_sink_of_head_dim",
    "use_mhc",
    "use_mome",
    "router_sliding_window",
    "index_topk",
    "dsa_layers",
    "swa_layers",
    "sliding_window_list",
    "block_post_layernorm_idx",
)
"""Of models that torpor does not run, or that were never released. A sink as one scalar, or one for
each query head, changes every logit."""


def read_pangu(fields: Fields, layers: int) -> Features:
    """Features of any openPangu config whose names are normalised, but the mixture of 2025.

    Raises:
        ConfigError: a field is missing, out of range, or of a model that torpor does not run.
    """
    return _features(fields, layers, _experts(fields, layers))


def read_pangu_pro_moe(fields: Fields, layers: int) -> Features:
    """As `read_pangu`, for Pangu Pro MoE: one expert of each group, weights as they are.

    Files of the 72B of December 2025 bear its name too; they scale what their experts give.
    """
    if fields.raw("routed_scaling_factor") is not None:
        return read_pangu(fields, layers)
    return _features(fields, layers, _grouped_experts(fields, layers))


def _features(fields: Fields, layers: int, moe: MoEConfig | None) -> Features:
    for name in _UNRELEASED:
        if fields.raw(name):
            raise fields.error(name, fields.raw(name), "absent: torpor does not run such models")
    _refuse_encoder(fields)
    bias = fields.flag("attention_bias", False)
    features = Features(
        qkv_bias=fields.flag("qkv_bias", bias),
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        sandwich_norm=fields.flag("sandwich_norm", False),
        windows=_windows(fields, layers),
        moe=moe,
        num_nextn_predict_layers=fields.integer(
            "num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS
        ),
    )
    if fields.raw("kv_lora_rank") is not None:
        return _latent(fields, features)
    if _sink_count(fields):
        return _with_sinks(fields, features)
    if any(fields.raw(name) for name in _SINK_FIELDS):
        count = fields.raw("param_sink_number")
        accepted = f"above 0 in a model with {', '.join(_SINK_FIELDS)}, which are of sink attention"
        raise fields.error("param_sink_number", count, accepted)
    return features


def _with_sinks(fields: Fields, features: Features) -> Features:
    _refuse_biases(fields, features, "false with sinks, which have none released")
    nope = fields.integer("qk_nope_dim", low=0, high=MAX_SIZE)
    rope = fields.integer("qk_rope_dim", low=2, high=MAX_SIZE)
    stated = fields.optional_integer("head_dim", low=2, high=MAX_SIZE)
    if stated not in (None, nope + rope):
        raise fields.error("head_dim", stated, f"qk_nope_dim + qk_rope_dim, {nope + rope}")
    return replace(
        features,
        k_norm=True,
        fused_qkv=True,
        head_dim=nope + rope,
        v_head_dim=fields.integer("v_channels", low=1, high=MAX_SIZE),
        rope_dim=rope,
        rope_interleaved=fields.flag("rope_interleave", True),
        sinks=SinkConfig(
            count=_sink_count(fields), with_value=fields.flag("param_sink_with_value", False)
        ),
    )


def _latent(fields: Fields, features: Features) -> Features:
    _refuse_biases(fields, features, "false with latent attention")
    mla = MLAConfig(
        q_lora_rank=fields.optional_integer("q_lora_rank", low=1, high=MAX_SIZE),
        kv_lora_rank=fields.integer("kv_lora_rank", low=1, high=MAX_SIZE),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", low=1, high=MAX_SIZE),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", low=2, high=MAX_SIZE),
        v_head_dim=fields.integer("v_head_dim", low=1, high=MAX_SIZE),
    )
    fields.raw("head_dim")  # Of the rotated part, where it is stated; the four above decide.
    return replace(
        features,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        rope_interleaved=fields.flag("rope_interleave", True),
        sinks=_latent_sinks(fields),
        mla=mla,
    )


def _refuse_biases(fields: Fields, features: Features, accepted: str) -> None:
    if features.o_bias:
        raise fields.error("attention_bias", True, accepted)
    if features.qkv_bias:
        raise fields.error("qkv_bias", True, accepted)


def _latent_sinks(fields: Fields) -> SinkConfig | None:
    count = _sink_count(fields)
    if not count:
        return None
    # Readers disagree on what a missing field means here: some look for the tensor anyway.
    if fields.raw("param_sink_with_value") is None:
        raise fields.error("param_sink_with_value", None, "stated as true or false")
    return SinkConfig(count=count, with_value=fields.flag("param_sink_with_value", False))


def _refuse_encoder(fields: Fields) -> None:
    if fields.flag("is_causal", True):
        return
    accepted = "true: torpor generates text, which needs causal attention"
    if _sink_count(fields):
        accepted = "true: sinks (param_sink_number) need causal attention"
    raise fields.error("is_causal", False, accepted)


def _sink_count(fields: Fields) -> int:
    return fields.integer("param_sink_number", 0, low=0, high=MAX_SIZE)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """``interleaved_sliding_window``: one window for all layers, or a cycle over them."""
    value = fields.raw("interleaved_sliding_window")
    cycle: list[int | None] = []
    entries: list[object] = value if isinstance(value, list) and value else [value]
    for window in entries:
        if window is None:
            cycle.append(None)
        elif type(window) is int and 1 <= window <= MAX_SIZE:
            cycle.append(window)
        else:
            accepted = f"a window of 1 to {MAX_SIZE} tokens, or a list of such"
            raise fields.error("interleaved_sliding_window", value, accepted)
    return tuple(cycle[layer % len(cycle)] for layer in range(layers))


def _experts(fields: Fields, layers: int) -> MoEConfig | None:
    """The mixture with sigmoid scores of the 72B of December 2025 and of Ultra."""
    experts = fields.optional_integer("n_routed_experts", low=1, high=MAX_EXPERTS)
    if experts is None:
        return None
    inner = fields.integer("moe_intermediate_size", low=1, high=MAX_SIZE)
    for name in ("n_group", "topk_group", "num_expert_group"):
        fields.exactly(name, 1)
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    if not (fields.states("first_k_dense_replace") or fields.states("mlp_only_layers")):
        raise fields.error("first_k_dense_replace", None, "the number of layers before experts")
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", low=1, high=experts),
        intermediate_size=inner,
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        layers=_sparse_layers(fields, layers),
        routing="sigmoid",
        correction_bias=fields.flag("router_enable_expert_bias", False),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        shared_intermediate_size=_shared_size(fields, inner),
    )


def _grouped_experts(fields: Fields, layers: int) -> MoEConfig:
    """The mixture of grouped experts of 2025 (Tang et al. 2025, "Pangu Pro MoE")."""
    experts = fields.integer("n_routed_experts", low=1, high=MAX_EXPERTS)
    chosen = fields.integer("num_experts_per_tok", low=1, high=experts)
    if experts % chosen:
        raise fields.error(
            "num_experts_per_tok", chosen, f"a divisor of the {experts} experts, one per group"
        )
    routing: Routing = "grouped"
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", low=1, high=MAX_SIZE),
        norm_topk_prob=False,
        layers=_sparse_layers(fields, layers),
        routing=routing,
        router_scale=True,
        shared_intermediate_size=fields.integer(
            "shared_expert_intermediate_size", 0, low=0, high=MAX_SIZE
        ),
        shared_name="shared_expert",
    )


def _sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """``first_k_dense_replace``, or the explicit ``mlp_only_layers`` of older files.

    A first of 0 makes every layer sparse, as vLLM reads it; Huawei's own files for the second
    generation read it as none.
    """
    first = fields.optional_integer("first_k_dense_replace", low=0, high=layers)
    dense = set(fields.indices("mlp_only_layers", layers))
    if first is not None and dense and dense != set(range(first)):
        accepted = f"the layers that first_k_dense_replace, {first}, says, or absent"
        raise fields.error("mlp_only_layers", sorted(dense), accepted)
    return frozenset(range(first or 0, layers)) - dense


def _shared_size(fields: Fields, inner: int) -> int:
    """``n_shared_experts`` experts' width, or the width itself as older files state it."""
    count = fields.optional_integer("n_shared_experts", low=0, high=MAX_SIZE)
    stated = fields.optional_integer("shared_expert_intermediate_size", low=0, high=MAX_SIZE)
    if count is None:
        return stated or 0
    if stated not in (None, count * inner):
        raise fields.error(
            "shared_expert_intermediate_size", stated, f"{count} experts of {inner} elements each"
        )
    return count * inner
