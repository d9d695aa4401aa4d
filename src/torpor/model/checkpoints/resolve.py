"""From a model's name or path to its files."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from torpor.errors import CheckpointError, ModelNotFoundError, shown
from torpor.model.checkpoints.cache import Recipe, cached
from torpor.model.checkpoints.convert import convert_gguf
from torpor.model.checkpoints.embedded import EMBEDDED_MODELS, EmbeddedModel, check_hash, locate
from torpor.model.checkpoints.files import ModelFiles, Progress
from torpor.model.checkpoints.safetensors_source import SafetensorsSource
from torpor.model.config.config import load_config


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    weights: bool = True,
) -> ModelFiles:
    """Find a model and make its files ready to load.

    An embedded model or a GGUF file is converted once into the cache; later calls compare the cache
    with its recorded digests and convert again if a byte differs. A changed GGUF file is noticed
    by its size and modification time.

    Args:
        name_or_path: ``smollm2``, a Hugging Face safetensors folder, or a ``.gguf`` file. A name
            wins over a folder of the same name; write ``./smollm2`` for the folder.
        progress: told of the stages ``check``, ``convert`` and ``verify``.
        weights: False for a folder of which only the config and the tokenizer are of use; its
            source holds no tensors.

    Raises:
        ModelNotFoundError: no such name or path, or the package with the model is not installed.
        CheckpointError: a file is damaged.
        ConfigError: the model is of a kind torpor does not run.
        HostFullError, HostCopyError: the cache cannot be written.
    """
    name = os.fspath(name_or_path)
    if name in EMBEDDED_MODELS:
        return _files(name, cached(_embedded(EMBEDDED_MODELS[name], progress), progress), True)
    path = _path(name)
    if path.is_dir():
        return _folder(name, path, weights=weights)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _files(name, cached(_gguf(path, progress), progress), True)
    known = ", ".join(EMBEDDED_MODELS)
    problem = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise ModelNotFoundError(
        f"model {name!r} {problem}; give a Hugging Face safetensors folder, a .gguf file, or one "
        f"of the names torpor knows: {known}"
    )


def _path(name: str) -> Path:
    path = Path(name)
    try:
        path.stat()
    except FileNotFoundError:
        pass  # said by the caller, with the names that torpor knows
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"model {shown(name, 80)} cannot be looked up ({error}); give the path of a folder or "
            ".gguf file, or a name"
        ) from error
    return path


def _folder(name: str, path: Path, *, weights: bool) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"folder {name!r} holds no config.json; give the folder of a Hugging Face model"
        )
    source = SafetensorsSource(path) if weights else SafetensorsSource.without_files(path)
    return _files(name, source, False)


def _files(name: str, source: SafetensorsSource, converted: bool) -> ModelFiles:
    def present(file_name: str) -> Path | None:
        path = source.folder / file_name
        return path if path.is_file() else None

    return ModelFiles(
        name=name,
        folder=source.folder,
        config=load_config(source.folder),
        source=source,
        tokenizer_json=present("tokenizer.json"),
        tokenizer_model=present("tokenizer.model"),
        tokenizer_config_json=present("tokenizer_config.json"),
        chat_template=present("chat_template.jinja"),
        converted=converted,
    )


def _embedded(model: EmbeddedModel, progress: Progress | None) -> Recipe:
    origin = f"sha256:{model.sha256}"

    def make(folder: Path) -> None:
        path = locate(model)
        check_hash(model, path, progress)
        convert_gguf(path, folder, origin=origin, progress=progress)

    return Recipe(slug=f"{model.name}-{model.sha256[:12]}", origin=origin, make=make)


def _gguf(path: Path, progress: Progress | None) -> Recipe:
    path = path.resolve()
    origin = _identity(path)

    def make(folder: Path) -> None:
        convert_gguf(path, folder, origin=origin, progress=progress)
        if _identity(path) != origin:
            raise CheckpointError(f"{path} changed while it was converted; try again")

    key = xxhash.xxh3_64_hexdigest(os.fsencode(path))
    return Recipe(slug=f"{path.stem}-{key}", origin=origin, make=make)


def _identity(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check it") from error
    return f"{path} of {status.st_size} bytes, modified at {status.st_mtime_ns} ns"
