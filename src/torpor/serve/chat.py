"""``torpor chat``: a conversation that the model may sleep through.

One loop serves a person at a terminal and a program that sends lines; they differ in their face.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torpor.errors import ArgumentError, AsleepError, PromptTooLongError, TorporError
from torpor.serve.chat_faces import Face, JsonFace, PersonFace
from torpor.serve.exits import FAILED, OK, exit_code_for, message_of
from torpor.serve.loading import loading

if TYPE_CHECKING:
    from torpor.engine.llm import LLM
    from torpor.outputs import RequestOutput
    from torpor.params import SamplingParams
    from torpor.serve.terminal import Terminal

HELP: Mapping[str, str] = {
    "/sleep [1|2]": "give memory back: 1 keeps copies of the weights, 2 throws them away",
    "/wake": "take it back, restored and verified",
    "/reset": "forget the conversation",
    "/status": "what is in memory now",
    "/help": "this list",
    "/exit": "end; so does an end of input",
}


def chat(
    terminal: Terminal,
    params: SamplingParams,
    *,
    model: str,
    system: str | None,
    thinking: bool | str | None = None,
    threads: int | None,
) -> int:
    """Talk until the input ends; the exit code.

    ``thinking`` is what the model's template gets as ``enable_thinking``; None leaves it out.

    Raises:
        TorporError: the model cannot be loaded.
    """
    with loading(terminal) as bar:
        from torpor.engine.llm import LLM

        llm = LLM(model, num_threads=threads, progress=bar)
    with llm:
        face: Face = JsonFace(terminal) if terminal.json_wanted else PersonFace(terminal)
        return Chat(llm, params, face, system=system, thinking=thinking).run()


class Chat:
    """One conversation with one model."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        face: Face,
        *,
        system: str | None = None,
        thinking: bool | str | None = None,
    ) -> None:
        """Begin with nothing said."""
        self._llm = llm
        self._params = params
        self._face = face
        self._system = system
        self._template_kwargs = None if thinking is None else {"enable_thinking": thinking}
        self._messages: list[dict[str, str]] = []
        self._exit_code = OK
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/sleep": self._sleep,
            "/wake": self._wake,
            "/reset": self._reset,
            "/status": self._status,
            "/help": self._help,
        }
        self._forget()

    def run(self) -> int:
        """Answer line after line; the exit code is that of the last error, if any.

        At a terminal an error is seen and mended, so there the code is 0.
        """
        self._face.greet(self._llm.status())
        while True:
            try:
                line = self._face.read()
                if line is None or line in ("/exit", "/quit"):
                    return self._exit_code
                if line:
                    self._handle(line)
            except TorporError as error:
                self._face.complain(type(error).__name__, message_of(error), _hint(error))
                if self._face.counts_errors:
                    self._exit_code = max(self._exit_code, exit_code_for(error), FAILED)

    def _handle(self, line: str) -> None:
        if not line.startswith("/"):
            self._answer(line)
            return
        name, *arguments = line.split()
        command = self._commands.get(name)
        if command is None:
            known = ", ".join((*self._commands, "/exit"))
            raise ArgumentError(f"there is no command {name!r}; there are {known}")
        command(arguments)

    # -- talking ----------------------------------------------------------------------------------

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        start_s = time.perf_counter()
        steps = self._llm.stream_chat(
            messages, self._params, chat_template_kwargs=self._template_kwargs
        )
        output: RequestOutput | None = None
        try:
            while True:
                self._face.piece(next(steps))
        except StopIteration as done:
            output = done.value
        except KeyboardInterrupt:
            # A person's way to say that this answer is long enough; it is not remembered.
            self._face.cut_short()
            return
        finally:
            steps.close()
        assert output is not None, "a finished stream has an output"
        text = output.outputs[0].text
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._face.answered(output, time.perf_counter() - start_s)

    def _forget(self) -> None:
        self._messages = (
            [] if self._system is None else [{"role": "system", "content": self._system}]
        )

    # -- commands ---------------------------------------------------------------------------------

    def _sleep(self, arguments: list[str]) -> None:
        level = _only(arguments, "sleep") or "1"
        self._face.slept(self._measured(lambda: self._llm.sleep(level=level)))

    def _wake(self, arguments: list[str]) -> None:
        _none(arguments, "wake")
        self._face.woke(self._measured(self._llm.wake_up))

    def _measured(self, transition: Callable[[], Any]) -> dict[str, Any]:
        from torpor.sleep.procfs import process_rss_bytes

        before_bytes, start_s = process_rss_bytes(), time.perf_counter()
        report = transition()
        return {
            "took_s": time.perf_counter() - start_s,
            "rss_bytes": {"before": before_bytes, "after": process_rss_bytes()},
            "report": report.to_dict(),
        }

    def _reset(self, arguments: list[str]) -> None:
        _none(arguments, "reset")
        self._forget()
        self._face.done("reset", {}, "forgotten")

    def _status(self, arguments: list[str]) -> None:
        _none(arguments, "status")
        self._face.status(self._llm.status(), len(self._messages))

    def _help(self, arguments: list[str]) -> None:
        _none(arguments, "help")
        self._face.help(HELP)


def _only(arguments: list[str], command: str) -> str | None:
    if len(arguments) > 1:
        raise ArgumentError(f"/{command} takes one word, not {arguments}; leave the rest out")
    return arguments[0] if arguments else None


def _none(arguments: list[str], command: str) -> None:
    if arguments:
        raise ArgumentError(f"/{command} takes no words, not {arguments}; leave them out")


def _hint(error: TorporError) -> str:
    if isinstance(error, AsleepError):
        return "/wake brings the model back"
    if isinstance(error, PromptTooLongError):
        return "/reset begins a new conversation"
    return ""
