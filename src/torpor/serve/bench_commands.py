"""``torpor bench`` on the command line: what can be measured, and the options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from torpor.serve.exits import end
from torpor.serve.terminal import Terminal

bench_app = typer.Typer(
    help="Measure an engine: tokens per second, seconds per batch, sleep and wake.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Model = Annotated[
    str, typer.Option("--model", "-m", help="smollm2, a model folder, or a .gguf file.")
]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens to generate from each prompt.")]
NumIters = Annotated[int, typer.Option(min=1, help="Runs that count.")]
NumItersWarmup = Annotated[int, typer.Option(min=0, help="Runs before those, thrown away.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
DType = Annotated[str | None, typer.Option("--dtype", help="What to compute in, such as bfloat16.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads to compute with; torch's own choice if not given."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Positions for a prompt and its completion together.")
]
KVCacheMemoryBytes = Annotated[
    int | None,
    typer.Option("--kv-cache-memory-bytes", min=1, help="Bytes of the KV cache."),
]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Results that no other request can change.")
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]


@bench_app.command("throughput")
def _throughput(
    model: Model = "smollm2",
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all handed over at once.")] = 16,
    num_iters: NumIters = 3,
    num_iters_warmup: NumItersWarmup = 1,
    seed: Seed = 0,
    dtype: DType = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemoryBytes = None,
    batch_invariant: BatchInvariant = False,
    json: Json = False,
) -> None:
    """Tokens per second when all prompts are there at once."""

    def work(terminal: Terminal) -> int:
        from torpor.check.bench_options import EngineChoices, Repeats, ThroughputOptions
        from torpor.serve.bench import throughput

        options = ThroughputOptions(
            input_len=input_len,
            output_len=output_len,
            num_prompts=num_prompts,
            seed=seed,
            repeats=Repeats(num_iters=num_iters, num_iters_warmup=num_iters_warmup),
            engine=EngineChoices(
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                batch_invariant=batch_invariant or None,
                num_threads=threads,
            ),
        )
        return throughput(terminal, model, options)

    _finish(json, work)


@bench_app.command("latency")
def _latency(
    model: Model = "smollm2",
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = 1,
    num_iters: NumIters = 5,
    num_iters_warmup: NumItersWarmup = 1,
    seed: Seed = 0,
    dtype: DType = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemoryBytes = None,
    batch_invariant: BatchInvariant = False,
    json: Json = False,
) -> None:
    """Seconds that one batch takes, and until its first token."""

    def work(terminal: Terminal) -> int:
        from torpor.check.bench_options import EngineChoices, LatencyOptions, Repeats
        from torpor.serve.bench import latency

        options = LatencyOptions(
            input_len=input_len,
            output_len=output_len,
            batch_size=batch_size,
            seed=seed,
            repeats=Repeats(num_iters=num_iters, num_iters_warmup=num_iters_warmup),
            engine=EngineChoices(
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                batch_invariant=batch_invariant or None,
                num_threads=threads,
            ),
        )
        return latency(terminal, model, options)

    _finish(json, work)


@bench_app.command("sleep")
def _sleep(
    model: Model = "smollm2",
    level: Annotated[
        list[int] | None,
        typer.Option(min=1, max=2, help="1 or 2; may be given twice. Both if not given."),
    ] = None,
    num_iters: NumIters = 5,
    num_iters_warmup: NumItersWarmup = 1,
    dtype: DType = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory_bytes: KVCacheMemoryBytes = None,
    json: Json = False,
) -> None:
    """Seconds and bytes of falling asleep and waking up, phase by phase."""

    def work(terminal: Terminal) -> int:
        from torpor.check.bench_options import EngineChoices, Repeats, SleepOptions
        from torpor.serve.bench import sleep

        options = SleepOptions(
            levels=tuple(dict.fromkeys(level or (1, 2))),
            repeats=Repeats(num_iters=num_iters, num_iters_warmup=num_iters_warmup),
            engine=EngineChoices(
                dtype=dtype,
                max_model_len=max_model_len,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                num_threads=threads,
            ),
        )
        return sleep(terminal, model, options)

    _finish(json, work)


def _finish(json: bool, work: Callable[[Terminal], int]) -> NoReturn:
    terminal = Terminal(json_wanted=json)
    raise typer.Exit(end(terminal, lambda: work(terminal)))
