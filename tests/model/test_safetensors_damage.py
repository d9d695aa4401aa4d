"""Every damage to a safetensors folder ends in a CheckpointError that says what and where."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model.helpers import write_folder, write_shards

from torpor.errors import CheckpointError
from torpor.model.checkpoints.safetensors_source import SafetensorsSource

Header = dict[str, Any]
NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


def split(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_entry(**changes: Any) -> Callable[[Header], None]:
    def edit(header: Header) -> None:
        header[NORM].update(changes)

    return edit


def moved(by: int) -> Callable[[Header], None]:
    def edit(header: Header) -> None:
        header[NORM]["data_offsets"] = [at + by for at in header[NORM]["data_offsets"]]

    return edit


def same_place(header: Header) -> None:
    header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_entry(dtype="F31"), "dtype 'F31'; torpor reads"),
        (with_entry(dtype="F4"), "dtype 'F4'; torpor reads"),
        (with_entry(dtype=None), "dtype None"),
        (with_entry(dtype="F16"), "needs 64 bytes, but its offsets span 128"),
        (with_entry(shape=[31]), "needs 124 bytes, but its offsets span 128"),
        (with_entry(shape=[2**40, 2**40]), "needs .* bytes, but its offsets span 128"),
        (with_entry(shape=[-32]), r"shape \[-32\]"),
        (with_entry(shape=[32.0]), r"shape \[32\.0\]"),
        (with_entry(shape=[1] * 65), r"shape \[1, 1"),
        (with_entry(shape="32"), "shape '32'"),
        (with_entry(data_offsets=[0]), r"offsets \[0\]"),
        (with_entry(data_offsets=[128, 0]), "offsets span -128"),
        (with_entry(data_offsets=None), "offsets None"),
        (moved(10**12), "follows a gap"),
        (moved(64), "overlaps the one before|follows a gap|where its header describes"),
        (same_place, "overlaps the one before"),
        (lambda header: header.pop(NORM), "follows a gap|where its header describes"),
        (lambda header: header.update({NORM: "x"}), "is described by 'x'"),
    ],
)
def test_a_damaged_header_is_refused(
    folder: Path, edit: Callable[[Header], None], problem: str
) -> None:
    path = folder / "model.safetensors"
    header, data = split(path)
    edit(header)
    join(path, header, data)
    with pytest.raises(CheckpointError, match=problem) as caught:
        SafetensorsSource(folder)
    assert str(path) in str(caught.value)
    assert "again" in str(caught.value) or "convert" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "a header of 0 bytes in a file of 0 bytes"),
        (b"\x08\x00\x00", "in a file of 3 bytes"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes in a file of 8 bytes"),
        (b"\x64" + b"\x00" * 7 + b"{}", "a header of 100 bytes in a file of 10 bytes"),
        (b"\x02" + b"\x00" * 7 + b"{]", "not valid JSON"),
        (b"\x02" + b"\x00" * 7 + b"[]", "a JSON list"),
        (b"\x02" + b"\x00" * 7 + b"\xff{", "not UTF-8"),
        (b"\x07" + b"\x00" * 7 + b'{"a":1}', "'a' is described by 1"),
        (b"\x0f" + b"\x00" * 7 + b'{"a":{},"a":{}}', "'a' appears twice"),
        (b"\x18" + b"\x00" * 7 + b'{"__metadata__":{"a":1}}', "refused by safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a header of"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(
    tmp_path: Path, raw: bytes, problem: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=problem):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("change", [-1, -1000, 1])
def test_a_wrong_file_size_is_refused(folder: Path, change: int) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(CheckpointError, match=f"has {len(raw) + change} bytes where its header"):
        SafetensorsSource(folder)


def test_a_folder_without_weights_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json"):
        SafetensorsSource(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"names shard '{SHARD}', which is missing"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = SHARD
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model\.ghost\.weight' in .* lacks it"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    header, data = split(tmp_path / SHARD)
    header["model.embed_tokens.weight"] = {
        "dtype": "F32",
        "shape": [0],
        "data_offsets": [len(data), len(data)],
    }
    join(tmp_path / SHARD, header, data)
    with pytest.raises(CheckpointError, match=r"holds 'model\.embed_tokens\.weight', which"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (b"{}", "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "places 'a' in 1"),
        (b'{"weight_map": {"a": "../x"}}', r"places 'a' in '\.\./x'"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "places 'a' in '/etc/passwd'"),
        (b'{"weight_map": {"a": ""}}', "places 'a' in ''"),
        (b'{"weight_map": {"a": ".."}}', r"names shard '\.\.'|places 'a' in '\.\.'"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' appears twice"),
        (b"\xff", "not UTF-8"),
        (b"{", "not valid JSON"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes, problem: str) -> None:
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(CheckpointError, match=problem):
        SafetensorsSource(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsSource(tmp_path)


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=2000
)
@given(
    flips=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 2600),
)
def test_random_damage_raises_only_checkpoint_errors(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    original = folder.with_name("fuzz-original")
    if not original.exists():
        write_folder(original)
    raw = bytearray((original / "model.safetensors").read_bytes())
    for at, value in flips:
        raw[at] = value
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(raw[:cut] if cut is not None else raw)
    with contextlib.suppress(CheckpointError):
        for _, tensor in SafetensorsSource(folder).pairs():
            assert tensor.numel() >= 0
