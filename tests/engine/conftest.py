"""A tiny random Llama folder with a small byte-level tokenizer, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from torpor.engine.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "sleep and wake and sleep again, the same bytes come back",
    "once upon a time there was a model that slept",
]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most 320 tokens; ids 0 to 2 are special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|start|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random checkpoint tensors for ``TINY``, large enough for varied text."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, kv_width = 48, 80, 24
    shapes = {"model.embed_tokens.weight": (320, width), "model.norm.weight": (width,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
            f"{prefix}self_attn.q_proj.weight": (width, width),
            f"{prefix}self_attn.k_proj.weight": (kv_width, width),
            f"{prefix}self_attn.v_proj.weight": (kv_width, width),
            f"{prefix}self_attn.o_proj.weight": (width, width),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
        }
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if "norm" in name
        else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, seed: int) -> Path:
    """A whole model folder."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    save_file(tiny_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights from seed 0."""
    return write_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with weights from seed 1."""
    return write_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    """The tiny model's tokenizer."""
    return Tokenizer(tiny_folder / "tokenizer.json", tiny_folder / "tokenizer_config.json")
