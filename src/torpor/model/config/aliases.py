"""Field names of openPangu configs: those of today, and how earlier files spell them."""

from __future__ import annotations

from collections.abc import Mapping

from torpor.model.config.fields import Fields

ALIASES: Mapping[str, tuple[str, ...]] = {
    "kv_lora_rank": ("attention_kv_lora_dim",),
    "q_lora_rank": ("attention_q_lora_dim",),
    # Those with "qk_dim" are of latent attention; "qk_nope_dim" and the like are of sink attention.
    "qk_nope_head_dim": ("attention_qk_dim",),
    "qk_rope_head_dim": ("attention_qk_rope_dim",),
    "v_head_dim": ("attention_v_dim",),
    "n_routed_experts": ("num_routed_experts", "num_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "first_k_dense_replace": ("num_dense_layers",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "attention_bias": ("bias",),
}
"""A field's name today, and its earlier names."""


def normalised(fields: Fields) -> Fields:
    """The same fields under the names of today.

    Raises:
        ConfigError: two spellings of one field say different things.
    """
    values = fields.values()
    spelled: dict[str, str] = {}
    for name, spellings in ALIASES.items():
        for spelling in spellings:
            if spelling in values and values.get(name) is None:
                spelled[name] = spelling
            value = values.pop(spelling, None)
            if value is None:
                continue
            stated = values.get(name)
            # True and 1.0 are no whole numbers, though equal to one.
            if stated is not None and (type(stated), stated) != (type(value), value):
                raise fields.error(spelling, value, f"the same as {name}, {stated!r}")
            values[name] = value
    return fields.with_values(values, spelled)
