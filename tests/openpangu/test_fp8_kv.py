"""A KV cache in eight bits: the reference's tokens, and scales that nothing loses."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.openpangu.conftest import Folders, write_words
from tests.openpangu.models import MODELS, names_of_today, tensors, write_model
from tests.openpangu.reference import Reference
from torch import nn

from torpor.engine.llm import LLM
from torpor.errors import (
    ArgumentError,
    AsleepError,
    CheckpointError,
    DoubleInitError,
    GenerationError,
    WeightsError,
    WeightsIncompleteError,
    WeightsMismatchError,
)
from torpor.model.attention.kv_fp8 import FP8, as_bytes, from_cache
from torpor.model.checkpoints.load import new_model
from torpor.model.config.config import parse_config
from torpor.outputs import RequestOutput
from torpor.params import SamplingParams
from torpor.sleep.building import building

IDS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [IDS[:13], IDS[:1], [*IDS[:6], *IDS[20:23]], IDS[30:35], IDS[35:37], [9]]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
KINDS = ["embedded", "embedded, windows", "pro moe v2", "pro moe v2, windows", "ultra, sinks"]
PLACED = [(kind, "merged") for kind in KINDS]
PLACED += [(kind, "reserved") for kind in KINDS if MODELS[kind].get("param_sink_number")]
CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "full cache": {"kv_cache_blocks": 13, "poison": True, "cpu_kernels": "torch"},
    "invariant": {"batch_invariant": True, "max_num_batched_tokens": 11},
}
SPELLINGS = {
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "plain": ("k_scale", "v_scale"),
}


def scales_of(kind: str) -> dict[str, float]:
    """By buffer; the keys of the first layer saturate."""
    scales = {}
    for layer in range(MODELS[kind]["num_hidden_layers"]):
        scales[f"model.layers.{layer}.self_attn.k_scale"] = 0.00390625 * (1 + layer)
        scales[f"model.layers.{layer}.self_attn.v_scale"] = 0.01171875 - 0.001953125 * layer
    return scales


def spelled(kind: str, spelling: str = "vllm", **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """As a checkpoint has them; `changed` by the last part of a buffer's name, in layer 1."""
    made = {}
    for name, value in scales_of(kind).items():
        prefix, _, buffer = name.rpartition(".")
        ending = SPELLINGS[spelling][buffer == "v_scale"]
        tensor = changed.get(buffer) if ".1." in name else None
        made[f"{prefix}.{ending}"] = torch.tensor(value) if tensor is None else tensor
    return made


def write_scaled(folder: Path, kind: str, scales: dict[str, torch.Tensor], seed: int = 0) -> Path:
    """A model folder whose checkpoint holds scales."""
    write_model(folder, MODELS[kind], seed)
    save_file({**tensors(MODELS[kind], seed), **scales}, folder / "model.safetensors")
    write_words(folder, MODELS[kind]["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders with scales, by kind, each written once."""
    root = tmp_path_factory.mktemp("fp8")
    return functools.cache(
        lambda kind: write_scaled(root / str(KINDS.index(kind)), kind, spelled(kind))
    )


def fp8(folder: Path, **options: Any) -> LLM:
    blocks = options.pop("kv_cache_blocks", None)
    if blocks is not None:
        options["num_gpu_blocks_override"] = blocks
    given = {"kv_cache_dtype": "fp8", "max_model_len": 24, "block_size": 4, **options}
    return LLM(folder, **given)


def buffers(llm: LLM) -> dict[str, float]:
    """Every scale by its full name."""
    named = llm.core._runner._model.named_buffers()
    return {name: float(each) for name, each in named if name.endswith(("k_scale", "v_scale"))}


def answers(llm: LLM) -> Any:
    """By the same schedule each time: eight bits make much of last bits that others differ in."""
    llm.reset_prefix_cache()
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS)]


def names(kind: str, spelling: str = "vllm") -> list[str]:
    return list(spelled(kind, spelling))


# -- the reference ------------------------------------------------------------------------------


