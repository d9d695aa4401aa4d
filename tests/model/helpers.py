"""Plain stand-ins and tiny models for the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from torpor.model.attention.interface import AttentionSpec
from torpor.model.checkpoints.load import checkpoint_shapes, new_model
from torpor.model.config.config import parse_config
from torpor.model.layers.decoder import DecoderForCausalLM

if TYPE_CHECKING:
    from torpor.sleep.source import WeightSource

TINY: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MISTRAL: Mapping[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: Mapping[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: Mapping[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


class OneSequence:
    """The simplest attention context: one sequence, one growing tensor a layer."""

    holds_sinks = False

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> torch.Tensor:
        if spec.layer in self.layers:
            k_old, v_old = self.layers[spec.layer]
            k_THD, v_THD = torch.cat((k_old, k_THD)), torch.cat((v_old, v_THD))
        self.layers[spec.layer] = (k_THD, v_THD)
        num_new, num_total = len(q_THD), len(k_THD)
        plain = spec.window is None or num_total <= spec.window
        causal = plain and 1 < num_new == num_total
        masked = not causal and not (plain and num_new == 1)
        out_HTD = functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None],
            k_THD.transpose(0, 1)[None],
            v_THD.transpose(0, 1)[None],
            attn_mask=seen(num_new, spec, num_total) if masked else None,
            is_causal=causal,
            scale=spec.scale,
            enable_gqa=True,
        )[0]
        return out_HTD.transpose(0, 1)

    def attend_with_lse(
        self,
        spec: AttentionSpec,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_THD = self.attend(spec, q_THD, k_THD, v_THD)
        k_all = self.layers[spec.layer][0]
        k_HSD = k_all.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1).transpose(0, 1)
        scores_HTS = q_THD.transpose(0, 1).float() @ k_HSD.float().mT * spec.scale
        hidden_TS = ~seen(len(q_THD), spec, len(k_all))
        lse_HT = scores_HTS.masked_fill(hidden_TS, -torch.inf).logsumexp(-1)
        return out_THD, lse_HT.T


def seen(num_new: int, spec: AttentionSpec, num_total: int) -> torch.Tensor:
    """Which of all tokens each new one sees: bool [num_new, num_total]."""
    back = torch.arange(num_total - num_new, num_total)[:, None] - torch.arange(num_total)
    return (back >= 0) & (back < (spec.window or num_total))


def fill(model: DecoderForCausalLM, source: WeightSource) -> DecoderForCausalLM:
    """Give every parameter ordinary memory and copy the checkpoint's rows into it."""
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            real = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
            fresh.setdefault(id(parameter), nn.Parameter(real, requires_grad=False))
            module.register_parameter(name, fresh[id(parameter)])
    table, parameters = model.slice_table(), dict(model.named_parameters())
    for name, tensor in source.pairs():
        if table.ignores(name):
            continue
        entry = table[name]
        rows = parameters[entry.parameter]
        if entry.length is not None:
            rows = rows[entry.start : entry.start + entry.length]
        assert rows.shape == tensor.shape
        rows.copy_(tensor)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    return model


def random_values(parameter: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    """A parameter like the given one, with memory and random content."""
    real = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return nn.Parameter(real, requires_grad=False)


def logits_of(
    model: DecoderForCausalLM, ids: list[int], attn: OneSequence | None = None, start: int = 0
) -> torch.Tensor:
    """Logits [T, V] of all given tokens."""
    positions = torch.arange(start, start + len(ids))
    hidden = model(torch.tensor(ids), positions, OneSequence() if attn is None else attn)
    return model.compute_logits(hidden)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Transformers' model of a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would leave a thread behind
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model


def random_weights(config: Mapping[str, object], seed: int = 0) -> dict[str, torch.Tensor]:
    """Checkpoint tensors for a config, under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = checkpoint_shapes(new_model(parse_config(config, {}, where="test"), torch.float32))
    return {
        name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, **overrides: object) -> Path:
    """A tiny random model folder with a single weights file."""
    config = {**TINY, **overrides}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config), folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> Path:
    """The same model in two shards with an index."""
    weights = random_weights(TINY)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    names = sorted(weights)
    shards = {
        "model-00001-of-00002.safetensors": names[:8],
        "model-00002-of-00002.safetensors": names[8:],
    }
    for shard, own in shards.items():
        save_file({name: weights[name] for name in own}, folder / shard)
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

BYTE_ALPHABET = sorted(
    {
        *(chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]),
        *(chr(256 + index) for index in range(68)),
    }
)
"""The 256 characters that stand for bytes in a GPT-2 vocabulary."""

GGUF_SPECIALS = ["<|pad|>", "<|begin|>", "<|end|>"]
GGUF_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "i n", "in g"]
GGUF_TOKENS = [
    *GGUF_SPECIALS,
    *BYTE_ALPHABET,
    *(merge.replace(" ", "") for merge in GGUF_MERGES),
    "<tool>",
]
GGUF_TYPES = [3] * len(GGUF_SPECIALS) + [1] * (len(GGUF_TOKENS) - len(GGUF_SPECIALS) - 1) + [4]


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Order each head's rows as GGUF does: the two halves take turns."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, object]:
    """What a converter would write for a config; values are typed by `write_gguf`."""
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": GGUF_TOKENS,
        "tokenizer.ggml.token_type": GGUF_TYPES,
        "tokenizer.ggml.merges": GGUF_MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


GGUF_TINY: Mapping[str, object] = {**TINY, "vocab_size": len(GGUF_TOKENS)}


def write_gguf(
    path: Path,
    *,
    config: Mapping[str, Any] = GGUF_TINY,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> dict[str, torch.Tensor]:
    """Write a tiny GGUF with the library's writer; returns the weights before quantisation.

    Args:
        path: the file.
        config: sizes, as in ``config.json``.
        metadata: entries that replace the usual ones; None leaves an entry out.
        tensors: GGUF tensors that replace the usual ones; None leaves a tensor out.
        kind: type of every matrix; vectors stay float32.
        architecture: ``general.architecture``.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**gguf_metadata(config), **(metadata or {})}.items():
        _add_metadata(writer, key, value)
    weights = random_weights(config)
    arrays: dict[str, np.ndarray[Any, Any] | None] = {}
    for name, tensor in weights.items():
        rows = tensor.numpy()
        if ".q_proj." in name:
            rows = interleave(rows, config["num_attention_heads"])
        elif ".k_proj." in name:
            rows = interleave(rows, config["num_key_value_heads"])
        arrays[gguf_name(name)] = rows
    for name, array in {**arrays, **(tensors or {})}.items():
        if array is not None and array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif array is not None:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
