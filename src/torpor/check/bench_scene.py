"""What a benchmark was run on: the rig, the commit, and how busy the machine was."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.check.rig import Rig, this_rig

GIT_TIMEOUT_S = 10.0

QUIET_LOAD = 0.5
"""Runnable processes, averaged over a minute. With more, others take part of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One machine, and what it was doing while a benchmark ran on it."""

    rig: Rig
    commit: str | None
    load_before: float
    """Runnable processes, averaged over the minute before."""
    load_after: float
    """As ``load_before``; counts the benchmark itself, too."""

    @property
    def was_quiet(self) -> bool:
        """Whether little else ran when it began."""
        return self.load_before <= QUIET_LOAD

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "device": "cpu",
            "rig": self.rig.to_dict(),
            "num_threads": self.rig.torch_threads,
            "commit": self.commit,
            "load_average_1min": {"before": self.load_before, "after": self.load_after},
        }


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def scene_since(load_before: float) -> Scene:
    """The machine as it is now, at the end of a run that began under ``load_before``."""
    return Scene(
        rig=this_rig(),
        commit=source_commit(Path(__file__)),
        load_before=load_before,
        load_after=load_average(),
    )


def source_commit(path: Path) -> str | None:
    """The commit of the checkout that a source file belongs to.

    Returns:
        The short hash, with ``-dirty`` when tracked files differ from it. None where git does not
        know the file: an installed package, even one inside another project's checkout.
    """
    if _git(path.parent, "ls-files", "--error-unmatch", path.name) is None:
        return None
    return _git(path.parent, "describe", "--always", "--dirty", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
