"""A safetensors folder gives every tensor, its place in the file, and proof that it is whole."""

from __future__ import annotations

import errno
import json
import mmap
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from tests.model.helpers import TINY, random_weights, write_shards

from torpor.errors import CheckpointError, OutOfMemoryError
from torpor.model.checkpoints.safetensors_source import SafetensorsSource, tensor_digest
from torpor.model.checkpoints.safetensors_writer import write_safetensors
from torpor.sleep.source import WeightSource


def digests_of(source: SafetensorsSource) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in source.pairs()}


def test_it_is_a_weight_source(folder: Path) -> None:
    assert isinstance(SafetensorsSource(folder), WeightSource)


@pytest.mark.parametrize("sharded", [False, True])
def test_every_tensor_comes_once_and_is_right(tmp_path: Path, folder: Path, sharded: bool) -> None:
    source = SafetensorsSource(write_shards(tmp_path / "shards") if sharded else folder)
    expected = random_weights(TINY)
    seen = []
    for name, tensor in source.pairs():
        seen.append(name)
        assert torch.equal(tensor, expected[name])
        assert (source.shape(name), source.dtype(name)) == (tensor.shape, tensor.dtype)
    assert sorted(seen) == sorted(expected)
    assert list(source.names()) == seen
    assert source.total_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_pairs_can_be_asked_for_again(folder: Path) -> None:
    source = SafetensorsSource(folder)
    assert digests_of(source) == digests_of(source)


def test_an_extent_holds_the_raw_bytes_of_its_tensor(tmp_path: Path) -> None:
    source = SafetensorsSource(write_shards(tmp_path))
    for name, tensor in source.pairs():
        extent = source.extent(name)
        assert extent is not None
        raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
        assert torch.equal(
            torch.frombuffer(bytearray(raw), dtype=extent.dtype).reshape(tensor.shape), tensor
        )
    assert source.extent("no.such.tensor") is None


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    ],
)
def test_dtypes_and_shapes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(6).remainder(2).to(torch.float32)
    tensors = {
        "matrix": values.reshape(2, 3).to(dtype),
        "scalar": values[1].clone().to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    got = dict(SafetensorsSource(tmp_path).pairs())
    for name, tensor in tensors.items():
        assert (got[name].dtype, got[name].shape) == (dtype, tensor.shape)
        assert tensor_digest(got[name]) == tensor_digest(tensor)


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "word": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    data = b"\x01\x02\x03" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    word = dict(SafetensorsSource(tmp_path).pairs())["word"]
    assert word.tolist() == [1.5, -2.0]
    assert word.data_ptr() % word.dtype.itemsize == 0


def test_writing_into_a_tensor_does_not_reach_the_file(folder: Path) -> None:
    source = SafetensorsSource(folder)
    before = (folder / "model.safetensors").read_bytes()
    for _, tensor in source.pairs():
        tensor.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_tensor_outlives_the_iteration(folder: Path) -> None:
    kept = dict(SafetensorsSource(folder).pairs())
    expected = random_weights(TINY)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in kept.items())


def test_reading_keeps_no_memory(tmp_path: Path) -> None:
    num_bytes = 64 * 1024 * 1024
    tensors = {f"t{index}": torch.ones(num_bytes // 32, dtype=torch.float32) for index in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    source = SafetensorsSource(tmp_path)
    process = psutil.Process()
    before = process.memory_info().rss
    peak = before
    for _, tensor in source.pairs():
        assert tensor.sum() > 0
        peak = max(peak, process.memory_info().rss)
    assert peak - before < num_bytes // 3
    assert process.memory_info().rss - before < num_bytes // 16


def test_digests_are_checked_while_reading(folder: Path) -> None:
    digests = digests_of(SafetensorsSource(folder))
    assert digests_of(SafetensorsSource(folder, digests=digests)) == digests
    victim = "model.layers.1.mlp.down_proj.weight"
    extent = SafetensorsSource(folder).extent(victim)
    assert extent is not None
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[extent.offset + extent.nbytes // 2] ^= 0x10
    (folder / "model.safetensors").write_bytes(raw)
    damaged = SafetensorsSource(folder, digests=digests)
    with pytest.raises(CheckpointError, match=f"'{victim}' have digest .*{digests[victim]}"):
        list(damaged.pairs())


def test_digests_must_name_the_same_tensors(folder: Path) -> None:
    digests = digests_of(SafetensorsSource(folder))
    del digests["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"differ in 1 names, first 'model\.norm\.weight'"):
        SafetensorsSource(folder, digests=digests)


@pytest.mark.parametrize("change", ["shrink", "replace", "remove"])
def test_a_file_that_changed_since_it_was_opened_is_noticed(folder: Path, change: str) -> None:
    source = SafetensorsSource(folder)
    path = folder / "model.safetensors"
    if change == "shrink":
        path.write_bytes(path.read_bytes()[: -mmap.PAGESIZE])
    elif change == "replace":
        save_file({"other": torch.zeros(4)}, path)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has changed since|cannot be read \(No such file"):
        list(source.pairs())


def test_the_writer_keeps_order_and_the_library_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = random_weights(TINY)
    names = list(reversed(weights))
    path = tmp_path / "model.safetensors"
    digests = write_safetensors(
        path,
        {name: tuple(weights[name].shape) for name in names},
        torch.float32,
        ((name, weights[name]) for name in names),
    )
    source = SafetensorsSource(tmp_path, digests=digests)
    assert [name for name, _ in source.pairs()] == names
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(path).items())


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        RuntimeError("unable to mmap 538090432 bytes from file: Cannot allocate memory (12)"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_file_that_there_is_no_memory_for_is_not_called_damaged(
    folder: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(OutOfMemoryError, match="for lack of memory"):
        SafetensorsSource(folder)


def test_a_mapping_that_there_is_no_memory_for_is_not_called_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    source = SafetensorsSource(folder)
    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(OutOfMemoryError, match="for lack of memory"):
        list(source.pairs())