class Recorder:
    """What an engine stores of each request, since a number between two may be rounded either way.

    Not all is to be seen of a request that hits a prefix beyond its window.
    """

    def __init__(self, llm: LLM) -> None:
        self._runner = llm.core._runner
        self._memory: Any = self._runner._clear.__self__  # type: ignore[attr-defined]
        self._launch = self._runner.launch
        self._runner.launch = self._launched  # type: ignore[method-assign]
        self._codes: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
        self.changed: set[str] = set()
        """Requests of which something was stored again, rounded the other way."""

    def _launched(self, step: Any) -> Any:
        result = self._launch(step)
        for row in step.rows:
            table = self._runner._table(row.sequence.seq_id)
            self._look(row.sequence.request.request_id, table, row.start + row.num_new_tokens)
        return result

    def _look(self, request: str, table: Sequence[int], end: int) -> None:
        layout, kv = self._memory.layout, as_bytes(self._memory.kv)
        size = layout.block_size
        seen = [position for position in range(end) if table[position // size]]
        blocks = torch.tensor([table[position // size] for position in seen])
        offsets = torch.tensor(seen) % size
        for layer, scales in layout.scales.items():
            for kind, part, scale in (
                ("k_scale", layout.keys, scales.k_scale),
                ("v_scale", layout.values, scales.v_scale),
            ):
                codes = part(kv, layer)[blocks, offsets].view(FP8)
                values = from_cache(codes, torch.float32, scale)
                known = self._codes.setdefault(
                    (request, f"model.layers.{layer}.self_attn.{kind}"), {}
                )
                for position, value in zip(seen, values, strict=True):
                    if not torch.equal(known.setdefault(position, value), value):
                        self.changed.add(request)

    def stored(self, request: str) -> dict[str, torch.Tensor]:
        """By the names of the scales, [tokens, KV heads, size]."""
        found = {
            name: torch.stack([known[position] for position in sorted(known)])
            for (owner, name), known in self._codes.items()
            if owner == request
        }
        attention: Any = self._runner._attention
        if attention.holds_sinks:
            for layer in self._memory.layout.scales:
                for kind, part in zip(("k_scale", "v_scale"), attention.read(layer), strict=True):
                    found[f"model.layers.{layer}.self_attn.{kind} sinks"] = part
        return found


KNOWN: dict[Any, torch.Tensor] = {}
"""Logits by everything that they follow from: most schedules store the same."""


def check(kind: str, placement: str, outputs: Sequence[RequestOutput], recorder: Recorder) -> None:
    """Tokens and their log probabilities are the reference's, within 1e-4."""
    checked = 0
    for output in outputs:
        prompt, made = output.prompt_token_ids, output.outputs[0]
        ids, stored = (*prompt, *made.token_ids[:-1]), recorder.stored(output.request_id)
        whole = all(len(each) == len(ids) for name, each in stored.items() if " " not in name)
        if output.request_id in recorder.changed or not whole:
            continue
        content = b"".join(each.numpy().tobytes() for each in stored.values())
        key = kind, placement, ids, hashlib.sha256(content).digest()
        if key not in KNOWN:
            KNOWN[key] = Reference(
                names_of_today(MODELS[kind]),
                tensors(MODELS[kind]),
                kv_scales=scales_of(kind),
                reserved=placement == "reserved",
                stored=stored,
            ).logits(ids)
        rows = KNOWN[key][len(prompt) - 1 :]
        assert made.logprobs is not None
        for row, token, said in zip(rows, made.token_ids, made.logprobs, strict=True):
            assert row[token] >= row.max() - 1e-4
            assert abs(said[token].logprob - float(row.log_softmax(-1)[token])) <= 1e-4
        checked += 1
    assert checked >= len(outputs) / 2


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_tokens_are_those_of_a_reference_that_rounds_alike(
    scaled: Any, kind: str, placement: str, case: str
) -> None:
    options = dict(CASES[case])
    if placement == "reserved" and "kv_cache_blocks" in options:
        options["kv_cache_blocks"] += MODELS[kind]["param_sink_number"] // 4
    with fp8(scaled(kind), sink_placement=placement, **options) as llm:
        recorder = Recorder(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS[:1], PARAMS)
        llm.cache.check()
        check(kind, placement, [*outputs, *again], recorder)
    if case == "full cache":
        assert any(output.metrics and output.metrics.num_preemptions for output in outputs)
    else:
        assert (again[0].num_cached_tokens or 0) >= 8


@pytest.mark.parametrize("kind", ["embedded", "ultra, sinks"])
def test_eight_bits_are_heard(folders: Folders, scaled: Any, kind: str) -> None:
    with fp8(scaled(kind)) as narrow, fp8(folders(kind), kv_cache_dtype="auto") as wide:
        assert answers(narrow) != answers(wide)


def test_an_answer_is_the_same_alone_and_in_a_batch_where_that_is_asked_for(scaled: Any) -> None:
    with fp8(scaled("embedded, windows"), batch_invariant=True, max_num_batched_tokens=7) as llm:
        together = answers(llm)
        assert [llm.generate([prompt], PARAMS)[0].outputs for prompt in PROMPTS] == together


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("bfloat16", 2)])
def test_the_same_bytes_hold_more_blocks(folders: Folders, dtype: str, times: int) -> None:
    size = {"kv_cache_memory_bytes": 1 << 18, "dtype": dtype}
    folder = folders("pro moe v2")
    with fp8(folder, kv_cache_dtype="auto", **size) as wide, fp8(folder, **size) as narrow:
        assert narrow.cache.num_blocks // times == wide.cache.num_blocks
        assert narrow._kv_cache_bytes <= 1 << 18
        assert {spec.dtype for spec in narrow.cache.group.specs} == {"float8_e4m3fn"}
        assert {spec.dtype for spec in wide.cache.group.specs} == {dtype}
        assert answers(narrow)


def test_blocks_are_cleared_and_spoiled_as_any(scaled: Any) -> None:
    with fp8(scaled("embedded"), poison=True) as llm:
        answers(llm)
        kv: Any = llm.core._runner._clear.__self__  # type: ignore[attr-defined]
        kv.poison([2, 3])
        assert kv.kv[2:4].float().isnan().all()
        kv.clear([2])
        assert not kv.kv[2].float().any()
        assert kv.kv[3].float().isnan().all()
        llm.reset_prefix_cache()
        assert answers(llm)


def test_a_request_with_nan_fails_alone(scaled: Any) -> None:
    with fp8(scaled("embedded"), check_nan=False) as llm:
        want = answers(llm)
        table = tensors(MODELS["embedded"])["model.embed_tokens.weight"]
        table[95] = torch.nan
        llm.update_weights([("model.embed_tokens.weight", table)])
        with pytest.raises(GenerationError, match="NaN") as caught:
            llm.generate([[4, 95, 7], *PROMPTS], PARAMS)
        assert [output.outputs for output in caught.value.outputs[1:]] == want


# -- sleep --------------------------------------------------------------------------------------

ASLEEP = [
    ("calibrated", "embedded", "merged"),
    ("calibrated", "pro moe v2", "reserved"),
    ("checkpoint", "pro moe v2", "merged"),
    ("checkpoint", "ultra, sinks", "reserved"),
]
ORDERS: dict[str, list[list[str] | None]] = {
    "all at once": [None],
    "weights first": [["weights"], ["kv_cache"], ["graphs"]],
    "KV cache first": [["kv_cache"], ["graphs"], ["weights"]],
}


@pytest.fixture(
    scope="module",
    params=ASLEEP,
    ids=" ".join,
)
def sleeping(request: pytest.FixtureRequest, folders: Folders, scaled: Any) -> Iterator[LLM]:
    origin, kind, placement = request.param
    folder = scaled(kind) if origin == "checkpoint" else folders(kind)
    with fp8(folder, calculate_kv_scales=True, sink_placement=placement, poison=True) as llm:
        if origin == "checkpoint":
            assert buffers(llm) == scales_of(kind)
        # The file of host copies stays open from here on; no test leaves it behind.
        llm.sleep(level=1)
        llm.wake_up()
        yield llm


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", [1, 2])
def test_three_cycles_change_no_bit_of_scales_or_answers(
    sleeping: LLM, level: int, order: str
) -> None:
    llm = sleeping
    scales, want, digests = buffers(llm), answers(llm), llm.sleeper.digests()
    assert 1.0 not in scales.values()
    assert scales.keys() <= digests.keys()
    for _ in range(3):
        llm.sleep(level=level)
        for tags in ORDERS[order]:
            llm.wake_up(tags=tags)
        if level == 2:
            llm.reload_weights()
        assert llm.sleeper.digests() == digests
        assert buffers(llm) == scales
        assert llm.verify().ok
        assert answers(llm) == want


def test_scales_are_owned_as_buffers_that_come_back(sleeping: LLM) -> None:
    rows = {row.name: row for row in sleeping.sleeper.table()}
    for name in buffers(sleeping):
        assert rows[name].cls == "buffer"
        assert rows[name].tag == "weights"
    reserved = sleeping._args.sink_placement == "reserved"
    assert (set(buffers(sleeping)) <= set(rows["kv_cache"].sources)) == reserved


@pytest.mark.parametrize("level", [1, 2])
def test_a_plain_wake_brings_calibrated_scales_back(folders: Folders, level: int) -> None:
    with fp8(folders("embedded")) as llm:
        llm.calibrate_kv_scales(PROMPTS)
        scales, want = buffers(llm), answers(llm)
        llm.sleep(level=level)
        assert llm.wake_up().reloaded == (level == 2)
        assert buffers(llm) == scales
        assert answers(llm) == want


# -- double init --------------------------------------------------------------------------------


def test_a_second_init_of_the_base_class_is_refused_and_wipes_nothing() -> None:
    config = parse_config(MODELS["pro moe v2"], {}, where="test")
    with building():
        model = new_model(config, torch.float32, kv_dtype=FP8)
        attention: Any = model.model.layers[1].self_attn
        attention.k_scale.fill_(0.25)
        with pytest.raises(DoubleInitError, match="k_scale"):
            nn.Module.__init__(attention)
    assert float(attention.k_scale) == 0.25
    model_scales = model.kv_scales()
    assert model_scales[1].k_scale is attention.k_scale


@pytest.mark.parametrize("placement", ["merged", "reserved"])
def test_nothing_after_loading_sets_scales_back(
    scaled: Any, folders: Folders, placement: str
) -> None:
    kind = "pro moe v2"
    with fp8(scaled(kind), sink_placement=placement, poison=True) as llm:
        loaded = {name: llm.sleeper.digests()[name] for name in scales_of(kind)}
        objects = dict(llm.core._runner._model.named_buffers())

        def intact() -> bool:
            found = llm.sleeper.digests()
            now = dict(llm.core._runner._model.named_buffers())
            same = all(now[name] is objects[name] for name in loaded)
            digests = {name: found[name] for name in loaded}
            return same and digests == loaded and buffers(llm) == scales_of(kind)

        assert intact()
        answers(llm)
        assert intact(), "after the first forward"
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert intact(), f"after level {level}"
        llm.update_weights(tensors(MODELS[kind], seed=1).items())
        assert intact(), "after an update without scales"
        llm.core._runner._model.post_weight_load()
        assert intact(), "after the hook for memory that nobody owns"
        llm.reload_weights()
        assert intact(), "after a reload"


def test_random_weights_leave_calibrated_scales_alone(folders: Folders) -> None:
    folder = folders("ultra, sinks")
    with fp8(folder, load_format="dummy", calculate_kv_scales=True) as llm:
        scales, want = buffers(llm), answers(llm)
        assert len(scales) == 6
        assert 1.0 not in scales.values()
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert buffers(llm) == scales
            assert answers(llm) == want


# -- where scales come from ---------------------------------------------------------------------


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector"])
def test_the_checkpoints_own_names_are_read(
    tmp_path: Path, spelling: str, shape: tuple[int, ...]
) -> None:
    scales = {
        name: each.view(shape).bfloat16() for name, each in spelled("embedded", spelling).items()
    }
    with fp8(write_scaled(tmp_path, "embedded", scales), calculate_kv_scales=True) as llm:
        assert buffers(llm) == scales_of("embedded")
    with LLM(tmp_path, max_model_len=24) as wide:
        assert buffers(wide) == {}


def test_without_scales_they_are_one_and_said_to_be(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    with fp8(folders("embedded"), kv_cache_dtype="fp8_e4m3") as llm:
        assert set(buffers(llm).values()) == {1.0}
    assert "holds no scales for an fp8 KV cache: they are 1.0" in caplog.text
    caplog.clear()
    with fp8(folders("embedded"), calculate_kv_scales=True) as llm:
        assert 1.0 not in buffers(llm).values()
    assert not caplog.records


def test_scales_in_the_checkpoint_are_weights_that_level_two_wants_back(scaled: Any) -> None:
    kind = "embedded"
    with fp8(scaled(kind)) as llm:
        want = answers(llm)
        llm.sleep(level=2)
        llm.wake_up(reload=False)
        llm.begin_update()
        llm.load_weights(tensors(MODELS[kind]).items())
        with pytest.raises(WeightsIncompleteError, match="k_scale") as caught:
            llm.finish_update()
        assert sorted(caught.value.names) == sorted(names(kind))
        llm.update_weights(spelled(kind).items())
        assert answers(llm) == want


# -- calibration --------------------------------------------------------------------------------


def largest(kind: str, prompts: Sequence[Sequence[int]], reserved: bool) -> dict[str, float]:
    """The largest keys and values of the first layer, from the equations."""
    found: dict[str, float] = {}

    class Watching(Reference):
        def _stored(self, x: torch.Tensor, name: str, which: str = "") -> torch.Tensor:
            found[name] = max(found.get(name, 0.0), float(x.abs().max()))
            return x

    model = Watching(names_of_today(MODELS[kind]), tensors(MODELS[kind]), reserved=reserved)
    for prompt in prompts:
        model.logits(prompt)
    return found


@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_scales_put_the_largest_of_the_sample_at_the_formats_end(
    folders: Folders, kind: str, placement: str
) -> None:
    prompts = PROMPTS[:2]
    with fp8(folders(kind), sink_placement=placement) as llm:
        epoch = llm.sleeper.weights_epoch
        report = llm.calibrate_kv_scales(prompts)
        assert report.updated == 6
        assert llm.sleeper.weights_epoch == epoch + 1
        scales, want = buffers(llm), largest(kind, prompts, placement == "reserved")
        assert scales.keys() == want.keys()
        for name, scale in scales.items():
            assert scale * 448 == pytest.approx(want[name], rel=1e-4), name
        assert llm.calibrate_kv_scales(prompts).changed == ()


def test_calibrating_keeps_the_name_of_the_weights(folders: Folders) -> None:
    with fp8(folders("embedded")) as llm:
        llm.update_weights(tensors(MODELS["embedded"], seed=1).items(), version="step-7")
        llm.calibrate_kv_scales(PROMPTS)
        assert llm.generate(PROMPTS[:1], PARAMS)[0].weights_version == "step-7"


def test_calibrated_scales_stay_when_weights_change_until_calibrated_again(
    folders: Folders,
) -> None:
    kind = "pro moe v2"
    with fp8(folders(kind, seed=1)) as other:
        other.calibrate_kv_scales(PROMPTS)
        want = buffers(other)
    with fp8(folders(kind)) as llm:
        llm.calibrate_kv_scales(PROMPTS)
        first = buffers(llm)
        llm.update_weights(tensors(MODELS[kind], seed=1).items())
        assert buffers(llm) == first
        llm.calibrate_kv_scales(PROMPTS)
        assert buffers(llm) == want != first


def test_calibration_refuses_what_it_cannot_use(folders: Folders) -> None:
    with fp8(folders("embedded"), check_nan=False) as llm:
        with pytest.raises(ArgumentError, match="no prompts to calibrate"):
            llm.calibrate_kv_scales([])
        broken = tensors(MODELS["embedded"])["model.norm.weight"] * torch.nan
        llm.calibrate_kv_scales(PROMPTS)
        scales = buffers(llm)
        llm.update_weights([("model.layers.1.input_layernorm.weight", broken)])
        with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.attn\.k_scale' cannot be"):
            llm.calibrate_kv_scales(PROMPTS)
        assert buffers(llm) == scales
    with (
        fp8(folders("embedded"), kv_cache_dtype="auto") as wide,
        pytest.raises(ArgumentError, match="kv_cache_dtype is 'auto'"),
    ):
        wide.calibrate_kv_scales(PROMPTS)


# -- other scales while blocks are in use -------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
def test_calibration_wants_all_memory_awake(folders: Folders, level: int) -> None:
    with fp8(folders("embedded")) as llm:
        want = answers(llm)
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:
            llm.reload_weights()
        before = buffers(llm)
        with pytest.raises(AsleepError, match="kv_cache"):
            llm.calibrate_kv_scales([IDS[:5]])
        llm.wake_up()
        assert buffers(llm) == before
        assert answers(llm) == want
        llm.calibrate_kv_scales([IDS[:5]])


@pytest.mark.parametrize(("kind", "placement"), PLACED)
def test_what_was_generated_leaves_no_tensor_that_nobody_owns(
    scaled: Any, kind: str, placement: str
) -> None:
    with fp8(scaled(kind), sink_placement=placement, strict=True) as llm:
        answers(llm)
        assert not llm.sleeper.audit().unowned


def test_other_scales_hit_no_prefix(scaled: Any) -> None:
    with fp8(scaled("embedded")) as llm:
        llm.generate(PROMPTS[:1], PARAMS)
        assert llm.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens
        llm.calibrate_kv_scales(PROMPTS)
        assert not llm.generate(PROMPTS[:1], PARAMS)[0].num_cached_tokens


@pytest.mark.parametrize("kind", ["embedded", "pro moe v2"])
def test_requests_that_run_start_over_under_other_scales(scaled: Any, kind: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with fp8(scaled(kind), sink_placement="reserved") as llm:
        stream = llm.stream(PROMPTS[0], params)
        for _ in range(4):
            next(stream)
        llm.calibrate_kv_scales(PROMPTS)
        list(stream)
        made = stream.output.outputs[0].token_ids
        assert stream.output.metrics is not None
        assert stream.output.metrics.num_preemptions == 1
        prompt = [*PROMPTS[0], *made[:4]]
        rest = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.reset_prefix_cache()
        assert llm.generate([prompt], rest)[0].outputs[0].token_ids == made[4:]


def test_requests_that_run_go_on_under_the_same_scales(scaled: Any) -> None:
    with fp8(scaled("embedded")) as llm:
        stream = llm.stream(PROMPTS[0], PARAMS)
        next(stream)
        llm.update_weights(tensors(MODELS["embedded"], seed=1).items())
        list(stream)
        assert stream.output.metrics is not None
        assert stream.output.metrics.num_preemptions == 0


@pytest.mark.parametrize("kind", ["pro moe v2", "ultra, sinks"])
def test_reserved_sinks_are_rounded_anew(scaled: Any, kind: str) -> None:
    with fp8(scaled(kind), sink_placement="reserved") as llm:
        attention = llm.core._runner._attention
        sinks = llm.core._runner._model.static_sinks()[0]

        def off() -> float:
            key, _ = attention.read(0)
            return float((key - sinks.sink_key).abs().max() / sinks.sink_key.abs().max())

        assert off() > 0.2, "they saturate"
        llm.calibrate_kv_scales(PROMPTS)
        assert off() < 0.05


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["int4", "fp8_e5m2", "", None, torch.float8_e4m3fn])
def test_an_unknown_dtype_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"kv_cache_dtype is .*give 'auto' or 'fp8' or 'fp8_e4"):
        LLM("nowhere", kv_cache_dtype=value)


def test_calculating_scales_that_there_are_none_of_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"calculate_kv_scales is True.*kv_cache_dtype='fp8'"):
        LLM("nowhere", calculate_kv_scales=True)


BAD: dict[str, tuple[torch.Tensor, type[WeightsError], str]] = {
    "zero": (torch.tensor(0.0), WeightsError, "is 0.0; .* positive and finite"),
    "negative": (torch.tensor([-1.0]), WeightsError, "is -1.0; .* positive and finite"),
    "nan": (torch.tensor(torch.nan), WeightsError, "is nan; .* positive and finite"),
    "inf": (torch.tensor(torch.inf), WeightsError, "is inf; .* positive and finite"),
    "too small": (torch.tensor(1e-300, dtype=torch.float64), WeightsError, "is 1e-300; .*normal"),
    "subnormal": (torch.tensor(1e-40), WeightsError, r"is 9\.\d+e-41; .*normal number in float32"),
    "too large": (torch.tensor(1e300, dtype=torch.float64), WeightsError, r"is 1e\+300; .*finite"),
    "heads": (torch.ones(2), WeightsMismatchError, r"shape \(2,\); a layer has one scale"),
    "matrix": (torch.ones(1, 1), WeightsMismatchError, r"shape \(1, 1\); a layer has one scale"),
    "integer": (torch.tensor([1]), WeightsMismatchError, "int64, which cannot become"),
}


@pytest.mark.parametrize("buffer", ["k_scale", "v_scale"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_scale_is_refused_by_name(tmp_path: Path, scaled: Any, bad: str, buffer: str) -> None:
    value, error, told = BAD[bad]
    name = f"model.layers.1.self_attn.attn.{buffer}"
    scales = spelled("embedded", **{buffer: value})
    with pytest.raises(error, match=rf"{name}' {'has ' if 'shape' in told else ''}.*?{told}"):
        fp8(write_scaled(tmp_path, "embedded", scales), check_nan=False)
    if buffer == "k_scale":
        with fp8(scaled("embedded"), check_nan=False) as llm:
            want = answers(llm)
            with pytest.raises(error, match=told):
                llm.update_weights([(name, value)])
            assert buffers(llm) == scales_of("embedded")
            assert answers(llm) == want


def test_some_scales_without_the_others_are_refused(tmp_path: Path) -> None:
    scales = spelled("embedded")
    del scales["model.layers.2.self_attn.attn.v_scale"]
    with pytest.raises(CheckpointError, match=r"but no 'model\.layers\.2\.self_attn\.attn\.v_sca"):
        fp8(write_scaled(tmp_path, "embedded", scales))
