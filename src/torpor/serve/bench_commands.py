"""``torpor bench`` on the command line: what can be measured, and the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from torpor.serve.exits import end
from torpor.serve.terminal import Terminal

if TYPE_CHECKING:
    from torpor.check.bench_generation import LatencyResult, ThroughputResult
    from torpor.check.bench_options import EngineChoices, GenerationOptions, Listener, Repeats
    from torpor.check.bench_sleep import SleepResult
    from torpor.model.checkpoints.files import Progress

bench_app = typer.Typer(
    help="Measure an engine: tokens per second, seconds per batch, sleep and wake.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@dataclass(frozen=True, kw_only=True)
class _Common:
    """Options of every benchmark, by the names of its parameters."""

    model: Annotated[
        str, typer.Option("--model", "-m", help="smollm2, a model folder, or a .gguf file.")
    ] = "smollm2"
    num_iters: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 5
    num_iters_warmup: Annotated[
        int, typer.Option(min=0, help="Runs before those, thrown away.")
    ] = 1
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="What to compute in, such as bfloat16.")
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads to compute with; torch's own choice if not given."),
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Positions for a prompt and its completion together.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option("--kv-cache-memory-bytes", min=1, help="Bytes of the KV cache.")
    ] = None
    sink_placement: Annotated[
        str | None, typer.Option(help="Where static sinks are: merged, or reserved.")
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")] = False

    def repeats(self) -> Repeats:
        from torpor.check.bench_options import Repeats

        return Repeats(num_iters=self.num_iters, num_iters_warmup=self.num_iters_warmup)

    def engine(self, *, batch_invariant: bool = False) -> EngineChoices:
        from torpor.check.bench_options import EngineChoices

        return EngineChoices(
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            sink_placement=self.sink_placement,
            batch_invariant=batch_invariant or None,
            num_threads=self.threads,
        )


@dataclass(frozen=True, kw_only=True)
class _Generation(_Common):
    """Options of the benchmarks that generate text."""

    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate from each prompt.")] = (
        64
    )
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Results that no other request can change."),
    ] = False

    def options(self, num_prompts: int) -> GenerationOptions:
        from torpor.check.bench_options import GenerationOptions

        return GenerationOptions(
            num_prompts=num_prompts,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=self.seed,
            repeats=self.repeats(),
            engine=self.engine(batch_invariant=self.batch_invariant),
        )


@dataclass(frozen=True, kw_only=True)
class _Throughput(_Generation):
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all handed over at once.")] = 16
    num_iters: Annotated[int, typer.Option(min=1, help="Runs that count.")] = 3


@dataclass(frozen=True, kw_only=True)
class _Latency(_Generation):
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1


@dataclass(frozen=True, kw_only=True)
class _Sleep(_Common):
    level: Annotated[
        list[int] | None,
        typer.Option(min=1, max=2, help="1 or 2; may be given twice. Both if not given."),
    ] = None


Chosen = TypeVar("Chosen", bound=_Common)


def _command(name: str, shape: type[Chosen]) -> Callable[[Callable[[Terminal, Chosen], int]], None]:
    """A command whose options are the fields of a dataclass, those that all have at the end."""

    def register(work: Callable[[Terminal, Chosen], int]) -> None:
        def command(**values: Any) -> None:
            options = shape(**values)
            terminal = Terminal(json_wanted=options.json)
            raise typer.Exit(end(terminal, lambda: work(terminal, options)))

        hints = get_type_hints(shape, include_extras=True)
        own_first = sorted(
            fields(shape),
            key=lambda entry: sum(hasattr(base, entry.name) for base in shape.__mro__),
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(
                entry.name, keyword, default=entry.default, annotation=hints[entry.name]
            )
            for entry in own_first
        ]
        # Typer reads these, as it would of a function that lists its options.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        bench_app.command(name, help=work.__doc__)(command)

    return register


@_command("throughput", _Throughput)
def _throughput(terminal: Terminal, chosen: _Throughput) -> int:
    """Tokens per second when all prompts are there at once."""
    from torpor.serve.bench import bench
    from torpor.serve.bench_words import show_throughput

    options = chosen.options(chosen.num_prompts)

    def measure(listener: Listener | None, progress: Progress | None) -> ThroughputResult:
        from torpor.check.bench_generation import bench_throughput

        return bench_throughput(chosen.model, options, listener=listener, progress=progress)

    return bench(terminal, measure, show_throughput)


@_command("latency", _Latency)
def _latency(terminal: Terminal, chosen: _Latency) -> int:
    """Seconds that one batch takes, and until its first token."""
    from torpor.serve.bench import bench
    from torpor.serve.bench_words import show_latency

    options = chosen.options(chosen.batch_size)

    def measure(listener: Listener | None, progress: Progress | None) -> LatencyResult:
        from torpor.check.bench_generation import bench_latency

        return bench_latency(chosen.model, options, listener=listener, progress=progress)

    return bench(terminal, measure, show_latency)


@_command("sleep", _Sleep)
def _sleep(terminal: Terminal, chosen: _Sleep) -> int:
    """Seconds and bytes of falling asleep and waking up, phase by phase."""
    from torpor.check.bench_options import SleepOptions
    from torpor.serve.bench import bench
    from torpor.serve.bench_words import show_sleep

    levels = tuple(dict.fromkeys(chosen.level or (1, 2)))
    options = SleepOptions(levels=levels, repeats=chosen.repeats(), engine=chosen.engine())

    def measure(listener: Listener | None, progress: Progress | None) -> SleepResult:
        from torpor.check.bench_sleep import bench_sleep

        return bench_sleep(chosen.model, options, listener=listener, progress=progress)

    return bench(terminal, measure, show_sleep)
