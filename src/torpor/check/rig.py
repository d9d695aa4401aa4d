"""What a measurement was made with: versions, processor, memory."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from torpor.check.version import torpor_version

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """One machine with its software, as far as it bears on a measurement."""

    torpor: str
    """Version, as the next three."""
    torch: str
    python: str
    system: str
    """Kernel name, release and machine type."""
    processor: str
    logical_cpus: int
    usable_cpus: int
    """Those this process may run on."""
    torch_threads: int
    memory_bytes: int
    """Of the whole machine."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def this_rig() -> Rig:
    """The machine and software of this process, at this moment."""
    return Rig(
        torpor=torpor_version(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        logical_cpus=psutil.cpu_count() or 1,
        usable_cpus=len(psutil.Process().cpu_affinity()),
        torch_threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
    )


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name as Linux gives it; its machine type where Linux gives none (ARM)."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() or "unknown"
