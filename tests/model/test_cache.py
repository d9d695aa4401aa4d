"""A model is converted once, checked at every use, and converted again when anything is damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.helpers import write_gguf

from torpor.errors import CheckpointError, ConfigError, HostCopyError, HostFullError
from torpor.model.checkpoints.cache import cache_root
from torpor.model.checkpoints.files import ModelFiles
from torpor.model.checkpoints.manifest import read_manifest
from torpor.model.checkpoints.resolve import resolve_model

FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "manifest.json",
)


class Stages:
    """A progress callback that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.calls.append((stage, done, total))

    @property
    def converted(self) -> bool:
        return any(stage == "convert" for stage, _, _ in self.calls)


def was_converted(path: Path) -> bool:
    stages = Stages()
    resolve_model(path, progress=stages)
    return stages.converted


def weights_of(files: ModelFiles) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in files.source.pairs()}


def test_a_gguf_becomes_a_model_folder(tiny_gguf: Path, cache: Path) -> None:
    files = resolve_model(tiny_gguf)
    assert sorted(path.name for path in files.folder.iterdir()) == sorted(FILES)
    assert files.folder.parent == cache
    assert files.converted
    assert files.tokenizer_json == files.folder / "tokenizer.json"
    assert files.config.eos_token_ids == (2,)
    weights = write_gguf(tiny_gguf.with_name("again.gguf"))
    got = weights_of(files)
    assert got.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in got.items())


def test_parts_of_a_fused_parameter_lie_side_by_side(tiny_gguf: Path, cache: Path) -> None:
    source = resolve_model(tiny_gguf).source
    prefix = "model.layers.1.self_attn"
    q, k, v = (source.extent(f"{prefix}.{part}_proj.weight") for part in "qkv")
    assert q is not None
    assert k is not None
    assert v is not None
    assert q.offset + q.nbytes == k.offset
    assert k.offset + k.nbytes == v.offset


