"""``LLM``: the engine for code that calls and waits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torpor.engine.args import EngineOptions, engine_args
from torpor.engine.engine import Engine
from torpor.engine.progress_bar import ProgressBar
from torpor.engine.requests.prompts import Prompt, params_for
from torpor.engine.stream import Stream
from torpor.errors import GenerationError, RequestError, shown
from torpor.params.checks import text_or_none

if TYPE_CHECKING:
    from torpor.engine.requests.request import Request
    from torpor.engine.text.tokenizer import Tokenizer
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams

    Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(Engine):
    """A model with its tokenizer, its KV cache and its sleeper.

    Calls may come from any thread. Threads that generate at the same time share each step; a
    ``sleep`` or an update from another thread takes its turn between two steps.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        """Load a model and leave it awake.

        Args:
            model: a name such as "smollm2", or a model folder.
            options: see `EngineArgs`.

        Raises:
            ArgumentError, ConfigError: an argument or the model's config cannot be used.
            ModelNotFoundError, CheckpointError, WeightsError: the model cannot be loaded.
            OutOfMemoryError: it does not fit.
        """
        super().__init__(engine_args(model, options))

    def generate(
        self,
        prompts: object,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, computed together.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}``,
                ``{"prompt_token_ids": ids}``, or a list of any of these.
            sampling_params: one for all prompts, or a list with one for each; None for the
                defaults of ``SamplingParams``.
            use_tqdm: draw a progress bar, if standard error is a terminal.
            priority: one number per prompt, lower first; read by the priority policy.

        Returns:
            One output per prompt, in the order of the prompts. A ``sleep`` in mode "abort" from
            another thread ends completions early: their finish reason is "abort".

        Raises:
            RequestError: a prompt or a parameter is refused; nothing has run.
            PromptTooLongError: a prompt does not fit; nothing has run.
            AsleepError: asleep or paused; call ``wake_up()``.
            WeightsIncompleteError: weights are missing; reload or update them.
            GenerationError: a request failed while it ran; ``outputs`` holds all answers.
        """
        self._require_open()
        read = self.reader.read_all(prompts)
        return self._run_all(read, params_for(sampling_params, len(read)), use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template.

        Args:
            messages: one conversation, a list of ``{"role": str, "content": str}``, or a list of
                conversations.
            sampling_params: as for ``generate``, per conversation.
            chat_template: Jinja source to use instead of the model's own.
            add_generation_prompt: end the prompt with the header of the assistant's turn.
            chat_template_kwargs: what else the template reads, such as ``enable_thinking``; see
                ``Tokenizer.apply_chat_template``.
            use_tqdm: draw a progress bar, if standard error is a terminal.

        Returns, raises:
            As ``generate``; messages that the template refuses are a RequestError.
        """
        self._require_open()
        read = [
            self._read_chat(
                conversation,
                chat_template,
                chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
            )
            for conversation in _conversations(messages)
        ]
        return self._run_all(read, params_for(sampling_params, len(read)), use_tqdm)

    def stream(self, prompt: object, sampling_params: SamplingParams | None = None) -> Stream:
        """Complete one prompt and hand out the text as it comes.

        Args:
            prompt: one prompt, as for ``generate``.
            sampling_params: with ``n=1``.

        Returns:
            An iterator of pieces of text, see `Stream`.

        Raises:
            RequestError: at once, as ``generate``.
        """
        self._require_open()
        return self._stream(self.reader.read_all(prompt), sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answer one conversation and hand out the text as it comes; else as ``stream``."""
        self._require_open()
        read = self._read_chat(
            messages, chat_template, chat_template_kwargs, add_generation_prompt=True
        )
        return self._stream([read], sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def _run_all(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        ranks = _priorities(priority, len(prompts))
        requests = [
            self.prepare(prompt, entry, priority=rank)
            for prompt, entry, rank in zip(prompts, params, ranks, strict=True)
        ]
        # Reading and compiling needed no turn, so that nobody waited for them.
        with self.turns.take():
            if requests:
                self._require_ready()
            self._run(requests, use_tqdm)
            outputs = [self.output(request) for request in requests]
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            raise GenerationError(
                f"{len(errors)} of {len(requests)} requests failed, the first with: {errors[0]}; "
                "the error's outputs hold every answer",
                outputs,
            ) from errors[0]
        return outputs

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all are finished, giving others their turn in between."""
        bar = ProgressBar(len(requests), wanted=use_tqdm)
        names = [request.request_id for request in requests]
        own = {request.number for request in requests}

        def is_done() -> bool:
            return all(request.finished for request in requests)

        try:
            for request in requests:
                self.submit(request)
            while not is_done():
                self.turns.wait_until(lambda: is_done() or (self.core.can_step and self.may_step()))
                if not is_done():
                    touched = self.core.step()
                    bar.update(sum(entry.finished and entry.number in own for entry in touched))
                    self.turns.pass_on()
        finally:
            # Ctrl-C, or a step that failed: what is left must not run for nobody.
            with self.turns.take():
                self.core.abort(names)
            bar.close()

    def _stream(self, prompts: list[Prompt], params: SamplingParams | None) -> Stream:
        if len(prompts) != 1:
            raise RequestError(f"a stream takes one prompt, not {len(prompts)}; use generate")
        (entry,) = params_for(params, 1)
        if entry.n != 1:
            raise RequestError(f"n is {entry.n}; a stream has one completion, use generate")
        request = self.prepare(prompts[0], entry)
        with self.turns.take():
            self._require_ready()
            self.submit(request)
        return Stream(self, request)

    def _read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        template_kwargs: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool,
    ) -> Prompt:
        text_or_none("chat_template", template)
        text = self.tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=template_kwargs,
        )
        return self.reader.read_chat(text, "the conversation")


def _conversations(messages: Sequence[Any]) -> list[Any]:
    """A list of conversations from one conversation or several."""
    several = isinstance(messages, list | tuple) and messages
    if several and all(isinstance(entry, list | tuple) for entry in messages):
        return list(messages)
    return [messages]


def _priorities(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
    if priority is None:
        return [0] * num_prompts
    if not isinstance(priority, list | tuple) or len(priority) != num_prompts:
        raise RequestError(f"priority is {shown(priority, 80)}; give one whole number per prompt")
    return list(priority)
