"""A tiny SentencePiece model, trained on the spot, with the files of an openPangu folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

TURN, END, THINK = "[unused9]", "[unused10]", "[unused16]"
LINES = [
    "the quick brown fox jumps over the lazy dog and sleeps",
    "系统 用户 助手 工具 方法 你好 世界 睡眠 醒来",
    "once upon a time there was a model that slept and woke",
]
CONFIG: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": END,
    "pad_token": "<unk>",
    "unk_token": "<unk>",
    "legacy": True,
    "tokenizer_class": "PanguTokenizer",
}
"""As the family's ``tokenizer_config.json``, without template and added tokens."""


def trained(**options: Any) -> bytes:
    """A byte-level-fallback BPE of 380 pieces; ids 0 to 2 are unknown, begin and end."""
    file = io.BytesIO()
    choices: dict[str, Any] = {
        "vocab_size": 380,
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": [TURN, END, THINK],
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 1.0,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=file, **(choices | options)
    )
    return file.getvalue()


def added(processor: sentencepiece.SentencePieceProcessor) -> dict[str, dict[str, Any]]:
    """The special tokens as ``added_tokens_decoder`` lists them."""
    texts = ["<unk>", "<s>", "</s>", TURN, END, THINK]
    return {str(processor.piece_to_id(text)): {"content": text, "special": True} for text in texts}


def write_pieces(folder: Path, *, model: bytes | None = None, **config: Any) -> Path:
    """``tokenizer.model`` and ``tokenizer_config.json``, with more or other fields."""
    data = trained() if model is None else model
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    values = CONFIG | {"added_tokens_decoder": added(processor)} | config
    (folder / "tokenizer.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
