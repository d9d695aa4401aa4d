"""``LLM``: a model that generates, sleeps and wakes, in one process, one call at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torpor.engine.control import SleepControl
from torpor.engine.generation import EndRules, GenerationLoop, Request
from torpor.engine.kv import KVCache
from torpor.engine.options import (
    resolve_dtype,
    resolve_max_model_len,
    resolve_seed,
    set_num_threads,
)
from torpor.engine.prompts import Prompt, PromptReader, params_for
from torpor.engine.runner import ModelRunner
from torpor.engine.sampler import child_seed
from torpor.engine.text import Tokenizer
from torpor.engine.watched_source import WatchedSource
from torpor.errors import ArgumentError, CheckpointError, RequestError
from torpor.model.load import build_model
from torpor.model.resolve import resolve_model
from torpor.sleep.building import building
from torpor.sleep.sleeper import Sleeper

if TYPE_CHECKING:
    import torch

    from torpor.model.files import ModelFiles, Progress
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams

    Params = SamplingParams | Sequence[SamplingParams] | None
    Steps = Generator[str, None, RequestOutput]


class LLM(SleepControl):
    """A model with its tokenizer, its KV cache and its sleeper.

    Calls may come from any thread; one lock lets them through one at a time. ``generate`` and
    ``chat`` hold it until they return, so a ``sleep`` from another thread waits for them and finds
    nothing in flight. ``stream`` holds it for each step only.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        seed: int = 0,
        num_threads: int | None = None,
        strict: bool = True,
        spill_dir: str | Path | None = None,
        poison: int | bool | None = None,
        progress: Progress | None = None,
        on_foreign_write: str = "error",
        host_copy: str = "defer",
        check_nan: bool = True,
    ) -> None:
        """Load a model and leave it awake.

        Args:
            model: a name such as "smollm2", or a model folder.
            dtype: what weights and KV cache are held and computed in; "auto" is float32.
            max_model_len: positions for prompt and completion together; None for the smaller of
                the model's context and 2048.
            seed: where requests without a seed of their own get theirs from.
            num_threads: threads torch computes with, in the whole process; None leaves it alone.
            strict: refuse a model with tensors that no owner declared.
            spill_dir: folder for host copies that no checkpoint file can serve as.
            poison: fill memory that comes back with NaN patterns before it is restored; None asks
                the environment, see ``Sleeper``.
            progress: told of the stages of ``resolve_model`` and then of ``load``.
            on_foreign_write: what sleep does when a weight was written outside the door.
            host_copy: when changed weights are copied to the host, see ``Sleeper``.
            check_nan: refuse weights that contain NaN.

        Raises:
            ArgumentError, ConfigError: an argument or the model's config cannot be used.
            ModelNotFoundError, CheckpointError, WeightsError: the model cannot be loaded.
            OutOfMemoryError: it does not fit.
        """
        self._seed = resolve_seed(seed)
        torch_dtype = resolve_dtype(dtype)
        set_num_threads(num_threads)
        if not isinstance(model, str | os.PathLike):
            raise ArgumentError(f"model is {model!r}; give a name or the path of a folder")
        files = resolve_model(model, progress=progress)
        config = files.config
        length = resolve_max_model_len(max_model_len, config.max_position_embeddings)
        self._tokenizer = _tokenizer(files)
        source = WatchedSource(files.source, progress)
        with building() as records:
            module = build_model(files, torch_dtype)
        sleeper = Sleeper(
            module,
            reload=source,
            slices=module.slice_table(),
            records=records,
            spill_dir=spill_dir,
            poison=poison,
            strict=strict,
            on_foreign_write=on_foreign_write,
            host_copy=host_copy,
            check_nan=check_nan,
        )
        super().__init__(str(model), sleeper)
        try:
            self._kv = KVCache.allocate(sleeper, config, length, torch_dtype)
            sleeper.reload_weights()
            source.unwatch()
        except BaseException:
            self.close()
            raise
        own_eos = self._tokenizer.eos_token_id
        eos = frozenset(config.eos_token_ids) | ({own_eos} if own_eos is not None else set())
        rules = EndRules(eos_token_ids=eos, max_model_len=length)
        runner = ModelRunner(module, self._kv, sleeper=sleeper, ready=self._require_ready)
        self._loop = GenerationLoop(runner, self._tokenizer, rules)
        self._reader = PromptReader(self._tokenizer, config.vocab_size, length)
        self._request_ids = itertools.count()

    def generate(
        self, prompts: object, sampling_params: Params = None, *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}``,
                ``{"prompt_token_ids": ids}``, or a list of any of these.
            sampling_params: one for all prompts, or a list with one for each; None for the
                defaults of ``SamplingParams``.
            use_tqdm: accepted for code written for vLLM; no bar is drawn.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            RequestError: a prompt or a parameter is refused; nothing has run.
            PromptTooLongError: a prompt does not fit; nothing has run.
            AsleepError: asleep or paused; call ``wake_up()``.
            WeightsIncompleteError: weights are missing; reload or update them.
        """
        with self._lock:
            self._require_open()
            read = self._reader.read_all(prompts)
            return self._run_all(read, params_for(sampling_params, len(read)))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template.

        Args:
            messages: one conversation, a list of ``{"role": str, "content": str}``, or a list of
                conversations.
            sampling_params: as for ``generate``, per conversation.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: end the prompt with the header of the assistant's turn.
            use_tqdm: accepted for code written for vLLM; no bar is drawn.

        Returns, raises:
            As ``generate``; messages that the template refuses are a RequestError.
        """
        with self._lock:
            self._require_open()
            read = [
                self._read_chat(
                    conversation, chat_template, add_generation_prompt=add_generation_prompt
                )
                for conversation in _conversations(messages)
            ]
            return self._run_all(read, params_for(sampling_params, len(read)))

    def stream(self, prompt: object, sampling_params: SamplingParams | None = None) -> Steps:
        """Complete one prompt and hand out the text as it comes.

        Args:
            prompt: one prompt, as for ``generate``.
            sampling_params: with ``n=1``.

        Returns:
            A generator of pieces of text; its return value is the finished output. Between two
            pieces the model may be put to sleep or used otherwise: then the stream raises
            AsleepError or StateError at its next step.

        Raises:
            RequestError: at once, as ``generate``.
        """
        with self._lock:
            self._require_open()
            return self._stream(self._reader.read_all(prompt), sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> Steps:
        """Answer one conversation and hand out the text as it comes; else as ``stream``."""
        with self._lock:
            self._require_open()
            read = self._read_chat(messages, chat_template, add_generation_prompt=True)
            return self._stream([read], sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def status(self) -> dict[str, Any]:
        """Facts about the model and its memory, JSON-able; sizes in bytes. Never waits for a
        generation."""
        return {
            "max_model_len": self._kv.capacity,
            "kv_cache_bytes": self._kv.nbytes,
            **super().status(),
        }

    def _run_all(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        for entry in params:
            self._reader.check_params(entry)
        if prompts:
            self._require_ready()
        requests = [self._request(*pair) for pair in zip(prompts, params, strict=True)]
        return [_finished(self._loop.steps(request)) for request in requests]

    def _stream(self, prompts: list[Prompt], params: SamplingParams | None) -> Steps:
        if len(prompts) != 1:
            raise RequestError(f"a stream takes one prompt, not {len(prompts)}; use generate")
        (entry,) = params_for(params, 1)
        if entry.n != 1:
            raise RequestError(f"n is {entry.n}; a stream has one completion, use generate")
        self._reader.check_params(entry)
        self._require_ready()
        return self._locked(self._loop.steps(self._request(prompts[0], entry)))

    def _locked(self, steps: Steps) -> Steps:
        while True:
            with self._lock:
                try:
                    text = next(steps)
                except StopIteration as done:
                    output: RequestOutput = done.value
                    return output
            if text:
                yield text

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        number = next(self._request_ids)
        seed = child_seed(self._seed, number + 1) if params.seed is None else params.seed
        return Request(request_id=str(number), prompt=prompt, params=params, seed=seed)

    def _read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        *,
        add_generation_prompt: bool,
    ) -> Prompt:
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=add_generation_prompt
        )
        return self._reader.read_chat(text, "the conversation")


def _tokenizer(files: ModelFiles) -> Tokenizer:
    if files.tokenizer_json is None:
        raise CheckpointError(
            f"{files.folder} has no tokenizer.json; add the file of the model's tokenizer"
        )
    return Tokenizer(files.tokenizer_json, files.tokenizer_config_json, files.chat_template)


def _conversations(messages: Sequence[Any]) -> list[Any]:
    """A list of conversations from one conversation or several."""
    several = isinstance(messages, list | tuple) and messages
    if several and all(isinstance(entry, list | tuple) for entry in messages):
        return list(messages)
    return [messages]


def _finished(steps: Steps) -> RequestOutput:
    """Run a request to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            output: RequestOutput = done.value
            return output