def test_the_second_use_only_verifies(tiny_gguf: Path, cache: Path) -> None:
    first, second = Stages(), Stages()
    resolve_model(tiny_gguf, progress=first)
    resolve_model(tiny_gguf, progress=second)
    assert first.converted
    assert {stage for stage, _, _ in second.calls} == {"verify"}
    for stages in (first, second):
        for stage in {stage for stage, _, _ in stages.calls}:
            dones = [(done, total) for name, done, total in stages.calls if name == stage]
            assert dones == sorted(dones)
            assert dones[0][0] == 0
            assert dones[-1][0] == dones[-1][1] > 0


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x04
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def blank(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


@pytest.mark.parametrize("damage", [flip, cut, blank, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_any_damage_is_noticed_and_mended_with_a_warning(
    tiny_gguf: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    files = resolve_model(tiny_gguf)
    expected, original = weights_of(files), (files.folder / name).read_bytes()
    damage(files.folder / name)
    with caplog.at_level(logging.WARNING, logger="torpor"):
        stages = Stages()
        again = resolve_model(tiny_gguf, progress=stages)
    assert stages.converted
    assert "converting again" in caplog.text
    assert (again.folder / name).read_bytes() == original
    got = weights_of(again)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in got.items())
    assert not was_converted(tiny_gguf)


def test_a_flipped_bit_in_the_header_of_the_weights_is_noticed(
    tiny_gguf: Path, cache: Path
) -> None:
    path = resolve_model(tiny_gguf).folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    # Swapping two equally long names keeps the header valid and every byte of data in place.
    first, second = b"layers.0.mlp.gate_proj", b"layers.1.mlp.gate_proj"
    swapped = raw.replace(first, b"?" * len(first)).replace(second, first)
    path.write_bytes(swapped.replace(b"?" * len(first), second))
    assert path.read_bytes() != raw
    assert was_converted(tiny_gguf)


def test_a_manifest_of_another_format_is_not_trusted(tiny_gguf: Path, cache: Path) -> None:
    folder = resolve_model(tiny_gguf).folder
    content = json.loads((folder / "manifest.json").read_text())
    for edit in ({"format": 0}, {"files": []}, {"tensors": None}, {"origin": 7}):
        (folder / "manifest.json").write_text(json.dumps({**content, **edit}))
        with pytest.raises(CheckpointError, match="does not match its own digest"):
            read_manifest(folder)
    assert was_converted(tiny_gguf)


def test_a_changed_source_is_converted_again(tiny_gguf: Path, cache: Path) -> None:
    first = resolve_model(tiny_gguf)
    write_gguf(tiny_gguf, metadata={"llama.rope.freq_base": 77.0})
    second = resolve_model(tiny_gguf)
    assert second.config.rope.theta == 77.0
    assert second.folder == first.folder
    assert not was_converted(tiny_gguf)


def test_a_source_that_changes_while_it_is_converted_is_refused(
    tiny_gguf: Path, cache: Path
) -> None:
    def touch(stage: str, done: int, total: int) -> None:
        if stage == "convert":
            os.utime(tiny_gguf, ns=(done, done))

    with pytest.raises(CheckpointError, match=r"tiny\.gguf changed while it was converted"):
        resolve_model(tiny_gguf, progress=touch)
    assert left_in(cache) == []


def test_files_of_one_name_do_not_share_a_folder(tmp_path: Path, cache: Path) -> None:
    paths = [tmp_path / part / "model.gguf" for part in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        write_gguf(path)
    assert len({resolve_model(path).folder for path in paths}) == 2
    assert not any(was_converted(path) for path in paths)


def test_a_relative_path_is_the_same_model(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(tiny_gguf).folder
    monkeypatch.chdir(tiny_gguf.parent)
    assert resolve_model("tiny.gguf").folder == folder


def left_in(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_source_that_cannot_be_converted_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "bad.gguf", metadata={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ConfigError, match="klingon"):
        resolve_model(tmp_path / "bad.gguf")
    rows = torch.full((64, 32), float("nan")).numpy()
    write_gguf(tmp_path / "bad.gguf", tensors={"blk.1.ffn_up.weight": rows})
    with pytest.raises(CheckpointError, match="NaN"):
        resolve_model(tmp_path / "bad.gguf")
    assert left_in(cache) == []


def test_a_vocabulary_that_does_not_fit_the_embedding_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    from tests.model.helpers import GGUF_TINY

    write_gguf(tmp_path / "bad.gguf", config={**GGUF_TINY, "vocab_size": 300})
    with pytest.raises(CheckpointError, match="268 tokens and 300 rows"):
        resolve_model(tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("number", "error", "problem"),
    [
        (errno.ENOSPC, HostFullError, r"no room .* bytes free\).*set TORPOR_CACHE"),
        (errno.EDQUOT, HostFullError, "no room"),
        (errno.EROFS, HostCopyError, "cannot be written .*set TORPOR_CACHE"),
    ],
)
def test_a_full_or_closed_disk_is_a_typed_error_and_leaves_nothing(
    tiny_gguf: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
    problem: str,
) -> None:
    def full(path: Path, shapes: Any, dtype: Any, pairs: Iterator[Any]) -> None:
        next(pairs)
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("torpor.model.checkpoints.convert.write_safetensors", full)
    with pytest.raises(error, match=problem):
        resolve_model(tiny_gguf)
    assert left_in(cache) == []
    monkeypatch.undo()
    monkeypatch.setenv("TORPOR_CACHE", str(cache))
    assert was_converted(tiny_gguf)


def test_an_interrupt_leaves_nothing(tiny_gguf: Path, cache: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "convert" and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(tiny_gguf, progress=interrupt)
    assert left_in(cache) == []


def test_a_cache_that_is_no_folder_is_a_typed_error(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TORPOR_CACHE", str(tmp_path / "file"))
    with pytest.raises(HostCopyError, match="set TORPOR_CACHE to a folder"):
        resolve_model(tiny_gguf)


def test_a_lock_that_is_never_released_is_a_typed_error(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import filelock

    monkeypatch.setattr("torpor.model.checkpoints.cache.LOCK_TIMEOUT_S", 0.0)
    name = f"{resolve_model(tiny_gguf).folder.name}.lock"
    shutil.rmtree(cache / name.removesuffix(".lock"))
    with (
        filelock.FileLock(cache / name),
        pytest.raises(HostCopyError, match=f"another process has held .*{name}"),
    ):
        resolve_model(tiny_gguf)


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/a/b", "/x", "/a/b"),
        ("", "/x", "/x/torpor"),
        (None, "/x", "/x/torpor"),
        (None, "relative", "/home/me/.cache/torpor"),
        (None, None, "/home/me/.cache/torpor"),
        ("~/c", None, "/home/me/c"),
    ],
)
def test_where_the_cache_lies(
    monkeypatch: pytest.MonkeyPatch, own: str | None, shared: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("TORPOR_CACHE", own), ("XDG_CACHE_HOME", shared)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


WORKER = """
import pathlib, sys
from torpor.model.checkpoints.resolve import resolve_model
ready, go, path = map(pathlib.Path, sys.argv[1:])
stages = set()
def progress(stage, done, total):
    stages.add(stage)
ready.touch()
while not go.exists():
    pass
files = resolve_model(path, progress=progress)
total = sum(float(tensor.double().sum()) for _, tensor in files.source.pairs())
print("convert" in stages, total)
"""


def started(tmp_path: Path, number: int, path: Path) -> subprocess.Popen[str]:
    ready, go = tmp_path / f"ready{number}", tmp_path / "go"
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(ready), str(go), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def test_two_processes_convert_once(tmp_path: Path, tiny_gguf: Path, cache: Path) -> None:
    processes = [started(tmp_path, number, tiny_gguf) for number in range(2)]
    for number, process in enumerate(processes):
        wait_for(tmp_path / f"ready{number}", process)
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    answers = [stdout.split() for stdout, _ in outputs]
    assert sorted(answer[0] for answer in answers) == ["False", "True"]
    assert answers[0][1] == answers[1][1]


KILLED = """
import os, signal, sys
from torpor.model.checkpoints.resolve import resolve_model
def progress(stage, done, total):
    if stage == "convert" and done * 2 > total:
        os.kill(os.getpid(), signal.SIGKILL)
resolve_model(sys.argv[1], progress=progress)
"""


def test_a_process_killed_while_converting_leaves_nothing_half(
    tiny_gguf: Path, cache: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tiny_gguf)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert all(name.startswith(".") for name in left_in(cache))
    files = resolve_model(tiny_gguf)
    assert left_in(cache) == [files.folder.name]
    assert not was_converted(tiny_gguf)
