"""The version of torpor, for reports. Light: the command line asks for it before anything else."""

from __future__ import annotations

from importlib import import_module


def torpor_version() -> str:
    """The running package's version, such as ``0.1.0``."""
    # The package's own module stands above every room, so no room imports it by name.
    return str(import_module("torpor").__version__)
