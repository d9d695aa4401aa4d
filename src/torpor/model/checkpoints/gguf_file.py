"""A GGUF file of the Llama architecture: its config, and its tensors dequantised."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from torpor.errors import CheckpointError, ConfigError
from torpor.model.checkpoints.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from torpor.model.checkpoints.gguf_types import dequantise
from torpor.model.checkpoints.load import checkpoint_shapes, new_model
from torpor.model.config.config import ModelConfig, parse_config
from torpor.model.config.fields import Fields

if TYPE_CHECKING:
    from torpor.model.checkpoints.gguf_types import Values

_TOP = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")

_HARMLESS = frozenset({"rope.scaling.finetuned", "rope.scaling.original_context_length"})
"""Metadata of the architecture that records history and changes no number."""

_MAX = 2**31 - 1


class GgufFile:
    """One GGUF file, its header read and checked; tensors are read one at a time.

    Names and row order are Hugging Face's: GGUF files of this architecture store query and key rows
    interleaved for another way of rotating, and that is undone here.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: the file is damaged, or its tensors are not those of its config.
            ConfigError: the architecture or one of its features is unknown.
        """
        self.header = read_gguf_header(path)
        self.path = path
        self._tensors = _named(self.header)
        self.config_json: Mapping[str, object] = MappingProxyType(
            _config_json(self.header, self._tensors)
        )
        """What ``config.json`` says of this model."""
        self.config: ModelConfig = parse_config(self.config_json, {}, where=str(path))
        _check_fit(path, self.config, self.shapes)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face name and shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def num_parameters(self) -> int:
        """Values of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self._tensors.values())

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read and dequantise one tensor.

        Args:
            name: its Hugging Face name.
            dtype: float32, or bfloat16 rounded from it.

        Raises:
            CheckpointError: the file ended early, the type cannot be dequantised, or a value is
                NaN or infinite.
        """
        info = self._tensors[name]
        values = _read_values(self.path, info)
        num_bad = values.size - int(np.count_nonzero(np.isfinite(values)))
        if num_bad:
            raise CheckpointError(
                f"{self.path}: tensor {info.name!r} holds {num_bad} values that are NaN or "
                "infinite; the file is damaged: fetch it again"
            )
        tensor = torch.from_numpy(values).reshape(info.shape)
        if name.endswith(("q_proj.weight", "q_proj.bias")):
            tensor = _split_pairs(tensor, self.config.num_attention_heads)
        elif name.endswith(("k_proj.weight", "k_proj.bias")):
            tensor = _split_pairs(tensor, self.config.num_key_value_heads)
        return tensor.to(dtype)

    def pairs(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (Hugging Face name, tensor) once; raises as `tensor`."""
        for name in self._tensors:
            yield name, self.tensor(name, dtype)


def _split_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...)."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def _read_values(path: Path, info: GgufTensor) -> Values:
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            raw = file.read(info.nbytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check it") from error
    if len(raw) != info.nbytes:
        raise CheckpointError(f"{path} ended within tensor {info.name!r}; fetch it again")
    try:
        return dequantise(raw, info.shape, info.kind)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: tensor {info.name!r} {error}; convert the model to another type"
        ) from error


def _named(header: GgufHeader) -> dict[str, GgufTensor]:
    return {_hf_name(header.path, name): tensor for name, tensor in header.tensors.items()}


def _hf_name(path: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    raise CheckpointError(
        f"{path} holds tensor {name!r:.80}, which torpor's Llama has no place for and will not "
        "ignore; use the model's safetensors folder, or fetch the file again if it is damaged"
    )


def _check_fit(path: Path, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = checkpoint_shapes(new_model(config, torch.float32))
    for name in sorted(expected.keys() ^ shapes.keys()):
        relation = "lacks" if name in expected else "holds, beyond its own sizes,"
        raise CheckpointError(f"{path} {relation} the tensor for {name!r}; fetch it again")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{path}: the tensor for {name!r} has shape {shapes[name]}, its config asks for "
                f"{shape}; fetch the file again"
            )


def _config_json(header: GgufHeader, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """The metadata as a Hugging Face config."""
    where = str(header.path)
    architecture = Fields(header.metadata, where).text("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{where}: GGUF architecture {architecture!r:.80}; torpor reads 'llama'")
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(f"{where} is one of {parts!r:.20} parts; merge them into one file first")
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    fields = Fields(own, f"{where}: {architecture}")
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{where} holds no token_embd.weight; fetch it again")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(fields),
        "vocab_size": fields.integer("vocab_size", embedding.shape[0], low=1, high=_MAX),
        "rms_norm_eps": _shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields),
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
        **special_ids(header),
    }
    fields.refuse_unread(_HARMLESS)
    return config


def _sizes(fields: Fields) -> dict[str, object]:
    heads = fields.integer("attention.head_count", low=1, high=_MAX)
    hidden_size = fields.integer("embedding_length", low=1, high=_MAX)
    head_dim = fields.integer(
        "attention.key_length", max(hidden_size // heads, 1), low=1, high=_MAX
    )
    for name in ("attention.value_length", "rope.dimension_count"):
        # Values are as long as keys in this architecture, and whole heads are rotated.
        fields.integer(name, head_dim, low=head_dim, high=head_dim)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length", low=1, high=_MAX),
        "num_hidden_layers": fields.integer("block_count", low=1, high=_MAX),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads, low=1, high=heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length", low=1, high=_MAX),
    }


def _rope_scaling(fields: Fields) -> dict[str, object] | None:
    kind = fields.choice("rope.scaling.type", ("none", "linear"), default="none")
    factor = fields.number("rope.scaling.factor", 1.0)
    return {"rope_type": "linear", "factor": _shortest(factor)} if kind == "linear" else None


def special_ids(header: GgufHeader) -> dict[str, object]:
    """The special token ids, under their Hugging Face names; every token that ends a turn ends it.

    Raises:
        ConfigError: an id is not a token id.
    """
    fields = Fields(header.metadata, str(header.path))

    def token_id(name: str) -> int | None:
        return fields.optional_integer(f"tokenizer.ggml.{name}_token_id", low=0, high=_MAX)

    ends = [token_id(name) for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    ids = {"bos_token_id": token_id("bos"), "pad_token_id": token_id("padding")}
    return {**ids, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}


def _shortest(value: float) -> float:
    """The shortest decimal of a number stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
