"""A model's config: the Hugging Face ``config.json``, normalised and checked.

Nothing that could change the logits is ignored: an unknown architecture, a rope scaling or a
switched-on field that torpor does not know is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigError
from torpor.model.fields import Fields, read_json_object

ARCHITECTURES = ("LlamaForCausalLM",)
"""The architectures torpor runs, by their name in ``config.json``."""

ROPE_KINDS = ("default", "linear", "llama3")
"""The rope scalings torpor computes."""

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes a checkpoint may name."""

_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096

_HARMLESS = frozenset(
    {
        # bookkeeping
        "transformers_version",
        "transformers.js_config",
        "name_or_path",
        "is_llama_config",
        "tokenizer_class",
        "problem_type",
        "id2label",
        "label2id",
        "finetuning_task",
        "task_specific_params",
        # training and execution
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
class RopeConfig:
    """Rotary position embedding: base wavelength and scaling."""

    theta: float = 10000.0
    kind: str = "default"
    """One of `ROPE_KINDS`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Context length before scaling, in tokens; read by llama3 only."""


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
    max_position_embeddings: int
    """Longest context in tokens."""
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False
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
    architecture = _architecture(fields)
    heads = fields.integer("num_attention_heads", low=1, high=_MAX_SIZE)
    hidden_size = fields.integer("hidden_size", low=1, high=_MAX_SIZE)
    context = fields.integer("max_position_embeddings", low=1, high=_MAX_SIZE)
    fields.choice("hidden_act", ("silu",), default="silu")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", low=1, high=_MAX_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", low=1, high=_MAX_SIZE),
        num_hidden_layers=fields.integer("num_hidden_layers", low=1, high=_MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(fields, heads),
        head_dim=_head_dim(fields, hidden_size, heads),
        max_position_embeddings=context,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=fields.optional_integer("bos_token_id", low=0, high=_MAX_SIZE),
        eos_token_ids=_eos_token_ids(fields, generation),
        dtype=_dtype(fields),
    )
    fields.refuse_unread(_HARMLESS)
    return config


def _architecture(fields: Fields) -> str:
    value = fields.raw("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
        raise fields.error("architectures", value, f"a list of one name; known are {known}")
    if value[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{fields.where}: architecture {value[0]!r} is unknown; torpor runs {known}"
        )
    fields.choice("model_type", ("llama",), default="llama")
    return value[0]


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads, low=1, high=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    return kv_heads


def _head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", low=2, high=_MAX_SIZE)
    if head_dim is None:
        if hidden_size % heads:
            raise fields.error("hidden_size", hidden_size, f"a multiple of {heads} attention heads")
        head_dim = hidden_size // heads
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "even, because rope rotates pairs")
    return head_dim


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.raw("dtype") is not None else "torch_dtype"
    return fields.choice(name, DTYPES, default="float32")


def _eos_token_ids(fields: Fields, generation: Mapping[str, object]) -> tuple[int, ...]:
    own = fields.ids("eos_token_id")
    other = Fields(generation, f"generation_config.json beside {fields.where}")
    return tuple(dict.fromkeys(other.ids("eos_token_id") or own))


def _rope(fields: Fields) -> RopeConfig:
    """Rope in either style: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``."""
    new, old = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    if new and old and new != old:
        raise fields.error("rope_scaling", old, "absent when rope_parameters says something else")
    fields.exactly("partial_rotary_factor", 1.0)
    theta = fields.number("rope_theta", 10000.0)
    values = new or old or {}
    if not isinstance(values, dict):
        raise fields.error("rope_parameters" if new else "rope_scaling", values, "an object")
    rope = Fields(values, f"{fields.where}: {'rope_parameters' if new else 'rope_scaling'}")
    return _rope_parameters(rope, theta, explicit=fields.raw("rope_theta") is not None)


def _rope_parameters(rope: Fields, theta: float, *, explicit: bool) -> RopeConfig:
    own_theta = rope.number("rope_theta", theta)
    if explicit and own_theta != theta:
        raise rope.error("rope_theta", own_theta, f"the same as the config's rope_theta, {theta}")
    rope.exactly("partial_rotary_factor", 1.0)
    kind = _rope_kind(rope)
    config = RopeConfig(theta=own_theta, kind=kind)
    if kind == "linear":
        config = RopeConfig(theta=own_theta, kind=kind, factor=rope.number("factor"))
    elif kind == "llama3":
        config = RopeConfig(
            theta=own_theta,
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer(
                "original_max_position_embeddings", low=1, high=_MAX_SIZE
            ),
        )
        if config.high_freq_factor <= config.low_freq_factor:
            high = config.high_freq_factor
            raise rope.error("high_freq_factor", high, f"above {config.low_freq_factor}")
    rope.refuse_unread(())
    return config


def _rope_kind(rope: Fields) -> str:
    """The scaling's name, under its present key or under the one older files use."""
    old = rope.choice("type", ROPE_KINDS, default="default")
    kind = rope.choice("rope_type", ROPE_KINDS, default=old)
    if rope.raw("type") is not None and kind != old:
        raise rope.error("rope_type", kind, f"the same as type, {old!r}")
    return kind
