"""The LLM on a tiny random model: exact tokens across sleep, wake and update."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conftest import tiny_weights

from torpor.engine.llm import LLM
from torpor.errors import (
    ArgumentError,
    AsleepError,
    CacheInUseError,
    CheckpointError,
    ConfigError,
    ForeignWriteError,
    GenerationError,
    ModelNotFoundError,
    OutOfMemoryError,
    PromptTooLongError,
    RequestError,
    StateError,
    WeightsError,
    WeightsIncompleteError,
    WeightsMismatchError,
)
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(seed=7, top_p=0.95, max_tokens=12, logprobs=3, ignore_eos=True, n=2)
PROMPTS = ["the quick brown fox", "once upon"]

WAKE_ORDERS: dict[str, list[list[str] | None]] = {
    "all": [None],
    "together": [["weights", "kv_cache"]],
    "weights first": [["weights"], ["kv_cache"]],
    "cache first": [["kv_cache"], ["weights"]],
}


@pytest.fixture
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder) as made:
        yield made


def answers(llm: LLM) -> list[Any]:
    """Text, tokens and log probabilities of a greedy and a sampled batch."""
    outputs = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, SAMPLED)
    return [output.outputs for output in outputs]


def tokens(output: RequestOutput) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


def finish(steps: Iterator[str]) -> tuple[list[str], RequestOutput]:
    pieces: list[str] = []
    while True:
        try:
            pieces.append(next(steps))
        except StopIteration as done:
            return pieces, done.value


# -- generation ---------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.generate([*PROMPTS, [5, 6]], GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in (*PROMPTS, [5, 6])]
    # Bits of log probabilities may depend on what runs beside; tokens and text may not.
    assert [tokens(output) for output in together] == [tokens(output) for output in alone]
    assert [output.outputs[0].text for output in together] == [
        output.outputs[0].text for output in alone
    ]
    assert [output.prompt for output in together] == [*PROMPTS, None]
    assert [output.request_id for output in (*together, *alone)] == list("012345")


def test_a_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.outputs == llm.generate(PROMPTS[0], GREEDY)[0].outputs


def test_every_prompt_can_have_parameters_of_its_own(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_logprobs_are_those_of_a_fresh_prefill(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], GREEDY)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    again = llm.generate(
        {"prompt_token_ids": [*output.prompt_token_ids, *completion.token_ids[:-1]]},
        SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True),
    )
    last = completion.token_ids[-1]
    recomputed = again[0].outputs[0].logprobs
    assert recomputed is not None
    assert recomputed[0][last].logprob == pytest.approx(
        completion.logprobs[-1][last].logprob, abs=1e-5
    )


def test_the_seed_of_a_request_decides_its_draws(llm: LLM) -> None:
    def tokens(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(seed=seed, max_tokens=12, temperature=2.0, ignore_eos=True)
        return llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(None) != tokens(None)


def test_the_seed_of_the_engine_decides_all_others(tiny_folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)

    def run(seed: int) -> list[Any]:
        with LLM(tiny_folder, seed=seed) as llm:
            return [output.outputs for output in llm.generate(PROMPTS * 2, params)]

    assert run(3) == run(3) != run(4)
    first, *others = run(3)
    assert first not in others


def test_a_prompt_does_not_see_the_one_before(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[1], GREEDY)[0].outputs
    llm.generate("the same bytes come back " * 2, GREEDY)
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs == expected


def test_a_prompt_may_fill_the_context_but_for_one_token(llm: LLM) -> None:
    (output,) = llm.generate([5] * 127, GREEDY)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(PromptTooLongError, match="128 tokens and max_model_len is 128"):
        llm.generate([5] * 128, GREEDY)


def test_the_context_can_be_made_smaller(tiny_folder: Path) -> None:
    with LLM(tiny_folder, max_model_len=8) as llm:
        assert len(llm.generate([5] * 5, GREEDY)[0].outputs[0].token_ids) == 3
        assert llm.status()["max_model_len"] == 8
        with pytest.raises(PromptTooLongError):
            llm.generate([5] * 8, GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (["fine", ""], None),
        (["fine", [320]], None),
        (["fine", [5] * 128], None),
        (["fine", {"text": "a"}], None),
        (["fine", 5], None),
        (5, None),
        ("fine", [SamplingParams(), SamplingParams()]),
        ("fine", {"temperature": 0}),
        ("fine", SamplingParams(stop_token_ids=[320])),
    ],
    ids=str,
)
def test_one_bad_request_is_refused_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: Any, params: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("torpor.engine.steps.runner.ModelRunner.launch", unreachable)
        with pytest.raises(RequestError):
            llm.generate(prompts, params)
    assert answers(llm) == answers(llm)


def unreachable(*_: Any) -> None:
    raise AssertionError("a step ran")


def test_a_negative_or_nan_parameter_never_reaches_the_model() -> None:
    with pytest.raises(RequestError):
        SamplingParams(temperature=float("nan"))


def test_an_interrupted_generation_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(llm)
    launch, num_steps = llm.core._runner.launch, 0

    def interrupt(step: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return launch(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm.core._runner, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert num_steps == 3
    assert llm.core.num_unfinished_requests == 0
    assert answers(llm) == expected
    llm.sleep(1)
    llm.wake_up()
    assert answers(llm) == expected


def test_nan_logits_fail_the_request_and_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(llm)
    with monkeypatch.context() as patch:
        compute = llm.core._runner._model.compute_logits

        def second_is_nan(hidden_RD: torch.Tensor) -> torch.Tensor:
            logits_RV = compute(hidden_RD)
            logits_RV[1:2] = torch.nan
            return logits_RV

        patch.setattr(llm.core._runner._model, "compute_logits", second_is_nan)
        with pytest.raises(
            GenerationError, match=r"320 of 320 logits at position .* NaN"
        ) as caught:
            llm.generate(PROMPTS, GREEDY)
    good, bad = caught.value.outputs
    assert good.outputs[0].token_ids == expected[0][0].token_ids
    assert good.error is None
    assert isinstance(bad.error, RequestError)
    assert bad.outputs[0].finish_reason == "error"
    assert answers(llm) == expected


# -- chat and streams ---------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "the dog"}]


def test_chat_answers_through_the_template(llm: LLM) -> None:
    (output,) = llm.chat(CHAT, GREEDY)
    text = "<|start|>user\nthe dog<|end|>\n<|start|>assistant\n"
    assert output.prompt == text
    assert output.prompt_token_ids == tuple(llm.get_tokenizer().encode(text))
    llm.reset_prefix_cache()  # bits of log probabilities may depend on what was cached
    assert output.outputs == llm.generate(text, GREEDY)[0].outputs


def test_chat_takes_several_conversations(llm: LLM) -> None:
    other = [{"role": "system", "content": "sleep"}, *CHAT]
    outputs = llm.chat([CHAT, other], GREEDY)
    assert [tokens(output) for output in outputs] == [
        tokens(llm.chat(CHAT, GREEDY)[0]),
        tokens(llm.chat(other, GREEDY)[0]),
    ]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        {"role": "user", "content": "hi"},
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}],
        [CHAT, []],
        [CHAT, "hi"],
        [{"role": "user", "content": "word " * 200}],
        [{"role": "user", "content": "\ud800"}],
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY)
    with pytest.raises(RequestError):
        llm.stream_chat(messages, GREEDY)


@pytest.mark.parametrize("template", [3, True, b"x", ["x"], float("nan")])
def test_a_template_is_text(llm: LLM, template: Any) -> None:
    for answer in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError) as caught:
            answer(CHAT, GREEDY, chat_template=template)  # type: ignore[operator]
        assert str(caught.value) == f"chat_template is {template!r}; give a string"


def test_a_stream_gives_the_text_of_generate_in_pieces(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=12, ignore_eos=True)):
        pieces, output = finish(llm.stream(PROMPTS[0], params))
        (expected,) = llm.generate(PROMPTS[0], params)
        assert output.outputs == expected.outputs
        assert "".join(pieces) == expected.outputs[0].text
        assert all(pieces)


def test_a_chat_stream_gives_the_text_of_chat_in_pieces(llm: LLM) -> None:
    pieces, output = finish(llm.stream_chat(CHAT, GREEDY))
    assert "".join(pieces) == output.outputs[0].text
    llm.reset_prefix_cache()
    assert output.outputs == llm.chat(CHAT, GREEDY)[0].outputs


def test_a_bad_stream_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    with pytest.raises(RequestError, match="one prompt, not 2"):
        llm.stream(["a", "b"])
    with pytest.raises(RequestError, match="n is 2"):
        llm.stream("a", SamplingParams(n=2))
    llm.sleep(1)
    with pytest.raises(AsleepError):
        llm.stream("a")


def test_a_stream_ends_where_the_model_fell_asleep(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    llm.sleep(1)
    pieces, output = finish(stream)
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == first + "".join(pieces)


def test_a_stream_that_is_kept_goes_on_after_the_wake(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY)
    for level in (0, 1, 2):
        stream = llm.stream(PROMPTS[0], GREEDY)
        pieces = [next(stream), next(stream)]
        llm.sleep(level, mode="keep")
        for _ in range(2):
            with pytest.raises(AsleepError, match="ask for the next piece again"):
                next(stream)
        llm.wake_up()
        pieces += list(stream)
        assert "".join(pieces) == expected.outputs[0].text
        assert tokens(stream.output) == tokens(expected)


def test_streams_and_batches_run_side_by_side(llm: LLM) -> None:
    expected = [tokens(output) for output in llm.generate(PROMPTS, GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    assert [tokens(output) for output in llm.generate(PROMPTS, GREEDY)] == expected
    assert [tokens(finish(stream)[1]) for stream in streams] == expected


def test_a_stream_closed_or_lost_gives_its_blocks_back(llm: LLM) -> None:
    stream, lost = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    with pytest.raises(CacheInUseError, match="2 running requests hold"):
        llm.reset_prefix_cache()
    stream.close()
    stream.close()
    del lost
    llm.reset_prefix_cache()
    assert llm.status()["kv_cache_usage"] == 0


# -- sleep and wake -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", WAKE_ORDERS.values(), ids=WAKE_ORDERS.keys())
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("poison", [255, 127])
def test_answers_are_bit_equal_after_sleep(
    tiny_folder: Path, level: int, order: list[list[str] | None], poison: int
) -> None:
    with LLM(tiny_folder, poison=poison) as llm:
        expected = answers(llm)
        for _ in range(3):
            report = llm.sleep(level)
            assert (report.level, report.changed) == (level, True)
            assert llm.is_sleeping()
            for tags in order:
                with pytest.raises(AsleepError, match="wake_up"):
                    llm.generate(PROMPTS, GREEDY)
                llm.wake_up(tags, reload=True if level == 2 else None)
            assert not llm.is_sleeping()
            assert answers(llm) == expected
            assert llm.verify().ok


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_tags_can_fall_asleep_one_by_one(llm: LLM, order: list[str]) -> None:
    expected = answers(llm)
    for tag in order:
        llm.sleep(1, tags=[tag])
        with pytest.raises(AsleepError):
            llm.generate(PROMPTS, GREEDY)
    llm.wake_up()
    assert answers(llm) == expected


def test_the_kv_cache_alone_can_be_released(llm: LLM) -> None:
    expected = answers(llm)
    report = llm.release_kv_cache_memory()
    assert "kv_cache" in report.tags
    assert "weights" not in report.tags
    with pytest.raises(AsleepError, match="kv_cache"):
        llm.generate(PROMPTS, GREEDY)
    llm.wake_up(["kv_cache"])
    assert answers(llm) == expected


def test_weights_awake_without_the_kv_cache_do_not_generate(llm: LLM) -> None:
    llm.sleep(1)
    llm.wake_up(["weights"])
    with pytest.raises(AsleepError, match="kv_cache"):
        llm.generate(PROMPTS, GREEDY)


def test_after_level_2_the_weights_have_to_come_back(llm: LLM) -> None:
    expected = answers(llm)
    llm.sleep(2)
    llm.wake_up(["weights", "kv_cache"])
    with pytest.raises(WeightsIncompleteError, match=r"reload_weights|update"):
        llm.generate(PROMPTS, GREEDY)
    llm.reload_weights()
    assert answers(llm) == expected


def test_a_plain_wake_never_undoes_an_update(llm: LLM, other_folder: Path) -> None:
    llm.update_weights(tiny_weights(1).items(), version="step-1")
    updated = answers(llm)
    llm.sleep(2)
    with pytest.raises(StateError):
        llm.wake_up()
    assert llm.is_sleeping()
    llm.wake_up(reload=False)
    with pytest.raises(WeightsIncompleteError):
        llm.generate(PROMPTS, GREEDY)
    llm.update_weights(tiny_weights(1).items())
    assert answers(llm) == updated


def test_a_wake_that_reloads_by_name_does_undo_an_update(llm: LLM) -> None:
    original = answers(llm)
    llm.update_weights(tiny_weights(1).items())
    llm.sleep(2)
    llm.wake_up(reload=True)
    assert answers(llm) == original


def test_level_1_keeps_an_update(llm: LLM) -> None:
    llm.update_weights(tiny_weights(1).items(), version="step-1")
    updated = answers(llm)
    for _ in range(2):
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == updated


def test_level_0_pauses_without_moving_memory(llm: LLM) -> None:
    expected = answers(llm)
    assert not llm.is_sleeping()
    report = llm.sleep(0)
    assert (report.level, report.changed, report.tags) == (0, True, ())
    assert llm.is_sleeping()
    assert llm.verify().ok
    with pytest.raises(AsleepError, match=r"paused; call resume_generation\(\), or wake_up"):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.sleep(0).changed
    report = llm.wake_up()  # type: ignore[assignment]
    assert report.changed
    assert "generation resumed" in report.notices
    assert answers(llm) == expected


def test_a_pause_ends_only_when_nothing_sleeps(llm: LLM) -> None:
    llm.sleep(0)
    llm.sleep(1)
    llm.wake_up(["weights"])
    assert llm.is_sleeping()
    assert llm.status()["is_paused"]
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping()
    assert not llm.status()["is_paused"]
    llm.generate(PROMPTS, GREEDY)


def test_pausing_a_sleeping_model_is_harmless(llm: LLM) -> None:
    expected = answers(llm)
    llm.sleep(1)
    llm.sleep(0)
    llm.wake_up()
    assert answers(llm) == expected


def test_sleeping_and_waking_twice_says_so(llm: LLM) -> None:
    llm.sleep("1")
    again = llm.sleep(1)
    assert not again.changed
    assert again.notices
    llm.wake_up()
    report = llm.wake_up()
    assert not report.changed
    assert report.notices


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"level": 7}, "level is 7"),
        ({"level": "7"}, "level is '7'"),
        ({"level": True}, "level is True"),
        ({"level": None}, "level is None"),
        ({"tags": ["kvcache"]}, "kvcache"),
        ({"tags": []}, "tags is empty"),
        ({"mode": "drop"}, "mode is 'drop'"),
        ({"level": 0, "tags": ["weights"]}, "level 0 pauses everything"),
    ],
    ids=str,
)
def test_an_impossible_sleep_changes_nothing(
    llm: LLM, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        llm.sleep(**arguments)
    assert told in str(caught.value)
    assert not llm.is_sleeping()
    llm.generate(PROMPTS, GREEDY)


def test_an_impossible_wake_changes_nothing(llm: LLM) -> None:
    llm.sleep(1)
    for tags in (["kvcache"], []):
        with pytest.raises(ArgumentError):
            llm.wake_up(tags)
    assert llm.is_sleeping()


def test_a_write_outside_the_door_is_an_error_at_sleep(llm: LLM) -> None:
    with torch.no_grad():
        next(llm.core._runner._model.parameters()).add_(1)
    with pytest.raises(ForeignWriteError):
        llm.sleep(1)
    assert not llm.is_sleeping()
    assert not llm.verify().ok


# -- updates ------------------------------------------------------------------------------------


def by_source(llm: LLM, folder: Path) -> None:
    from torpor.model.checkpoints.resolve import resolve_model

    llm.update_weights(resolve_model(folder).source)


def by_pairs(llm: LLM, folder: Path) -> None:
    llm.update_weights(tiny_weights(1).items(), version="step-1")


def pair_by_pair(llm: LLM, folder: Path) -> None:
    for name, tensor in tiny_weights(1).items():
        assert llm.load_weights([(name, tensor)])
    assert llm.reset_prefix_cache() is True


def pair_by_pair_without_an_end(llm: LLM, folder: Path) -> None:
    for pair in tiny_weights(1).items():
        llm.load_weights([pair])


Update = Callable[[LLM, Path], None]


@pytest.mark.parametrize("update", [by_source, by_pairs, pair_by_pair, pair_by_pair_without_an_end])
@pytest.mark.parametrize("level", [None, 1, 2])
def test_an_update_answers_exactly_as_a_fresh_model(
    llm: LLM, other_folder: Path, update: Update, level: int | None
) -> None:
    with LLM(other_folder) as fresh:
        expected = answers(fresh)
    before = answers(llm)
    if level is not None:
        llm.sleep(level)
        llm.wake_up(["weights"], reload=False)
    update(llm, other_folder)
    if level is not None:
        llm.wake_up(["kv_cache"])
    assert answers(llm) == expected != before


def test_resetting_the_prefix_cache_ends_an_update(llm: LLM) -> None:
    llm.sleep(2)
    llm.wake_up(["weights"])
    *most, last = tiny_weights(1).items()
    llm.load_weights(most)
    with pytest.raises(WeightsIncompleteError, match=re.escape(last[0])):
        llm.reset_prefix_cache()
    llm.load_weights([last])
    epoch = llm.status()["weights_epoch"]
    assert llm.reset_prefix_cache() is True
    assert llm.status()["weights_epoch"] == epoch + 1


def test_outputs_name_the_weights_they_come_from(llm: LLM) -> None:
    (first,) = llm.generate("a", GREEDY)
    llm.update_weights(tiny_weights(1).items(), version="step-1")
    (second,) = llm.generate("a", GREEDY)
    assert (first.weights_version, second.weights_version) == (None, "step-1")
    assert second.weights_epoch == first.weights_epoch + 1


def test_a_bad_update_leaves_the_weights_as_they_were(llm: LLM) -> None:
    expected = answers(llm)
    weights = tiny_weights(1)
    norm = weights["model.norm.weight"]
    for bad, error in (
        ({"model.norm.weight": norm[:-1]}, WeightsMismatchError),
        ({"model.nrm.weight": norm}, WeightsMismatchError),
        ({"model.norm.weight": torch.full_like(norm, float("nan"))}, WeightsError),
    ):
        with pytest.raises(error):
            llm.update_weights({**weights, **bad}.items())
        assert answers(llm) == expected


def test_reloading_the_same_checkpoint_changes_nothing(llm: LLM) -> None:
    expected, epoch = answers(llm), llm.generate("a")[0].weights_epoch
    report = llm.reload_weights()
    assert report.changed == ()
    assert llm.generate("a")[0].weights_epoch == epoch
    assert answers(llm) == expected


def test_there_is_nothing_to_reset_without_an_update(llm: LLM) -> None:
    assert llm.reset_prefix_cache() is True
    llm.sleep(1)
    assert llm.reset_prefix_cache() is True


# -- loading and closing ------------------------------------------------------------------------


def test_status_tells_sizes_and_state(llm: LLM, tiny_folder: Path) -> None:
    status = llm.status()
    assert status["model"] == str(tiny_folder)
    # 64 sequences of 8 blocks and the null block, each 2 layers, keys and values, 16 positions,
    # 2 heads of 12, 4 bytes.
    assert status["kv_cache_bytes"] == (64 * 8 + 1) * 2 * 2 * 16 * 2 * 12 * 4
    assert json.loads(json.dumps(status)) == status
    llm.sleep(0)
    assert llm.status()["is_paused"]


def test_a_closed_model_refuses_everything_and_closes_again(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert finish(stream)[1].outputs[0].finish_reason == "abort"
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("a"),
        lambda: llm.chat(CHAT),
        lambda: llm.stream("a"),
        llm.sleep,
        llm.wake_up,
        llm.reload_weights,
        llm.verify,
        llm.status,
        lambda: llm.load_weights([]),
        llm.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(StateError, match="closed; make a new one"):
            call()
    assert not llm.is_sleeping()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sleeping_model_can_be_closed(tiny_folder: Path, level: int) -> None:
    llm = LLM(tiny_folder)
    llm.sleep(level)
    llm.close()
    assert not llm.is_sleeping()


def test_half_precision_runs_and_sleeps(tiny_folder: Path) -> None:
    with LLM(tiny_folder, dtype="bfloat16") as llm:
        expected = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm) == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"dtype": "int8"}, ArgumentError),
        ({"max_model_len": 129}, ArgumentError),
        ({"max_model_len": 0}, ArgumentError),
        ({"seed": None}, ArgumentError),
        ({"num_threads": 0}, ArgumentError),
        ({"on_foreign_write": "ignore"}, ArgumentError),
        ({"host_copy": "never"}, ArgumentError),
        ({"poison": 3}, ArgumentError),
        ({"model": 5}, ArgumentError),
        ({"model": "no-such-model"}, ModelNotFoundError),
    ],
    ids=str,
)
def test_an_impossible_argument_is_refused(
    tiny_folder: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        LLM(**{"model": tiny_folder, **arguments})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_num_seqs": 2**31 - 1}, r"max_num_seqs is 2147483647, .* take \d+ bytes"),
        ({"max_num_batched_tokens": 2**31 - 1}, r"max_num_batched_tokens is 2147483647, .* bytes"),
        ({"block_size": 2**31 - 1}, r"takes \d+ bytes.*lower max_model_len or block_size"),
        ({"kv_cache_memory_bytes": 2**50}, r"takes \d+ bytes.*lower kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 2**31 - 1}, r"bytes.*lower num_gpu_blocks_override"),
    ],
    ids=str,
)
def test_sizes_that_no_memory_holds_are_named(
    tiny_folder: Path, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine of 4 GiB, whatever this one has.
    monkeypatch.setattr("torpor.engine.loading.available_memory_bytes", lambda: 4 << 30)
    with pytest.raises(OutOfMemoryError, match=told):
        LLM(tiny_folder, **options)


@pytest.mark.parametrize("version", [7, 1.5, b"step", ["step"], True], ids=repr)
def test_a_version_that_is_no_string_is_refused(llm: LLM, version: Any) -> None:
    before = answers(llm)
    with pytest.raises(ArgumentError, match=r"version is .*give a string"):
        llm.update_weights(tiny_weights(1).items(), version=version)
    with pytest.raises(ArgumentError, match=r"version is .*give a string"):
        llm.begin_update(version)
    assert answers(llm) == before


def test_loading_reports_its_progress_once(tiny_folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with LLM(tiny_folder, progress=lambda *stage: told.append(stage)) as llm:
        loaded = [(done, total) for stage, done, total in told if stage == "load"]
        assert loaded[0][0] == 0
        assert loaded[-1][0] == loaded[-1][1] == sum(t.nbytes for t in tiny_weights(0).values())
        assert loaded == sorted(loaded)
        count = len(told)
        llm.reload_weights()
        assert len(told) == count


def damaged_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def test_a_folder_without_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = damaged_copy(tiny_folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json and no tokenizer\.model"):
        LLM(folder)


def test_a_missing_weight_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = damaged_copy(tiny_folder, tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    told = rf"{re.escape(str(folder))} lacks .*model\.layers\.1\.mlp.*fetch"
    with pytest.raises(WeightsIncompleteError, match=told):
        LLM(folder)


def test_truncated_weights_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = damaged_copy(tiny_folder, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        LLM(folder)


def test_an_unknown_architecture_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = damaged_copy(tiny_folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MysteryLM"]}))
    with pytest.raises(ConfigError, match="MysteryLM"):
        LLM(folder)


def test_a_push_that_failed_can_be_begun_anew(llm: LLM) -> None:
    before = answers(llm)
    name = "model.norm.weight"
    with pytest.raises(WeightsMismatchError):
        llm.load_weights([(name, torch.ones(3))])
    good = [(name, value * 2) for key, value in tiny_weights(1).items() if key == name]
    with pytest.raises(StateError, match="begin_update"):
        llm.load_weights(good)
    llm.begin_update("again")
    llm.load_weights(good)
    report = llm.finish_update()
    assert (report.version, report.updated) == ("again", 1)
    assert answers(llm) != before


def test_nan_is_let_in_where_asked_for(tiny_folder: Path) -> None:
    name = "model.norm.weight"
    with LLM(tiny_folder, check_nan=False) as llm:
        shape = next(value.shape for key, value in tiny_weights(1).items() if key == name)
        assert llm.update_weights({name: torch.full(shape, torch.nan)}).updated == 1


def test_a_weight_looked_at_after_closing_does_not_end_the_process(tiny_folder: Path) -> None:
    """A traceback that prints a tensor comes after the with block that closed the model."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {[path for path in sys.path if path]!r}\n"
        "from torpor import LLM\n"
        f"with LLM({str(tiny_folder)!r}) as llm:\n"
        "    weight = next(llm.core._runner._model.parameters())\n"
        "print(float(weight.sum()), len(repr(weight)) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0.0 True\n"), done.stderr
