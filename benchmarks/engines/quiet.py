"""Who else used the processor while something was measured, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")

MAX_OTHERS = 0.10
"""Seconds of processor time of other processes, per second measured."""

MAX_LOAD = 0.5
"""At the start of the whole run; later on the benchmark itself is the load."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor time so far, in seconds."""

    at_s: float
    busy_s: float
    """Of all processors, what the hypervisor took away included."""
    own_s: float
    """Of this benchmark's processes."""


def read(pids: Iterable[int]) -> Reading:
    """The counters now; ``pids`` are the benchmark's processes."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    busy = user + nice + system + irq + softirq + steal
    own = sum(map(_ticks, pids))
    return Reading(time.perf_counter(), busy / TICKS_PER_S, own / TICKS_PER_S)


def others_share(before: Reading, after: Reading) -> float:
    """Processor seconds of everybody else, per second between two readings."""
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others_s) / max(after.at_s - before.at_s, 1 / TICKS_PER_S)


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return os.getloadavg()[0]


def _ticks(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0  # it has ended
    # The name may hold spaces and brackets; what follows its last bracket does not.
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))
