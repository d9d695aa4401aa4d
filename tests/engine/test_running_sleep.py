"""Sleep, pause and update while requests run: nothing is lost, nothing is mixed, nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import tiny_weights

from torpor.engine.llm import LLM
from torpor.errors import AsleepError, CacheInUseError, StateError
from torpor.model.attention.torch_attention import TorchAttention
from torpor.model.native.attention import NativeAttention
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, n=2)
PROMPTS = ["the quick brown fox", "once upon a time there was a model that slept", [7, 8, 9]]

ORDERS: list[list[list[str] | None]] = [
    [None],
    [["weights"], ["kv_cache"]],
    [["kv_cache"], ["weights"]],
    [["graphs"], ["weights"], ["kv_cache"]],
]


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, kv_cache_memory_bytes=1 << 20, block_size=4) as made:
        yield made


class Background:
    """A batch that another thread generates, held before chosen steps."""

    def __init__(self, llm: LLM, params: SamplingParams, *, stop_before: int) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.outputs: list[RequestOutput] = []
        self.error: BaseException | None = None
        self._num_steps = 0
        self._stop_before = stop_before
        self._launch = llm.core._runner.launch
        llm.core._runner.launch = self._held  # type: ignore[method-assign]
        self._llm, self._params = llm, params
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.arrived.wait(30)

    def _held(self, step: Any) -> Any:
        self._num_steps += 1
        if self._num_steps == self._stop_before:
            self.arrived.set()
            assert self.go_on.wait(30)
        return self._launch(step)

    def _run(self) -> None:
        try:
            self.outputs = self._llm.generate(PROMPTS, self._params)
        except BaseException as error:
            self.error = error

    def join(self) -> list[RequestOutput]:
        self.thread.join(60)
        assert not self.thread.is_alive(), "generate hangs"
        if self.error is not None:
            raise self.error
        return self.outputs


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[entry.token_ids for entry in output.outputs] for output in outputs]


def asleep_behind(llm: LLM, background: Background, level: int, mode: str) -> Any:
    """Ask for sleep while a step runs; return its report once it is done."""
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(llm.sleep(level, mode=mode)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "sleep did not wait for the step"
    assert not llm.is_sleeping()
    background.go_on.set()
    thread.join(60)
    assert not thread.is_alive(), "sleep hangs"
    return reports[0]


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_go_on_after_the_wake_with_the_same_tokens(
    llm: LLM, level: int, order: list[list[str] | None], params: SamplingParams
) -> None:
    expected = tokens(llm.generate(PROMPTS, params))
    llm.reset_prefix_cache()
    background = Background(llm, params, stop_before=6)
    assert asleep_behind(llm, background, level, "keep").changed
    assert llm.core.num_unfinished_requests == len(PROMPTS)
    for tags in order:
        assert llm.core.num_unfinished_requests == len(PROMPTS), "a partial wake stepped"
        with pytest.raises(AsleepError):
            llm.generate("a", params)
        llm.wake_up(tags, reload=True if level == 2 else None)
    outputs = background.join()
    assert tokens(outputs) == expected
    assert all(output.metrics and output.metrics.num_preemptions for output in outputs)
    assert llm.verify().ok


@pytest.mark.parametrize("level", [0, 1, 2])
def test_aborted_requests_end_with_what_they_have(llm: LLM, level: int) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    llm.reset_prefix_cache()
    background = Background(llm, PARAMS, stop_before=6)
    asleep_behind(llm, background, level, "abort")
    outputs = background.join()
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    assert all(output.finished for output in outputs)
    for output, whole in zip(outputs, expected, strict=True):
        assert 0 < len(output.outputs[0].token_ids) < 24
        assert output.outputs[0].token_ids == whole[0][: len(output.outputs[0].token_ids)]
    llm.wake_up()
    assert llm.status()["kv_cache_usage"] == 0
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("level", [0, 1, 2])
def test_waiting_for_requests_lets_them_end(llm: LLM, level: int) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    llm.reset_prefix_cache()
    background = Background(llm, PARAMS, stop_before=6)
    asleep_behind(llm, background, level, "wait")
    assert tokens(background.join()) == expected
    assert llm.is_sleeping()


def test_a_drain_that_cannot_go_on_says_so_and_stays_awake(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    llm.sleep(0, mode="keep")
    with pytest.raises(AsleepError, match="paused"):
        llm.sleep(1, mode="wait")
    assert llm.sleeper.state.value == "awake"
    llm.resume_generation()
    llm.sleep(1, mode="wait")
    assert stream.output.finished


def test_a_kept_request_survives_several_sleeps_of_every_kind(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[1], PARAMS)
    stream, pieces = llm.stream(PROMPTS[1], PARAMS), []
    kinds: list[tuple[int, list[str] | None]] = [
        (1, None),
        (1, ["kv_cache"]),
        (1, ["weights"]),
        (1, ["graphs"]),
        (2, None),
        (0, None),
    ]
    for level, tags in kinds:
        pieces.append(next(stream))
        llm.sleep(level, tags=tags, mode="keep")
        llm.wake_up()
    pieces += list(stream)
    assert "".join(pieces) == expected.outputs[0].text
    assert tokens([stream.output]) == tokens([expected])


def test_the_sleeper_itself_may_sleep_and_nothing_stale_is_read(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[1], PARAMS)
    stream = llm.stream(PROMPTS[1], PARAMS)
    pieces = [next(stream)]
    llm.sleeper.sleep(level=1)
    with pytest.raises(AsleepError):
        next(stream)
    llm.sleeper.wake_up()
    pieces += list(stream)
    assert "".join(pieces) == expected.outputs[0].text


def test_pausing_freezes_and_resuming_goes_on(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[1], PARAMS)
    stream = llm.stream(PROMPTS[1], PARAMS)
    pieces = [next(stream)]
    for clear_cache in (True, False):
        llm.pause_generation("keep", clear_cache=clear_cache)
        assert llm.is_paused()
        with pytest.raises(AsleepError):
            next(stream)
        with pytest.raises(AsleepError):
            llm.generate("a")
        llm.resume_generation()
        assert not llm.is_paused()
        pieces.append(next(stream))
    assert "".join([*pieces, *stream]) == expected.outputs[0].text


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pausing_can_end_requests(llm: LLM, mode: str) -> None:
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    llm.pause_generation(mode)
    assert stream.output.finished
    assert stream.output.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_step_buffers_wake_full_of_the_poison_and_nothing_reads_it(
    tiny_folder: Path, cpu_kernels: str
) -> None:
    with LLM(
        tiny_folder, kv_cache_memory_bytes=1 << 20, block_size=4, cpu_kernels=cpu_kernels
    ) as llm:
        expected = tokens(llm.generate(PROMPTS, PARAMS))
        buffers = scratch_of(llm)
        addresses = [buffer.data_ptr() for buffer in buffers]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            for buffer in buffers:
                # Whatever the pattern of the dtype is: one byte everywhere, and not zero.
                (byte,) = set(buffer.view(torch.uint8).flatten().tolist()[:4096])
                assert byte != 0
            assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
        assert [buffer.data_ptr() for buffer in buffers] == addresses


def scratch_of(llm: LLM) -> list[torch.Tensor]:
    """What a step writes before it reads it."""
    inputs, attention = llm.core._runner._inputs, llm.core._runner._attention
    buffers = [inputs._ids_T, inputs._slots_T, inputs._tables_RB]
    if isinstance(attention, TorchAttention):
        return [*buffers, attention._workspace._narrow]
    assert isinstance(attention, NativeAttention)
    return [*buffers, attention._scratch]


# -- weights ------------------------------------------------------------------------------------


def test_an_update_under_running_requests_registers_no_more_of_their_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    llm.update_weights(tiny_weights(1).items(), version="step-1")
    list(stream)
    assert stream.output.weights_version == "step-1"
    (after,) = llm.generate(PROMPTS[1], PARAMS)
    assert after.num_cached_tokens == 0, "a block of the old weights was hit"
    (again,) = llm.generate(PROMPTS[1], PARAMS)
    assert again.num_cached_tokens
    assert tokens([again]) == tokens([after])


def test_a_kept_request_is_recomputed_under_new_weights(llm: LLM, other_folder: Path) -> None:
    """Rollout, sleep, new weights, wake: what comes after is what a fresh engine says."""
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    llm.sleep(2, mode="keep")
    told = len(stream.output.outputs[0].token_ids)
    llm.wake_up(["weights"], reload=False)
    llm.update_weights(tiny_weights(1).items())
    llm.wake_up(["kv_cache"])
    list(stream)
    output = stream.output
    done = output.outputs[0].token_ids
    with LLM(other_folder) as fresh:
        prompt = [*output.prompt_token_ids, *done[:told]]
        rest = SamplingParams(temperature=0, max_tokens=24 - told, ignore_eos=True)
        (expected,) = fresh.generate([prompt], rest)
    assert done[told:] == expected.outputs[0].token_ids


def test_no_step_runs_between_the_pairs_of_an_update(llm: LLM) -> None:
    background = Background(llm, PARAMS, stop_before=6)
    finished = threading.Event()

    def push() -> None:
        for pair in tiny_weights(1).items():
            llm.load_weights([pair])
            epochs.append(llm.sleeper.weights_epoch)
        steps.append(background._num_steps)
        llm.finish_update()
        finished.set()

    epochs: list[int] = []
    steps: list[int] = []
    thread = threading.Thread(target=push)
    thread.start()
    thread.join(0.05)
    background.go_on.set()
    assert finished.wait(30)
    thread.join()
    background.join()
    assert len(set(epochs)) == 1, "a step closed the update"
    assert steps[0] in (6, 7)


# -- the prefix cache ---------------------------------------------------------------------------


def test_resetting_the_prefix_cache_needs_idle_requests(llm: LLM) -> None:
    llm.cache.reserve(2, "test")
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    next(streams[0])
    with pytest.raises(CacheInUseError, match="3 running requests hold"):
        llm.reset_prefix_cache()
    assert llm.reset_prefix_cache(reset_running_requests=True)
    for stream in streams:
        list(stream)
    assert llm.reset_prefix_cache()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_reserved_blocks_never_stand_in_the_way_of_a_reset(llm: LLM, mode: str) -> None:
    reserved = llm.cache.reserve(2, "test")
    stream = llm.stream(PROMPTS[1], PARAMS)
    next(stream)
    llm.sleep(1, mode=mode)
    assert llm.reset_prefix_cache()
    llm.wake_up()
    assert llm.reset_prefix_cache()
    list(stream)
    assert llm.reset_prefix_cache()
    assert llm.cache.reserve(1, "other")[0] not in reserved
    llm.cache.check()


@pytest.mark.parametrize("change", ["sleep 1", "sleep 2", "update", "kv_cache"])
def test_a_forgotten_reset_never_hits_what_is_gone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    llm.generate(PROMPTS, PARAMS)
    (warm,) = llm.generate(PROMPTS[1], PARAMS)
    assert warm.num_cached_tokens
    # Whoever is meant to clear the index does nothing: only the epochs are left to protect it.
    monkeypatch.setattr(llm.cache, "reset_prefix_cache", lambda: None)
    monkeypatch.setattr(llm.cache, "drop", lambda: None)
    if change == "update":
        llm.update_weights(tiny_weights(1).items())
    elif change == "kv_cache":
        llm.release_kv_cache_memory()
        llm.wake_up()
    else:
        llm.sleep(int(change[-1]))
        llm.wake_up()
    (cold,) = llm.generate(PROMPTS[1], PARAMS)
    assert cold.num_cached_tokens == 0


def test_closing_ends_what_runs(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder)
    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    llm.close()
    assert stream.output.outputs[0].finish_reason == "abort"
    with pytest.raises(StateError, match="closed"):
        llm.generate("a")


def test_threads_that_generate_together_share_steps(llm: LLM) -> None:
    expected = [tokens(llm.generate([prompt], PARAMS)) for prompt in PROMPTS]
    llm.reset_prefix_cache()
    results: dict[int, Any] = {}
    barrier = threading.Barrier(len(PROMPTS))

    def work(index: int) -> None:
        barrier.wait(10)
        results[index] = tokens(llm.generate([PROMPTS[index]], PARAMS))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[index] for index in range(len(PROMPTS))] == expected


def test_a_stream_that_came_too_late_for_a_drain_waits_without_the_turn(llm: LLM) -> None:
    background = Background(llm, PARAMS, stop_before=4)
    reports: list[Any] = []
    sleeping = threading.Thread(target=lambda: reports.append(llm.sleep(0, mode="wait")))
    sleeping.start()
    pieces: list[str] = []

    def read() -> None:
        stream = llm.stream(PROMPTS[0], PARAMS)
        try:
            pieces.extend(stream)
        except AsleepError:
            pieces.append("asleep")

    reading = threading.Thread(target=read)
    reading.start()
    background.go_on.set()
    for thread in (sleeping, reading):
        thread.join(60)
        assert not thread.is_alive(), "a late stream and a drain wait for each other"
    background.join()
    assert reports
    assert pieces


@pytest.fixture
def slow_reader(tiny_folder: Path) -> Iterator[LLM]:
    """One token a step: a prompt takes as many steps as it has tokens."""
    with LLM(tiny_folder, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=1) as made:
        yield made


def test_control_takes_its_turn_within_a_step_of_a_stream(slow_reader: LLM) -> None:
    llm = slow_reader
    stream = llm.stream([list(range(3, 90))], SamplingParams(max_tokens=8, ignore_eos=True))
    steps_before_sleep: list[int] = []
    launch = llm.core._runner.launch
    entered, asked = threading.Event(), threading.Event()

    def slow(step: Any) -> Any:
        entered.set()
        assert asked.wait(30)
        return launch(step)

    llm.core._runner.launch = slow  # type: ignore[method-assign]

    def sleep() -> None:
        assert entered.wait(30)
        before = llm.core.scheduler.stats.num_steps
        asked.set()
        llm.sleep(0, mode="keep")
        steps_before_sleep.append(llm.core.scheduler.stats.num_steps - before)

    thread = threading.Thread(target=sleep)
    thread.start()
    with pytest.raises(AsleepError):
        list(stream)
    thread.join(30)
    assert steps_before_sleep[0] <= 3


def test_an_interrupt_while_others_generate_loses_no_turn(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    background = Background(llm, PARAMS, stop_before=3)
    wait_until, calls = llm.turns.wait_until, 0

    def interrupted(holds: Any) -> None:
        nonlocal calls
        calls += 1
        if threading.current_thread() is threading.main_thread() and calls > 2:
            llm.turns._release()
            raise KeyboardInterrupt
        wait_until(holds)

    llm.turns.wait_until = interrupted  # type: ignore[method-assign]
    background.go_on.set()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], PARAMS)
    llm.turns.wait_until = wait_until  # type: ignore[method-assign]
    assert tokens(background.join()) == expected
    assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
    assert llm.core.num_unfinished_requests == 0


def test_an_interrupted_thread_waits_for_the_step_of_another(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes between turns, while another thread is in the middle of a step."""
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    take, abort = llm.turns.take, llm.core.abort
    others: list[Background] = []
    had_turn: list[bool] = []

    def interrupted(holds: Any) -> None:
        monkeypatch.undo()
        llm.turns._release()
        others.append(Background(llm, PARAMS, stop_before=2))
        monkeypatch.setattr(llm.turns, "take", noted_take)
        monkeypatch.setattr(llm.core, "abort", noted_abort)
        raise KeyboardInterrupt

    # Whatever the interrupted thread does first, the other one goes on from there.
    def noted_take() -> Any:
        others[0].go_on.set()
        return take()

    def noted_abort(names: Any) -> Any:
        had_turn.append(llm.turns.held)
        others[0].go_on.set()
        return abort(names)

    monkeypatch.setattr(llm.turns, "wait_until", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], PARAMS)
    assert tokens(others[0].join()) == expected
    assert had_turn[0], "requests were aborted in the middle of another thread's step"
    assert llm.core.num_unfinished_requests == 0


