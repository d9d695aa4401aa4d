"""A GGUF file's byte-level BPE tokenizer, as the two files Hugging Face keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from torpor.errors import CheckpointError, ConfigError
from torpor.model.checkpoints.gguf_header import GgufHeader
from torpor.model.config.fields import Fields

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Token types; the latter two match as a whole before any splitting."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion"), "words"),
        **dict.fromkeys(
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), "digits"
        ),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), "llama3"),
    }
)
"""``tokenizer.ggml.pre`` to the way text is split, as llama.cpp groups them.

``words`` is GPT-2's pattern; ``digits`` cuts out every single digit first; ``llama3`` is Llama 3's
pattern, with which a whole word that is a token is never merged from parts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What goes into ``tokenizer.json`` and ``tokenizer_config.json``."""

    tokenizer_json: str
    tokenizer_config: Mapping[str, object]
    vocab_size: int


def build_tokenizer(header: GgufHeader) -> TokenizerFiles:
    """Rebuild a tokenizer from GGUF metadata.

    A byte for which the vocabulary has no token is left out of the prompt, as llama.cpp does it.
    SmolLM2's has none for six control characters, and for lead bytes of planes that hold no
    characters yet.

    Raises:
        CheckpointError: the vocabulary or the merges are damaged.
        ConfigError: the tokenizer's kind is not byte-level BPE, or its way of splitting is unknown.
    """
    fields = Fields(header.metadata, str(header.path))
    split = _split_kind(fields)
    tokens = _strings(header, "tokenizer.ggml.tokens")
    tokenizer = _bpe(header, tokens, ignore_merges=split == "llama3")
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    special = _special_tokens(fields, tokens)
    _add_whole_tokens(tokenizer, header, tokens, set(special.values()))
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", split == "llama3")
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    if add_bos or add_eos:
        bos = _required(special, "bos_token", fields) if add_bos else None
        eos = _required(special, "eos_token", fields) if add_eos else None
        tokenizer.post_processor = _template(tokenizer, bos, eos)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        **special,
    }
    template = fields.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        tokenizer_config=MappingProxyType(config),
        vocab_size=len(tokens),
    )


def _split_kind(fields: Fields) -> str:
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f"{fields.where}: tokenizer.ggml.model is {model!r:.80}; torpor rebuilds 'gpt2' "
            "(byte-level BPE): use the model's folder with its tokenizer.json"
        )
    return PRE_TOKENIZERS[fields.choice("tokenizer.ggml.pre", PRE_TOKENIZERS)]


def _strings(header: GgufHeader, key: str) -> list[str]:
    value = header.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise CheckpointError(
            f"{header.path}: {key} is {value!r:.60}, not a list of strings; fetch the file again"
        )
    return value


def _bpe(header: GgufHeader, tokens: Sequence[str], *, ignore_merges: bool) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"{header.path}: the vocabulary of {len(tokens)} tokens repeats "
            f"{len(tokens) - len(vocabulary)} of them; fetch the file again"
        )
    merges = [_merge(header, merge) for merge in _strings(header, "tokenizer.ggml.merges")]
    try:
        return Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception for merges of unknown tokens
        raise CheckpointError(
            f"{header.path}: vocabulary and merges do not fit together ({error}); "
            "fetch the file again"
        ) from error


def _merge(header: GgufHeader, merge: str) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not first or not space or not second:
        raise CheckpointError(
            f"{header.path}: merge {merge!r:.80} is not two tokens; fetch the file again"
        )
    return first, second


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    if split == "words":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    first: pre_tokenizers.PreTokenizer
    if split == "digits":
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "digits")
    return pre_tokenizers.Sequence([first, second])


def _special_tokens(fields: Fields, tokens: Sequence[str]) -> dict[str, str]:
    """The tokens that have a role, by their Hugging Face key."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {}
    for role, key in roles.items():
        name = f"tokenizer.ggml.{key}_token_id"
        index = fields.optional_integer(name, low=0, high=len(tokens) - 1)
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    return special


def _required(special: Mapping[str, str], role: str, fields: Fields) -> str:
    if role not in special:
        raise ConfigError(
            f"{fields.where}: prompts are to have a {role}, but none is named; "
            "use the model's folder with its tokenizer.json"
        )
    return special[role]


def _add_whole_tokens(
    tokenizer: Tokenizer, header: GgufHeader, tokens: Sequence[str], special: set[str]
) -> None:
    """Register control and user-defined tokens, in vocabulary order, so that none is ever split."""
    kinds = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.token_type does not match {len(tokens)} tokens; "
            "fetch the file again"
        )
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL or token in special:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])


def _template(
    tokenizer: Tokenizer, bos: str | None, eos: str | None
) -> processors.TemplateProcessing:
    """Put the beginning and end tokens around every prompt."""
    before, after = [bos] if bos else [], [eos] if eos else []
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
