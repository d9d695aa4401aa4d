"""The command line: what can be asked, and the options. The work lies in one file per command.

Nothing heavy is imported here, so that ``torpor --help`` is quick.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from torpor.check.version import torpor_version
from torpor.serve.bench_commands import bench_app
from torpor.serve.exits import INTERRUPTED, OK, USAGE, end
from torpor.serve.terminal import Terminal

app = typer.Typer(
    help="A language model that sleeps, wakes, and proves that it woke intact.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 the model did not come back as it was.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str, typer.Option("--model", "-m", help="smollm2, a model folder, or a .gguf file.")
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads to compute with; torch's own choice if not given."),
]
OneThread = Annotated[
    int,
    typer.Option(
        min=1, help="Threads to compute with. One is steady on a busy machine and hardly slower."
    ),
]
SinkPlacement = Annotated[
    str,
    typer.Option(
        help="Where static sinks are: merged into attention, or in reserved blocks of the KV cache."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of each answer, at most.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token; higher is more varied.")
]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this share.")]
TopK = Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling; without one, every run draws the same.")
]


class Thinking(StrEnum):
    """How a model that can is to think before it answers."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


_THINKING: Mapping[Thinking, bool | str] = {
    Thinking.ON: True,
    Thinking.OFF: False,
    Thinking.AUTO: "auto",
}
"""By what templates know as ``enable_thinking``."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torpor {torpor_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command("demo")
def _demo(
    model: Model = "smollm2",
    cycles: Annotated[int, typer.Option(min=1, help="Sleeps and wakes at each level.")] = 3,
    max_tokens: MaxTokens = 16,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to ask; may be given several times.")
    ] = None,
    threads: OneThread = 1,
    nap_s: Annotated[
        float, typer.Option("--nap", min=0.0, max=60.0, help="Seconds to stay asleep each time.")
    ] = 0.3,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with charts.")
    ] = None,
    json: Json = False,
) -> None:
    """Watch a model answer, sleep, wake and answer the same, at both levels."""

    def work(terminal: Terminal) -> int:
        from torpor.serve.demo import DemoOptions, demo

        options = DemoOptions(
            model=model,
            cycles=cycles,
            max_tokens=max_tokens,
            prompts=tuple(prompt or ()),
            threads=threads,
            nap_s=nap_s,
            report=report,
        )
        return demo(terminal, options)

    _finish(json, work)


@app.command("generate")
def _generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to complete; - or nothing reads it from stdin.")
    ] = None,
    model: Model = "smollm2",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    threads: Threads = None,
    sink_placement: SinkPlacement = "merged",
    json: Json = False,
) -> None:
    """Complete a text."""

    def work(terminal: Terminal) -> int:
        from torpor.params import SamplingParams
        from torpor.serve.generate import generate

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
        )
        return generate(
            terminal, prompt, params, model=model, threads=threads, sink_placement=sink_placement
        )

    _finish(json, work)


@app.command("chat")
def _chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    thinking: Annotated[
        Thinking | None, typer.Option(help="Whether a model that can thinks before it answers.")
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.2,
    top_p: TopP = 0.9,
    top_k: TopK = 0,
    seed: Seed = None,
    threads: Threads = None,
    json: Annotated[
        bool, typer.Option("--json", help="Read a message per line, write an object per line.")
    ] = False,
) -> None:
    """Talk with a model, and let it sleep in the middle of it: /sleep, /wake."""

    def work(terminal: Terminal) -> int:
        from torpor.params import SamplingParams
        from torpor.serve.chat import chat

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        return chat(
            terminal,
            params,
            model=model,
            system=system,
            thinking=None if thinking is None else _THINKING[thinking],
            threads=threads,
        )

    _finish(json, work)


@app.command("doctor")
def _doctor(
    model: Annotated[
        str, typer.Argument(help="smollm2, a model folder, or a .gguf file.")
    ] = "smollm2",
    max_tokens: MaxTokens = 16,
    threads: OneThread = 1,
    sink_placement: SinkPlacement = "merged",
    every: Annotated[
        bool, typer.Option("--all", help="List every tensor instead of groups.")
    ] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when bytes stay resident.")] = False,
    json: Json = False,
) -> None:
    """Examine a model: who owns what, what stays in memory, does it survive sleep."""

    def work(terminal: Terminal) -> int:
        from torpor.serve.doctor import examine

        return examine(
            terminal,
            model,
            max_tokens=max_tokens,
            threads=threads,
            sink_placement=sink_placement,
            every=every,
            strict=strict,
        )

    _finish(json, work)


def _finish(json: bool, work: Callable[[Terminal], int]) -> NoReturn:
    terminal = Terminal(json_wanted=json)
    raise typer.Exit(end(terminal, lambda: work(terminal)))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # What the locale cannot spell becomes a question mark instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    command = typer.main.get_command(app)
    try:
        code = command.main(list(arguments), prog_name="torpor", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        # Typer's own errors are of one kind, but which class that is depends on its version.
        if not hasattr(error, "format_message"):
            raise
        return _usage(error, arguments)
    return code if isinstance(code, int) else OK


def _usage(error: Exception, arguments: Sequence[str]) -> int:
    """Report what typer refused."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    if not message:  # No arguments at all: the help has been shown.
        return USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "torpor"
    terminal = Terminal(json_wanted="--json" in arguments)
    with contextlib.suppress(BrokenPipeError):
        terminal.complain("UsageError", f"{message.rstrip('.')}; see '{path} --help'")
    return USAGE


def main() -> NoReturn:
    """Entry point of the ``torpor`` command and of ``python -m torpor``."""
    sys.exit(run(sys.argv[1:]))