# -- from within --------------------------------------------------------------------------------


INSIDE = ["sleep", "generate", "reload_weights", "reset_prefix_cache", "verify", "close"]


@pytest.mark.parametrize("name", INSIDE)
def test_a_call_from_within_a_step_is_refused_and_changes_nothing(llm: LLM, name: str) -> None:
    """As a signal handler calls it, in the thread that steps."""
    before = tokens(llm.generate(PROMPTS, PARAMS))
    launch, calls = llm.core._runner.launch, []

    def interrupted(step: Any) -> Any:
        launched = launch(step)
        if len(calls) < 3:
            arguments = [PROMPTS[0]] if name == "generate" else []
            with pytest.raises(StateError, match="in the middle of a step of the same thread"):
                getattr(llm, name)(*arguments)
            calls.append(name)
        return launched

    llm.core._runner.launch = interrupted  # type: ignore[method-assign]
    assert tokens(llm.generate(PROMPTS, PARAMS)) == before
    assert len(calls) == 3
    assert llm.status()["is_paused"] is False


@pytest.mark.parametrize(
    "name", [*INSIDE, "update_weights", "begin_update", "finish_update", "load_weights"]
)
def test_what_gives_an_updates_pairs_cannot_change_the_engine(llm: LLM, name: str) -> None:
    weights, refused = tiny_weights(1), []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(weights.items()):
            if index == 3:
                arguments = {"generate": [PROMPTS[0]], "update_weights": [weights.items()]}
                arguments["load_weights"] = arguments["update_weights"]
                with pytest.raises(StateError, match="pairs of an update are being written"):
                    getattr(llm, name)(*arguments.get(name, []))
                refused.append(llm.status()["state"])
            yield pair

    report = llm.update_weights(pairs())
    assert refused
    assert report.updated == len(weights)
    assert not llm.verify().differing
    answers = tokens(llm.generate(PROMPTS, PARAMS))
    llm.update_weights(weights.items())
    assert tokens(llm.generate(PROMPTS, PARAMS)) == answers
