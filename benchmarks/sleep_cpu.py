"""Sleep and wake of the embedded model on the CPU: what a clean sleep costs, and a dirty one.

Run: python benchmarks/sleep_cpu.py [--rounds 7] [--json FILE]

Every round loads the model anew and measures, side by side: the bare digest of all owned bytes, the
release of the arenas, a clean level-1 sleep and its wake, and two level-1 sleeps after every tensor
was changed through the door with ``host_copy="defer"``. The first of them makes a file copy in a
new spill file; the second, after another change, writes over pages that the file has already.
Medians are reported, with the rig and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import torpor
from torpor.engine.llm import LLM
from torpor.sleep.procfs import rss_of_ranges
from torpor.sleep.reports import SleepReport
from torpor.sleep.sleeper import Sleeper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def measure(model: str, rounds: int) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    samples: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    for _ in range(rounds):
        with LLM(model, poison=False) as llm:
            for name, value in one_round(llm, facts).items():
                samples.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    clean_s = medians["clean_sleep_s"]
    return {
        "model": model,
        "rounds": rounds,
        **facts,
        "median": medians,
        "spread": {name: [min(values), max(values)] for name, values in samples.items()},
        "clean_over_digest_and_release": clean_s / (medians["digest_s"] + medians["release_s"]),
        "clean_over_first_dirty": clean_s / medians["first_dirty_sleep_s"],
        "clean_over_later_dirty": clean_s / medians["later_dirty_sleep_s"],
        "rig": rig(load_before),
    }


def one_round(llm: LLM, facts: dict[str, Any]) -> dict[str, float]:
    sleeper = llm.sleeper
    context = sleeper._context  # The floor is measured with the same device calls.
    llm.sleep(1)  # The first sleep copies the few buffers that no checkpoint file holds.
    llm.wake_up()
    verified = [entry.range for entry in context.ledger if entry.policy.verified]
    start_s = time.perf_counter()
    context.device.fingerprint(verified)
    digest_s = time.perf_counter() - start_s

    ranges = [arena.range for arena in context.ledger.arenas(context.ledger.tags())]
    awake_bytes = rss_of_ranges(ranges)
    clean = llm.sleep(1)
    facts["arena_rss_bytes"] = {"awake": awake_bytes, "asleep": rss_of_ranges(ranges)}
    wake = llm.wake_up()
    facts["clean_copied_bytes"] = clean.copied_bytes
    facts["verified"] = [wake.verified, wake.total_verifiable]

    dirty = [change_and_sleep(llm) for _ in range(2)]
    facts["dirty_copied_bytes"] = dirty[0].copied_bytes
    return {
        "digest_s": digest_s,
        "release_s": clean.seconds["release"],
        "clean_sleep_s": clean.total_s,
        "wake_s": wake.total_s,
        "first_dirty_sleep_s": dirty[0].total_s,
        "first_dirty_copy_s": dirty[0].seconds["copy"],
        "later_dirty_sleep_s": dirty[1].total_s,
        "later_dirty_copy_s": dirty[1].seconds["copy"],
    }


def change_and_sleep(llm: LLM) -> SleepReport:
    """Change every tensor through the door, sleep, and wake again."""
    llm.update_weights([(name, value * (1 + 2.0**-10)) for name, value in weights(llm.sleeper)])
    report = llm.sleep(1)
    llm.wake_up()
    return report


def weights(sleeper: Sleeper) -> list[tuple[str, torch.Tensor]]:
    """Every weight by its checkpoint name."""
    context = sleeper._context
    pairs = []
    for part in context.slices:
        tensor = context.ledger[part.parameter].tensor(part.parameter)
        assert tensor is not None
        pairs.append((part.name, part.rows_of(tensor).clone()))
    return pairs


def rig(load_before: float) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torpor": torpor.__version__,
        "commit": commit,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
