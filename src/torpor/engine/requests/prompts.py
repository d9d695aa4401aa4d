"""What callers may pass as prompts and parameters, brought into one checked form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torpor.errors import PromptTooLongError, RequestError, shown
from torpor.params import SamplingParams

if TYPE_CHECKING:
    from torpor.engine.text.tokenizer import Tokenizer

_KEYS = frozenset({"prompt", "prompt_token_ids"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised and checked."""

    text: str | None
    """None when the caller gave token ids alone."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model."""

    tokenizer: Tokenizer
    vocab_size: int
    """Ids at or above this one have no embedding row."""
    max_model_len: int
    """Positions of prompt and completion together."""
    max_logprobs: int = 20
    """The most log probabilities per token that a request may ask for; -1 for no limit."""

    def read_all(self, prompts: object) -> list[Prompt]:
        """Read ``generate``'s argument.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}`` or
                ``{"prompt_token_ids": ids}``, or a list of any of these. An empty list is a batch
                of no prompts.

        Raises:
            RequestError: wrong type, unknown key, empty prompt, or a token id out of range.
            PromptTooLongError: no room is left for a token.
        """
        if isinstance(prompts, str | Mapping) or _is_ids(prompts):
            return [self._read(prompts, "the prompt")]
        if not isinstance(prompts, list | tuple):
            raise RequestError(
                f"prompts is {shown(prompts, 80)}; give a string, token ids, "
                "{'prompt': ...}, {'prompt_token_ids': ...} or a list of them"
            )
        return [self._read(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]

    def read(self, prompt: object) -> Prompt:
        """Read one prompt; a list is its token ids.

        Raises:
            RequestError, PromptTooLongError: as ``read_all``.
        """
        return self._read(prompt, "the prompt")

    def read_chat(self, text: str, name: str) -> Prompt:
        """Read the text that a chat template made; it holds its special tokens already."""
        return Prompt(text, self._checked(self.tokenizer.encode_chat(text), name))

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that this model cannot follow.

        Raises:
            RequestError: a token id is outside the vocabulary, or more log probabilities are asked
                for than the engine gives.
        """
        params.check_token_ids(self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if count is None or self.max_logprobs == -1:
            return
        if count == -1 or count > self.max_logprobs:
            raise RequestError(
                f"{name} is {shown(count, 80)}, and this engine gives at most {self.max_logprobs} "
                "per token; lower it, or raise max_logprobs"
            )

    def _read(self, prompt: object, name: str) -> Prompt:
        if isinstance(prompt, str):
            return self._from_text(prompt, name)
        if isinstance(prompt, Mapping):
            return self._from_mapping(prompt, name)
        if _is_ids(prompt) or (isinstance(prompt, list | tuple) and not prompt):
            return Prompt(None, self._checked(prompt, name))
        raise RequestError(
            f"{name} is {shown(prompt, 80)}; give a string, token ids, {{'prompt': ...}} or "
            "{'prompt_token_ids': ...}"
        )

    def _from_text(self, text: str, name: str) -> Prompt:
        if not text:
            raise RequestError(f"{name} is an empty string; give at least one character")
        return Prompt(text, self._checked(self.tokenizer.encode(text), name))

    def _from_mapping(self, prompt: Mapping[Any, Any], name: str) -> Prompt:
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown or not prompt:
            raise RequestError(
                f"{name} has the keys {shown(list(prompt), 80)}; give 'prompt' (text) or "
                "'prompt_token_ids'"
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"{name} has 'prompt' {shown(text, 80)}; give a string")
        if "prompt_token_ids" in prompt:
            return Prompt(text, self._checked(prompt["prompt_token_ids"], name))
        return self._from_text(text or "", name)

    def _checked(self, ids: object, name: str) -> tuple[int, ...]:
        """Token ids as plain ints, in range, at least one, and short enough."""
        if getattr(ids, "is_meta", False):
            raise RequestError(f"{name} is a tensor on meta, without content; give its values")
        values = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(values, list | tuple) or not all(_is_id(value) for value in values):
            raise RequestError(f"{name} has token ids {shown(values, 80)}; give a list of integers")
        token_ids = tuple(int(value) for value in values)
        if not token_ids:
            raise RequestError(f"{name} has no tokens; give at least one")
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{name} has token id {shown(token_id, 80)} at index {index}; the vocabulary "
                    f"has ids 0 to {self.vocab_size - 1}"
                )
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"{name} has {len(token_ids)} tokens and max_model_len is {self.max_model_len}, "
                f"which leaves room for {self.max_model_len - 1} and one answer token; "
                "shorten it or raise max_model_len"
            )
        return token_ids


def check_request_options(request_id: object, priority: object, cache_salt: object) -> None:
    """Check what comes with a request beside its prompt and parameters.

    Raises:
        RequestError: one of them has the wrong type.
    """
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError(f"request_id is {shown(request_id, 80)}; give a string, or None")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority is {shown(priority, 80)}; give a whole number, lower first")
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt is {shown(cache_salt, 80)}; give a string, '' for none")


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One set of parameters per prompt.

    Args:
        params: None for the defaults, one set for all prompts, or a list with one per prompt.
        num_prompts: how many prompts there are.

    Raises:
        RequestError: wrong type, or a list of another length.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple):
        raise RequestError(
            f"sampling_params is {shown(params, 80)}; give SamplingParams or a list of them"
        )
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(params)} entries for {num_prompts} prompts; "
            "give one for all or one per prompt"
        )
    for index, entry in enumerate(params):
        if not isinstance(entry, SamplingParams):
            raise RequestError(
                f"sampling_params[{index}] is {shown(entry, 80)}; give SamplingParams"
            )
    return list(params)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_ids(prompt: object) -> bool:
    """Whether this is one prompt as token ids: integers, or an array or tensor of them."""
    if isinstance(prompt, list | tuple):
        return bool(prompt) and all(_is_id(value) for value in prompt)
    return hasattr(prompt, "tolist")
