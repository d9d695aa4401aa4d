"""Two faces of a conversation: a person at a terminal, and a program that sends lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rich.table import Table
from rich.text import Text

from torpor.errors import RequestError
from torpor.serve.words import count, duration, printable, size

if TYPE_CHECKING:
    from torpor.outputs import RequestOutput
    from torpor.serve.terminal import Terminal

_BAR_CELLS = 24


class Face(Protocol):
    """How a conversation reads and writes."""

    counts_errors: bool
    """Whether an error shows in the exit code."""

    def greet(self, status: Mapping[str, Any]) -> None:
        """The model is loaded."""
        ...

    def read(self) -> str | None:
        """The next line, stripped; None at the end.

        Raises:
            RequestError: it is not UTF-8; the next call reads on.
        """
        ...

    def piece(self, text: str) -> None:
        """A part of an answer."""
        ...

    def answered(self, output: RequestOutput, generate_s: float) -> None:
        """The answer is whole."""
        ...

    def cut_short(self) -> None:
        """The answer was interrupted."""
        ...

    def slept(self, facts: Mapping[str, Any]) -> None:
        """A sleep ended well."""
        ...

    def woke(self, facts: Mapping[str, Any]) -> None:
        """A wake ended well."""
        ...

    def status(self, status: Mapping[str, Any], num_messages: int) -> None:
        """What ``/status`` asks for."""
        ...

    def help(self, commands: Mapping[str, str]) -> None:
        """What ``/help`` asks for."""
        ...

    def done(self, command: str, facts: Mapping[str, Any], words: str) -> None:
        """Another command is done."""
        ...

    def complain(self, type_name: str, message: str, hint: str) -> None:
        """A line could not be served; the conversation goes on."""
        ...


class JsonFace:
    """One message or command per line in, one JSON object per line out."""

    counts_errors = True

    def __init__(self, terminal: Terminal) -> None:
        """Read stdin, write stdout."""
        self._terminal = terminal

    def greet(self, status: Mapping[str, Any]) -> None:
        """Nothing: the first object answers the first line."""

    def read(self) -> str | None:
        """One line of stdin."""
        return _line_of_stdin()

    def piece(self, text: str) -> None:
        """Nothing: the object holds the whole answer."""

    def answered(self, output: RequestOutput, generate_s: float) -> None:
        """The answer."""
        completion = output.outputs[0]
        self._terminal.emit(
            {
                "role": "assistant",
                "text": completion.text,
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "generate_s": generate_s,
                "weights_epoch": output.weights_epoch,
            }
        )

    def cut_short(self) -> None:
        """Nobody interrupts one answer of a program: end it all."""
        raise KeyboardInterrupt

    def slept(self, facts: Mapping[str, Any]) -> None:
        """The report."""
        self._terminal.emit({"command": "sleep", **facts})

    def woke(self, facts: Mapping[str, Any]) -> None:
        """The report."""
        self._terminal.emit({"command": "wake", **facts})

    def status(self, status: Mapping[str, Any], num_messages: int) -> None:
        """The status."""
        self._terminal.emit({"command": "status", "num_messages": num_messages, **status})

    def help(self, commands: Mapping[str, str]) -> None:
        """The commands."""
        self._terminal.emit({"command": "help", "commands": dict(commands)})

    def done(self, command: str, facts: Mapping[str, Any], words: str) -> None:
        """The facts."""
        self._terminal.emit({"command": command, **facts})

    def complain(self, type_name: str, message: str, hint: str) -> None:
        """The error."""
        self._terminal.complain(type_name, message)


class PersonFace:
    """A prompt with history, answers as they come, sleep and wake as bars."""

    counts_errors = False

    def __init__(self, terminal: Terminal) -> None:
        """Write to the terminal; read from it with line editing where there is a keyboard."""
        self._terminal = terminal
        self._out = terminal.out
        self._has_keyboard = (
            sys.stdin is not None and sys.stdin.isatty() and terminal.out.is_terminal
        )
        self._is_asleep = False
        if self._has_keyboard:
            # Importing it gives input() line editing and history.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401

    def greet(self, status: Mapping[str, Any]) -> None:
        """Who is there, and the commands that matter."""
        if self._has_keyboard:
            invitation = (
                " is awake. /sleep and /wake when you like, /help for the rest, Ctrl-D ends."
            )
            self._out.print(Text.assemble((status["model"], "bold"), invitation))

    def read(self) -> str | None:
        """One line: prompted for at a keyboard, else from stdin."""
        if not self._has_keyboard:
            return _line_of_stdin()
        try:
            return input("(asleep) > " if self._is_asleep else "> ").strip()
        except EOFError:
            self._out.print()
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"the line is not UTF-8 ({error.reason}); type it again") from error

    def piece(self, text: str) -> None:
        """Written at once."""
        self._terminal.write(printable(text) if self._out.is_terminal else text)

    def answered(self, output: RequestOutput, generate_s: float) -> None:
        """A line break, and how long it took."""
        self._terminal.write("\n")
        if self._has_keyboard:
            tokens = len(output.outputs[0].token_ids)
            speed = f"{count(tokens, 'token')} in {duration(generate_s)}"
            cut = ", cut at --max-tokens" if output.outputs[0].finish_reason == "length" else ""
            self._out.print(f"[dim]{speed}{cut}[/dim]")

    def cut_short(self) -> None:
        """Say that the answer is not kept."""
        self._out.print("\n[dim]stopped; this answer is not remembered[/dim]")

    def slept(self, facts: Mapping[str, Any]) -> None:
        """Memory before and after."""
        report = facts["report"]
        self._is_asleep = True
        if not report["changed"]:
            self._notices(report)
            return
        if not report["released_bytes"]:
            self._out.print(f"[dim]{'; '.join(report['notices']) or 'paused'}[/dim]")
            return
        released = size(sum(report["released_bytes"].values()))
        copied = size(report["copied_bytes"])
        self._bars(
            facts,
            ("awake", "green"),
            ("asleep", "blue"),
            f"in {duration(facts['took_s'])}; {released} released, {copied} copied",
        )

    def woke(self, facts: Mapping[str, Any]) -> None:
        """Memory before and after, and the digests."""
        report = facts["report"]
        self._is_asleep = False
        if not report["mapped_bytes"]:
            self._notices(report)
            return
        digests = f"{report['verified']} of {report['total_verifiable']} digests equal"
        self._bars(
            facts,
            ("asleep", "blue"),
            ("awake", "green"),
            f"in {duration(facts['took_s'])}; {digests}",
        )

    def status(self, status: Mapping[str, Any], num_messages: int) -> None:
        """State and bytes by class."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_row("state", status["state"])
        table.add_row("tags", ", ".join(f"{tag} {state}" for tag, state in status["tags"].items()))
        for name, nbytes in status["owned_bytes"].items():
            table.add_row(name, size(nbytes))
        table.add_row("mapped now", size(status["mapped_bytes"]))
        table.add_row("messages", str(num_messages))
        self._out.print(table)

    def help(self, commands: Mapping[str, str]) -> None:
        """One line each."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for command, meaning in commands.items():
            table.add_row(Text(command, "bold"), meaning)
        self._out.print(table)

    def done(self, command: str, facts: Mapping[str, Any], words: str) -> None:
        """A word."""
        self._out.print(f"[dim]{words}[/dim]")

    def complain(self, type_name: str, message: str, hint: str) -> None:
        """One line, and what to do here."""
        self._terminal.complain(type_name, f"{message}{f' ({hint})' if hint else ''}")

    def _notices(self, report: Mapping[str, Any]) -> None:
        self._out.print(Text("; ".join(report["notices"]), "dim"))

    def _bars(
        self,
        facts: Mapping[str, Any],
        before: tuple[str, str],
        after: tuple[str, str],
        remark: str,
    ) -> None:
        sizes = facts["rss_bytes"]
        scale = max(sizes.values())
        for (label, style), nbytes, words in (
            (before, sizes["before"], ""),
            (after, sizes["after"], remark),
        ):
            line = self._terminal.bar(nbytes / scale, _BAR_CELLS, style)
            self._out.print(
                Text.assemble((f"{label:8}", "dim"), line, f" {size(nbytes):>7}  ", (words, "dim"))
            )


def _line_of_stdin() -> str | None:
    data = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not data:
        return None
    try:
        return data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the line is not UTF-8: byte {error.start} is {data[error.start]:#04x}; convert it "
            "first, for example with iconv"
        ) from error
