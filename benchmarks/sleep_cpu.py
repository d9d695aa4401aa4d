"""Sleep and wake of the embedded model on the CPU: what a clean sleep costs, and a dirty one.

Run: python benchmarks/sleep_cpu.py [--rounds 7] [--json FILE]

Every round measures, side by side: the bare digest of all owned bytes, the bare release of the
arenas (mapped again and restored afterwards), a clean level-1 sleep and its wake, and a level-1
sleep after every tensor was changed through the door with ``host_copy="defer"``, which writes a
file copy. Medians are reported, with the rig and the load of the machine.
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
    with LLM(model, poison=False) as llm:
        sleeper = llm.sleeper
        llm.sleep(1)  # The first sleep copies the few buffers that no checkpoint file holds.
        llm.wake_up()
        samples: dict[str, list[float]] = {}
        facts: dict[str, Any] = {}
        for round_index in range(rounds):
            for name, value in one_round(llm, sleeper, round_index, facts).items():
                samples.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    floor_s = medians["digest_s"] + medians["release_s"]
    return {
        "model": model,
        "rounds": rounds,
        **facts,
        "median": medians,
        "spread": {name: [min(values), max(values)] for name, values in samples.items()},
        "clean_over_digest_and_release": medians["clean_sleep_s"] / floor_s,
        "clean_over_dirty": medians["clean_sleep_s"] / medians["dirty_sleep_s"],
        "rig": rig(load_before),
    }


def one_round(
    llm: LLM, sleeper: Sleeper, round_index: int, facts: dict[str, Any]
) -> dict[str, float]:
    context = sleeper._context  # The floor is measured with the same device calls.
    verified = [entry.range for entry in context.ledger if entry.policy.verified]
    arenas = context.ledger.arenas(context.ledger.tags())
    start_s = time.perf_counter()
    context.device.fingerprint(verified)
    digest_s = time.perf_counter() - start_s

    ranges = [arena.range for arena in arenas]
    awake_bytes = rss_of_ranges(ranges)
    clean = llm.sleep(1)
    asleep_bytes = rss_of_ranges(ranges)
    wake = llm.wake_up()
    facts["clean_copied_bytes"] = clean.copied_bytes
    facts["arena_rss_bytes"] = {"awake": awake_bytes, "asleep": asleep_bytes}
    facts["verified"] = [wake.verified, wake.total_verifiable]

    pairs = [(name, value * (1.0 + 2.0**-10)) for name, value in weights(sleeper)]
    llm.update_weights(pairs, version=f"round {round_index}")
    del pairs
    dirty = llm.sleep(1)
    facts["dirty_copied_bytes"] = dirty.copied_bytes
    dirty_wake = llm.wake_up()
    return {
        "digest_s": digest_s,
        "release_s": clean.seconds["release"],
        "clean_sleep_s": clean.total_s,
        "dirty_sleep_s": dirty.total_s,
        "wake_from_checkpoint_or_file_s": wake.total_s,
        "wake_from_file_s": dirty_wake.total_s,
    }


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
