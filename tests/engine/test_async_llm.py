"""The asynchronous engine on a tiny model: streams, aborts, sleeps, errors, many tasks."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import tiny_weights

from torpor.engine.async_llm import AsyncLLM
from torpor.engine.llm import LLM
from torpor.errors import (
    ArgumentError,
    AsleepError,
    PromptTooLongError,
    RequestError,
    StateError,
    StepError,
    WeightsIncompleteError,
)
from torpor.outputs import RequestOutput
from torpor.params import RequestOutputKind, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS: list[Any] = ["the quick brown fox", "once upon a time there was", [7, 8, 9], "sleep"]

Body = Callable[[AsyncLLM], Awaitable[None]]


def run(folder: Path, body: Body, **options: Any) -> None:
    """Run a test's body with an engine around it, bounded in time."""
    options = {"kv_cache_memory_bytes": 1 << 20, "block_size": 4, **options}

    async def main() -> None:
        async with AsyncLLM(folder, **options) as engine:
            await asyncio.wait_for(body(engine), 60)

    asyncio.run(main())


async def collect(engine: AsyncLLM, prompt: Any, params: Any = PARAMS, **more: Any) -> Any:
    """All outputs of one request."""
    return [output async for output in engine.generate(prompt, params, **more)]


async def last(engine: AsyncLLM, prompt: Any, params: Any = PARAMS, **more: Any) -> RequestOutput:
    outputs: list[RequestOutput] = await collect(engine, prompt, params, **more)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[tuple[int, ...]]:
    with LLM(tiny_folder) as llm:
        return [tokens(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


async def started(engine: AsyncLLM, index: int = 1, **more: Any) -> tuple[Any, list[Any]]:
    """A task that collects a request's outputs, after its first one."""
    outputs: list[RequestOutput] = []
    first = asyncio.Event()

    async def work() -> None:
        async for output in engine.generate(PROMPTS[index], PARAMS, **more):
            outputs.append(output)
            first.set()

    task = asyncio.create_task(work())
    await first.wait()
    return task, outputs


def held_steps(engine: AsyncLLM) -> tuple[threading.Event, threading.Event]:
    """Steps end only once the first event is set; the second is set when one has begun."""
    hold, entered = threading.Event(), threading.Event()
    launch = engine.engine.core._runner.launch

    def slow(step: Any) -> Any:
        entered.set()
        assert hold.wait(30)
        return launch(step)

    engine.engine.core._runner.launch = slow  # type: ignore[method-assign]
    return hold, entered


def test_many_tasks_get_what_each_gets_alone(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in PROMPTS * 3))
        assert [tokens(output) for output in outputs] == expected * 3
        assert engine.get_num_unfinished_requests() == 0
        assert engine.status()["kv_cache_usage"] == 0

    run(tiny_folder, body)


def test_outputs_grow_by_whole_tokens(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    async def body(engine: AsyncLLM) -> None:
        seen: list[RequestOutput] = await collect(engine, PROMPTS[0])
        for before, after in itertools.pairwise(seen):
            assert after.outputs[0].text.startswith(before.outputs[0].text)
            assert tokens(after)[: len(tokens(before))] == tokens(before)
        assert tokens(seen[-1]) == expected[0]

    run(tiny_folder, body)


def test_deltas_join_to_the_whole(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def body(engine: AsyncLLM) -> None:
        deltas: list[RequestOutput] = await collect(engine, PROMPTS[0], params)
        whole = await last(engine, PROMPTS[0])
        pieces = [entry for output in deltas for entry in output.outputs]
        assert sum((piece.token_ids for piece in pieces), ()) == expected[0]
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text

    run(tiny_folder, body)


def test_a_final_output_comes_alone(tiny_folder: Path, expected: list[tuple[int, ...]]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def body(engine: AsyncLLM) -> None:
        (output,) = await collect(engine, PROMPTS[0], params)
        assert tokens(output) == expected[0]

    run(tiny_folder, body)


def test_an_abort_ends_one_request_alone(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        task, outputs = await started(engine, 1, request_id="mine")
        other = asyncio.create_task(last(engine, PROMPTS[0]))
        await engine.abort("mine")
        await engine.abort(["mine", "nobody"])
        await task
        assert outputs[-1].outputs[0].finish_reason in ("abort", "length")
        assert tokens(await other) == expected[0]

    run(tiny_folder, body)


def test_leaving_or_cancelling_an_iteration_aborts_its_request(tiny_folder: Path) -> None:
    long = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)

    async def body(engine: AsyncLLM) -> None:
        stream = engine.generate([7, 8, 9], long)
        await anext(stream)
        await stream.aclose()
        hold, entered = held_steps(engine)
        task = asyncio.create_task(collect(engine, [7, 8, 9], long))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        assert engine.status()["num_steps"] < 110, "neither request was computed to its end"
        assert await engine.reset_prefix_cache()

    run(tiny_folder, body)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleeping_with_requests_running(
    tiny_folder: Path, expected: list[tuple[int, ...]], level: int, mode: str
) -> None:
    async def body(engine: AsyncLLM) -> None:
        task, outputs = await started(engine)
        await engine.sleep(level, mode=mode)
        assert await engine.is_sleeping()
        if mode != "keep":
            await task
        queued = asyncio.create_task(last(engine, PROMPTS[0]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not queued.done()
        if level:
            await engine.wake_up(["kv_cache"])
            assert not queued.done()
        await engine.wake_up()
        await task
        assert tokens(await queued) == expected[0]
        if mode == "abort":
            assert tokens(outputs[-1]) == expected[1][: len(tokens(outputs[-1]))]
        else:
            assert tokens(outputs[-1]) == expected[1]

    run(tiny_folder, body)


def test_a_request_while_asleep_is_rejected_if_so_chosen(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.sleep(1)
        with pytest.raises(AsleepError, match="wake it up"):
            await last(engine, "a")
        await engine.wake_up()
        await last(engine, "a")

    run(tiny_folder, body, on_asleep="reject")


def test_a_request_while_asleep_wakes_the_model_if_so_chosen(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.sleep(2)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in PROMPTS))
        assert [tokens(output) for output in outputs] == expected
        assert not await engine.is_sleeping()

    run(tiny_folder, body, on_asleep="wake")


def test_a_request_does_not_wait_for_ever(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.sleep(1)
        with pytest.raises(AsleepError, match=r"still asleep or paused after 0.05 s"):
            await last(engine, "a")
        await engine.wake_up()
        while engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        await last(engine, "a")

    run(tiny_folder, body, asleep_timeout_s=0.05)


def test_a_request_that_comes_late_in_a_nap_waits_as_long(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.sleep(1)
        with pytest.raises(AsleepError):
            await last(engine, "a")
        # Were its time up already, it would fail in the wait before this one.
        late = asyncio.create_task(last(engine, PROMPTS[0]))
        await asyncio.wait([late], timeout=0.02)
        assert not late.done()
        await engine.wake_up()
        assert tokens(await late) == expected[0]

    run(tiny_folder, body, asleep_timeout_s=1.0)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", PARAMS, RequestError),
        ([320], PARAMS, RequestError),
        ([5] * 128, PARAMS, PromptTooLongError),
        ("a", SamplingParams(logprobs=21), RequestError),
        ("a", SamplingParams(logit_bias={999: 1.0}), RequestError),
        ("a", {"temperature": 0}, RequestError),
        (5, PARAMS, RequestError),
    ],
    ids=str,
)
def test_a_bad_request_fails_alone(
    tiny_folder: Path, expected: list[tuple[int, ...]], prompt: Any, params: Any, error: type
) -> None:
    async def body(engine: AsyncLLM) -> None:
        good = asyncio.create_task(last(engine, PROMPTS[0]))
        with pytest.raises(error):
            await last(engine, prompt, params)
        assert tokens(await good) == expected[0]

    run(tiny_folder, body)


def test_an_id_in_use_is_refused_and_the_first_goes_on(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        task, outputs = await started(engine, 1, request_id="twin")
        with pytest.raises(RequestError, match="'twin', which is in use"):
            await last(engine, "a", request_id="twin")
        await task
        assert tokens(outputs[-1]) == expected[1]
        await last(engine, "a", request_id="twin")

    run(tiny_folder, body)


def test_nan_in_one_row_fails_that_request_only(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        runner = engine.engine.core._runner
        compute, calls = runner._model.compute_logits, 0

        def once_nan(hidden_RD: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            logits_RV = compute(hidden_RD)
            if len(logits_RV) == 2 and not calls:
                calls += 1
                logits_RV[1] = torch.nan
            return logits_RV

        runner._model.compute_logits = once_nan  # type: ignore[method-assign]
        results = await asyncio.gather(
            last(engine, PROMPTS[0]), last(engine, PROMPTS[1]), return_exceptions=True
        )
        assert calls == 1
        errors = [result for result in results if isinstance(result, BaseException)]
        good = [tokens(result) for result in results if isinstance(result, RequestOutput)]
        assert [type(error) for error in errors] == [RequestError]
        assert good in ([expected[0]], [expected[1]])

    run(tiny_folder, body)


def test_updates_between_pairs_let_no_step_in(tiny_folder: Path, other_folder: Path) -> None:
    with LLM(other_folder) as fresh:
        (updated,) = fresh.generate([PROMPTS[0]], PARAMS)

    async def body(engine: AsyncLLM) -> None:
        task, _ = await started(engine)
        epochs = set()
        for pair in tiny_weights(1).items():
            await engine.load_weights([pair])
            epochs.add(engine.engine.sleeper.weights_epoch)
        assert len(epochs) == 1
        await engine.finish_update()
        await task
        assert tokens(await last(engine, PROMPTS[0])) == tokens(updated)

    run(tiny_folder, body)


def test_the_loop_stays_responsive_while_the_model_steps_and_sleeps(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        hold, entered = held_steps(engine)
        first = asyncio.create_task(last(engine, PROMPTS[0]))
        while not entered.is_set():
            await asyncio.sleep(0)
        # A step is in flight and will not end: everything that must not wait, does not.
        second = asyncio.create_task(last(engine, PROMPTS[1]))
        sleeping = asyncio.create_task(engine.sleep(1, mode="wait"))
        assert not await engine.is_sleeping()
        assert engine.get_num_unfinished_requests() >= 1
        for _ in range(50):
            await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(first, sleeping)
        await engine.wake_up()
        await second

    run(tiny_folder, body)


def test_shutting_down_ends_requests_and_repeats(tiny_folder: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM(tiny_folder)
        task, outputs = await started(engine)
        await asyncio.to_thread(engine.shutdown)
        engine.shutdown()
        await task
        assert outputs[-1].finished
        with pytest.raises(StateError, match="shut down"):
            await last(engine, "a")
        with pytest.raises(StateError):
            await engine.check_health()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_asleep": "hope"}, "on_asleep is 'hope'"),
        ({"asleep_timeout_s": 0}, "asleep_timeout_s is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_seqs": 1}, "unknown argument 'max_seqs'"),
    ],
)
def test_impossible_options_are_refused(
    tiny_folder: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ArgumentError, match=told):
        AsyncLLM(tiny_folder, **options)


def test_a_fault_of_the_engine_fails_what_runs_and_the_thread_goes_on(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        scheduler = engine.engine.core.scheduler
        schedule, calls = scheduler.schedule, 0

        def once_broken() -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError
            return schedule()

        scheduler.schedule = once_broken  # type: ignore[method-assign]
        with pytest.raises(StepError, match="ZeroDivisionError"):
            await last(engine, PROMPTS[0])
        assert tokens(await last(engine, PROMPTS[0])) == expected[0]

    run(tiny_folder, body)


@pytest.mark.parametrize(
    "option",
    [
        {"cache_salt": None},
        {"cache_salt": b"x"},
        {"priority": "x"},
        {"priority": None},
        {"priority": 1.5},
        {"request_id": ["a"]},
        {"request_id": 5},
    ],
    ids=str,
)
def test_a_bad_option_fails_alone(
    tiny_folder: Path, expected: list[tuple[int, ...]], option: dict[str, Any]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        good = [asyncio.create_task(last(engine, prompt)) for prompt in PROMPTS]
        (name,) = option
        with pytest.raises(RequestError, match=name):
            await last(engine, "a", **option)
        assert [tokens(await task) for task in good] == expected

    run(tiny_folder, body, scheduling_policy="priority")


def test_many_completions_of_one_prompt_cost_no_more_each(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        params = SamplingParams(
            max_tokens=1, n=500, seed=1, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (output,) = await collect(engine, "a", params)
        assert len(output.outputs) == 500

    run(tiny_folder, body)


async def woken_without_weights(engine: AsyncLLM) -> None:
    """Leave an engine awake whose weights nobody has filled."""
    await engine.sleep(2)
    await engine.wake_up(["weights"])
    await engine.wake_up(["kv_cache", "graphs"])
    assert not await engine.is_sleeping()


@pytest.mark.parametrize("on_asleep", ["queue", "wake"])
def test_a_request_does_not_wait_for_ever_for_weights(
    tiny_folder: Path, expected: list[tuple[int, ...]], on_asleep: str
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await woken_without_weights(engine)
        with pytest.raises(
            WeightsIncompleteError, match=r"after 0\.2 s: .*reload_weights"
        ) as caught:
            await asyncio.wait_for(last(engine, PROMPTS[0]), 20)
        assert "model.norm.weight" in caught.value.names
        in_time = asyncio.create_task(last(engine, PROMPTS[0]))
        await asyncio.sleep(0)
        await engine.reload_weights()
        assert tokens(await in_time) == expected[0]

    run(tiny_folder, body, asleep_timeout_s=0.2, on_asleep=on_asleep)


def test_a_request_is_refused_at_once_while_weights_are_missing_if_so_chosen(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await woken_without_weights(engine)
        with pytest.raises(WeightsIncompleteError, match="awake, but"):
            await asyncio.wait_for(last(engine, PROMPTS[0]), 20)
        await engine.reload_weights()
        assert tokens(await last(engine, PROMPTS[0])) == expected[0]

    run(tiny_folder, body, on_asleep="reject")


def test_health_tells_of_missing_weights_and_not_of_sleep(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.check_health()
        await engine.sleep(2)
        await engine.check_health()
        await engine.wake_up()
        await woken_without_weights(engine)
        with pytest.raises(WeightsIncompleteError, match="awake, but"):
            await engine.check_health()
        await engine.reload_weights()
        await engine.begin_update()
        await engine.check_health()
        await engine.finish_update()

    run(tiny_folder, body)


def test_an_open_update_holds_a_request_without_failing_it(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.begin_update()
        held = asyncio.create_task(last(engine, PROMPTS[0]))
        await asyncio.sleep(0.2)
        assert not held.done()
        await engine.finish_update()
        assert tokens(await held) == expected[0]

    run(tiny_folder, body, asleep_timeout_s=0.05)


def test_a_request_without_an_id_passes_over_those_in_use(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    async def body(engine: AsyncLLM) -> None:
        await engine.pause_generation("keep")
        tasks = []
        for prompt, name in zip(PROMPTS, ["2", "2-1", None, None], strict=True):
            tasks.append(asyncio.create_task(last(engine, prompt, request_id=name)))
            while engine.get_num_unfinished_requests() < len(tasks):
                await asyncio.sleep(0.001)
                assert not tasks[-1].done()
        await engine.resume_generation()
        outputs = await asyncio.gather(*tasks)
        assert [output.request_id for output in outputs] == ["2", "2-1", "2-2", "3"]
        assert [tokens(output) for output in outputs] == expected

    run(tiny_folder, body)


def test_one_engine_is_woken_by_requests_of_several_loops(
    tiny_folder: Path, expected: list[tuple[int, ...]]
) -> None:
    engine = AsyncLLM(tiny_folder, on_asleep="wake", kv_cache_memory_bytes=1 << 20, block_size=4)

    async def main() -> None:
        await engine.sleep(2)
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in PROMPTS))
        assert [tokens(output) for output in outputs] == expected

    try:
        for _ in range(2):
            asyncio.run(main())
    finally:
        engine.shutdown()


@pytest.mark.parametrize("how", ["pause", "sleep"])
def test_the_wait_is_counted_from_the_beginning_of_the_nap(
    tiny_folder: Path, expected: list[tuple[int, ...]], how: str
) -> None:
    async def body(engine: AsyncLLM) -> None:
        # The second one waits in line for longer than the time limit, with the model awake.
        running, _ = await started(engine, 1)
        hold, entered = held_steps(engine)
        queued = asyncio.create_task(last(engine, PROMPTS[0]))
        while not entered.is_set():
            await asyncio.sleep(0)
        napping = asyncio.ensure_future(
            engine.pause_generation("keep") if how == "pause" else engine.sleep(1, mode="keep")
        )
        await asyncio.sleep(0.75)
        hold.set()
        await napping
        await asyncio.sleep(0.5)  # Past the limit of both, had it begun at their last output.
        assert not queued.done()
        assert not running.done()
        await engine.wake_up()
        assert tokens(await queued) == expected[0]
        await running

    run(tiny_folder, body, asleep_timeout_s=1, max_num_seqs=1)


def test_each_nap_is_counted_by_itself(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        # Naps so close together that the thread which steps does not see the moment between them.
        standstill = engine._thread.standstill
        note = standstill.note

        def missed(*, may_step: bool) -> None:
            if not may_step or threading.current_thread().name != "torpor-steps":
                note(may_step=may_step)

        standstill.note = missed  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        kept = asyncio.create_task(last(engine, PROMPTS[1], params))
        while not engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        for _ in range(3):
            await engine.pause_generation("keep", clear_cache=False)
            await asyncio.sleep(0.3)
            assert not kept.done()
            await engine.resume_generation()
        await kept

    run(tiny_folder, body, asleep_timeout_s=0.5)


def test_a_nap_is_counted_though_nobody_asks_at_its_beginning(tiny_folder: Path) -> None:
    # One output at the end: its reader asks at the start, and next when the limit has passed.
    params = SamplingParams(
        max_tokens=100, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def body(engine: AsyncLLM) -> None:
        launch = engine.engine.core._runner.launch

        def slow(step: Any) -> Any:
            time.sleep(0.01)
            return launch(step)

        engine.engine.core._runner.launch = slow  # type: ignore[method-assign]
        kept = asyncio.create_task(last(engine, PROMPTS[1], params))
        await asyncio.sleep(0.3)
        await engine.pause_generation("keep")
        begun_s = time.monotonic()
        with pytest.raises(AsleepError, match=r"after 1 s"):
            await kept
        assert 0.9 < time.monotonic() - begun_s < 1.5

    run(tiny_folder, body, asleep_timeout_s=1)


def test_outputs_that_have_come_are_read_however_late(tiny_folder: Path) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def body(engine: AsyncLLM) -> None:
        kept = asyncio.create_task(last(engine, PROMPTS[0], long))
        while not engine.get_num_unfinished_requests():
            await asyncio.sleep(0)
        stream = engine.generate(PROMPTS[1], params)
        await anext(stream)
        while engine.get_num_unfinished_requests() > 1:
            time.sleep(0.001)  # The loop stands still, so nothing is handed over yet.
        engine.engine.pause_generation("keep")
        time.sleep(0.2)
        assert len([output async for output in stream]) == 7
        with pytest.raises(AsleepError):
            await kept

    run(tiny_folder, body, asleep_timeout_s=0.05)


@pytest.mark.parametrize("name", [5, None, ["a", 5], [["a"]], b"x"], ids=repr)
def test_an_abort_of_no_id_is_refused(tiny_folder: Path, name: Any) -> None:
    async def body(engine: AsyncLLM) -> None:
        with pytest.raises(ArgumentError, match=r"request_id is .*; give a string"):
            await engine.abort(name)
        await engine.check_health()

    run(tiny_folder, body)


def test_an_abort_reaches_a_request_that_is_not_taken_in_yet(tiny_folder: Path) -> None:
    async def body(engine: AsyncLLM) -> None:
        # With the turn in this thread, the other one takes nothing in.
        with engine.engine.turns.take():
            task = asyncio.create_task(last(engine, PROMPTS[0], request_id="mine"))
            while not engine._thread._inbox:
                await asyncio.sleep(0)
            engine._thread.abort(["mine"])
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        assert tokens(output) == ()
        assert engine.get_num_unfinished_requests() == 0

    run(tiny_folder, body)


def test_an_abort_reaches_a_request_that_is_being_prepared(
    tiny_folder: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: AsyncLLM) -> None:
        begun, go_on = threading.Barrier(3), threading.Event()
        prepare = engine._prepare

        def slow(*arguments: Any, **options: Any) -> Any:
            begun.wait()
            go_on.wait()
            return prepare(*arguments, **options)

        monkeypatch.setattr(engine, "_prepare", slow)
        mine = asyncio.create_task(last(engine, PROMPTS[0], request_id="mine"))
        other = asyncio.create_task(last(engine, PROMPTS[1]))
        await asyncio.to_thread(begun.wait)
        await engine.abort("mine")
        go_on.set()
        output = await mine
        assert output.outputs[0].finish_reason == "abort"
        assert tokens(output) == ()
        assert tokens(await other) == expected[1]
        monkeypatch.undo()
        assert tokens(await last(engine, PROMPTS[0], request_id="mine")) == expected[0]

    run(tiny_folder, body)


def test_shutting_down_while_a_request_is_prepared_refuses_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = AsyncLLM(tiny_folder)
        begun, go_on = threading.Barrier(2), threading.Event()
        prepare = engine._prepare

        def slow(*arguments: Any, **options: Any) -> Any:
            request = prepare(*arguments, **options)
            begun.wait()
            go_on.wait()
            return request

        monkeypatch.setattr(engine, "_prepare", slow)
        task = asyncio.create_task(last(engine, PROMPTS[0]))
        await asyncio.to_thread(begun.wait)
        engine.shutdown()
        go_on.set()
        with pytest.raises(StateError, match="shut down"):
            await asyncio.wait_for(task, 60)

    asyncio.run(main())


def test_shutting_down_ends_every_thread_of_its_own(tiny_folder: Path) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        engine = AsyncLLM(tiny_folder, on_asleep="wake")
        await engine.sleep(1)
        await last(engine, PROMPTS[0])
        engine.shutdown()
        left = set(threading.enumerate()) - before
        assert [thread.name for thread in left if thread.name.startswith("torpor")] == []

    asyncio.run(main())
