"""``torpor generate``: complete one text."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from torpor.errors import RequestError
from torpor.serve.exits import OK
from torpor.serve.loading import loading
from torpor.serve.words import count, duration, printable

if TYPE_CHECKING:
    from torpor.engine.llm import LLM
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams
    from torpor.serve.terminal import Terminal


def generate(
    terminal: Terminal,
    prompt: str | None,
    params: SamplingParams,
    *,
    model: str,
    threads: int | None,
    sink_placement: str,
) -> int:
    """Complete a text and show it; the exit code.

    Raises:
        TorporError: the prompt, the parameters or the model cannot be used.
    """
    text = read_prompt(prompt)
    start_s = time.perf_counter()
    with loading(terminal) as bar:
        from torpor.engine.llm import LLM

        llm = LLM(model, num_threads=threads, sink_placement=sink_placement, progress=bar)
    with llm:
        loaded_s = time.perf_counter()
        output = _complete(terminal, llm, text, params)
        generate_s = time.perf_counter() - loaded_s
    completion = output.outputs[0]
    tokens = len(completion.token_ids)
    if terminal.json_wanted:
        terminal.emit(
            {
                "model": model,
                "prompt": text,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "num_tokens": tokens,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "load_s": loaded_s - start_s,
                "generate_s": generate_s,
                "tokens_per_s": tokens / generate_s,
                "weights_epoch": output.weights_epoch,
            }
        )
    elif terminal.is_watched:
        speed = f"{count(tokens, 'token')} in {duration(generate_s)}"
        terminal.err.print(f"[dim]{speed}, {tokens / generate_s:.1f} tokens/s[/dim]")
    return OK


def read_prompt(prompt: str | None) -> str:
    """The text to complete: the argument, or stdin where it is ``-`` or left out.

    One line break at the end of stdin belongs to the tool that wrote it and is dropped.

    Raises:
        RequestError: nothing to read, an empty text, or one that is not UTF-8.
    """
    if prompt in (None, "-") and sys.stdin is None:
        raise RequestError("stdin is closed; give the prompt in quotes, or pipe a text into stdin")
    if prompt is None and sys.stdin.isatty():
        raise RequestError("there is no prompt; give one in quotes, or pipe a text into stdin")
    text = _read_stdin() if prompt in (None, "-") else prompt
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    return text


def _read_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8: byte {error.start} is {data[error.start]:#04x}; convert the text "
            "first, for example with iconv"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _complete(terminal: Terminal, llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    if not terminal.streams:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        if not terminal.json_wanted:
            terminal.write(output.outputs[0].text + "\n")
        return output
    steps = llm.stream(prompt, params)
    try:
        while True:
            terminal.write(printable(next(steps)))
    except StopIteration as done:
        finished: RequestOutput = done.value
        return finished
    finally:
        terminal.write("\n")
