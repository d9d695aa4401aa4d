"""A model's config: the Hugging Face ``config.json``, normalised and checked.

Nothing that could change the logits is ignored: an unknown architecture, a rope scaling or a
switched-on field that torpor does not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigError
from torpor.model.config.families import FAMILIES, Family
from torpor.model.config.features import Features
from torpor.model.config.fields import MAX_LAYERS, MAX_SIZE, Fields, read_json_object
from torpor.model.config.rope_config import RopeConfig as RopeConfig
from torpor.model.config.rope_config import read_rope

ARCHITECTURES = tuple(FAMILIES)
"""The architectures torpor runs, by their name in ``config.json``."""

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes a checkpoint may name."""


_HARMLESS = frozenset(
    {
        # bookkeeping
        "transformers_version",
        "transformers.js_config",
        "name_or_path",
        "is_llama_config",
        "auto_map",
        "tokenizer_class",
        "problem_type",
        "id2label",
        "label2id",
        "finetuning_task",
        "task_specific_params",
        # training and execution
        "output_router_logits",
        "router_aux_loss_coef",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "pretraining_tp",
        "torch_dtype",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "torchscript",
        "chunk_size_feed_forward",
        # special tokens
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        # generation defaults
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    }
)
"""Fields that change no logit at inference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder-only model computes. Field names follow Hugging Face where it has them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Head size of queries and keys."""
    v_head_dim: int
    """Head size of values."""
    rope_dim: int
    """Elements of a head that are rotated: the first ones, under latent attention the last."""
    max_position_embeddings: int
    """Longest context in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    features: Features
    """What the layers are made of beside the sizes."""
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Generation ends after any of these; empty means it never ends by itself."""
    dtype: str = "float32"
    """The checkpoint's dtype, one of `DTYPES`."""


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` and, when present, ``generation_config.json`` of a model folder.

    Raises:
        ConfigError: a file is missing, damaged or of the wrong type; a field is missing or out of
            range; an architecture or a feature is unknown. The message names field and value.
    """
    generation = folder / "generation_config.json"
    return parse_config(
        read_json_object(folder / "config.json"),
        read_json_object(generation) if generation.exists() else {},
        where=str(folder / "config.json"),
    )


def parse_config(
    values: Mapping[str, object], generation: Mapping[str, object], *, where: str
) -> ModelConfig:
    """Normalise the content of ``config.json``.

    Args:
        values: the config.
        generation: the content of ``generation_config.json``; its stop tokens win.
        where: the file's name, for messages.

    Raises:
        ConfigError: as `load_config`.
    """
    fields = Fields(values, where)
    architecture, family = _family(fields)
    fields = family.normalise(fields)
    heads = fields.integer("num_attention_heads", low=1, high=MAX_SIZE)
    hidden_size = fields.integer("hidden_size", low=1, high=MAX_SIZE)
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    fields.choice("hidden_act", ("silu",), default="silu")
    features = family.read(fields, layers)
    head_dim = _head_dim(fields, features, hidden_size, heads)
    rope_dim = head_dim if features.rope_dim is None else features.rope_dim
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", low=1, high=MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", low=1, high=MAX_SIZE),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(fields, heads, needed=family.needs_kv_heads),
        head_dim=head_dim,
        v_head_dim=head_dim if features.v_head_dim is None else features.v_head_dim,
        rope_dim=rope_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", low=1, high=MAX_SIZE),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, share=rope_dim / head_dim, needs_theta=family.needs_theta),
        features=features,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=fields.optional_integer("bos_token_id", low=0, high=MAX_SIZE),
        eos_token_ids=_eos_token_ids(fields, generation),
        dtype=_dtype(fields),
    )
    fields.refuse_unread(_HARMLESS)
    return config


def _family(fields: Fields) -> tuple[str, Family]:
    value = fields.raw("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
        raise fields.error("architectures", value, f"a list of one name; known are {known}")
    family = FAMILIES.get(value[0])
    if family is None:
        raise ConfigError(
            f"{fields.where}: architecture {value[0]!r} is unknown; torpor runs {known}"
        )
    if family.model_types:
        fields.choice("model_type", family.model_types, default=family.model_types[0])
    else:
        fields.text("model_type", "")
    return value[0], family


def _kv_heads(fields: Fields, heads: int, *, needed: bool) -> int:
    default = None if needed and not fields.states("num_key_value_heads") else heads
    kv_heads = fields.integer("num_key_value_heads", default, low=1, high=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    return kv_heads


def _head_dim(fields: Fields, features: Features, hidden_size: int, heads: int) -> int:
    stated = fields.optional_integer("head_dim", low=2, high=MAX_SIZE)
    head_dim = features.head_dim if stated is None or features.mla is not None else stated
    if head_dim is None:
        if hidden_size % heads:
            raise fields.error("hidden_size", hidden_size, f"a multiple of {heads} attention heads")
        head_dim = hidden_size // heads
    rotated = head_dim if features.rope_dim is None else features.rope_dim
    if rotated % 2:
        part = "qk_rope_dim" if features.mla is None else "qk_rope_head_dim"
        name = "head_dim" if features.rope_dim is None else part
        raise fields.error(name, rotated, "even, because rope rotates pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.raw("dtype") is not None else "torch_dtype"
    return fields.choice(name, DTYPES, default="float32")


def _eos_token_ids(fields: Fields, generation: Mapping[str, object]) -> tuple[int, ...]:
    own = fields.ids("eos_token_id")
    other = Fields(generation, f"generation_config.json beside {fields.where}")
    return tuple(dict.fromkeys(other.ids("eos_token_id") or own))
