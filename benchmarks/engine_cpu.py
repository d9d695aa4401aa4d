"""Engines side by side on the CPU: torpor, Hugging Face transformers, vLLM, and the bound.

Run: python benchmarks/engine_cpu.py [--json FILE] [--rounds 5] [--processes 3] [--threads 2]

Every engine runs in a virtual environment of its own, made here and kept, as one worker process
that loads the same weights once. Rounds alternate between the workers with the same prompts of
random tokens, new ones in every round; all but the one that computes are stopped. A short turn of
the same worker, which does not count, comes before each sample. The bound is nothing but the matrix
products of the model's shapes, in its own worker in the same rounds. Medians over the rounds of a
process, then over fresh processes.

A sample is void when other processes used the processor while it was taken, and its round is then
repeated; the whole run is void when the machine was busy at its start. An engine that cannot be
installed or started is left out, with the reason. Needs Python alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "engines"))

import quiet
import venvs
from cases import Case, all_cases
from summary import summarize, table
from worker import Failed, Worker

ROOT = Path(__file__).resolve().parents[1]
BOUND_STEPS = 16
WARM_UP_TOKENS = 8
PROFILE_STEPS = 16
VOID_EXIT = 1
OF_THE_PLACE = ("json", "environments", "python", "torch_index")
"""Options that say where things are, which is no part of a result."""

SCRIPTS = {
    "bound": ("torpor", "worker_bound.py", "float32"),
    "torpor-fp32": ("torpor", "worker_torpor.py", "float32"),
    "torpor-bf16": ("torpor", "worker_torpor.py", "bfloat16"),
    "torpor-invariant": ("torpor", "worker_torpor.py", "float32"),
    "transformers-fp32": ("transformers", "worker_transformers.py", "float32"),
    "vllm-fp32": ("vllm", "worker_vllm.py", "float32"),
}
"""By worker: environment, script, dtype."""

KV_CACHE_BYTES = 2 << 30
"""Of torpor and vLLM. Both have touched all of it when the model is loaded."""
SIZED = {"kv_cache_memory_bytes": KV_CACHE_BYTES}

ARGUMENTS = {"torpor-invariant": {"batch_invariant": True}}
"""By worker: what its ``LLM`` is made with, beside what the command line says."""


def main() -> int:
    """Measure, print the table, write the JSON; 1 when the run is void."""
    options = arguments()
    result = Run(options).measure()
    print(table([*result.pop("case_objects")], result["summary"]))
    for name, reason in result["skipped"].items():
        print(f"skipped {name}: {reason.strip().splitlines()[-1]}")
    for reason in result["void"]:
        print(f"VOID: {reason}")
    if options.json:
        options.json.write_text(as_text(result))
    return VOID_EXIT if result["void"] else 0


def as_text(result: dict[str, Any]) -> str:
    """A result as JSON, without the name of whoever measured in its paths."""
    return json.dumps(result, indent=1).replace(str(Path.home()), "~") + "\n"


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=3, help="fresh sets of workers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--workers", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--repeats", type=int, default=3, help="of a round that is void")
    parser.add_argument("--count-void", action="store_true", help="for trying this script out")
    parser.add_argument("--wait-s", type=float, default=600.0, help="for a quiet machine")
    parser.add_argument("--environments", type=Path, default=cache / "torpor-benchmarks")
    parser.add_argument("--torch-index", help="pip index with CPU builds of torch")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="an interpreter to use instead of making torpor, transformers or vllm",
    )
    parser.add_argument("--torpor-arguments", default="{}", help="JSON, for LLM")
    parser.add_argument("--vllm-arguments", default="{}", help="JSON, for LLM")
    parser.add_argument("--vllm-openmp", choices=["intel", "gnu"], default="intel")
    return parser.parse_args()


class Run:
    """One whole measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.skipped: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.samples: list[dict[str, Any]] = []
        self.profiles: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        cases = all_cases(options.input_len, options.output_len, options.batches)
        self.cases = [case for case in cases if not options.cases or case.name in options.cases]
        self.pythons = self._environments()
        self.folder = self._model_folder()
        self.vocab_size = json.loads((self.folder / "config.json").read_text())["vocab_size"]

    def measure(self) -> dict[str, Any]:
        """All processes, all rounds."""
        load_before = self._wait_for_quiet()
        start_s = time.time()
        for process in range(self.options.processes):
            with self._workers() as workers:
                for number in range(-1, self.options.rounds):
                    for case in self.cases:
                        self._round(workers, case, process, number)
                if process == 0:
                    self._profile(workers)
            # An hour's work: what is measured is kept, whatever happens to the rest.
            if self.options.json:
                partial = self._result(load_before, start_s)
                partial.pop("case_objects")
                self.options.json.write_text(as_text(partial))
        return self._result(load_before, start_s)

    def _result(self, load_before: float, start_s: float) -> dict[str, Any]:
        return {
            "what": "engines on the CPU, side by side",
            "rig": self._rig(load_before),
            "options": {
                name: value
                for name, value in vars(self.options).items()
                if name not in OF_THE_PLACE
            },
            "workers": self.facts,
            "skipped": self.skipped,
            "void": self._void(load_before),
            "summary": summarize(
                self.cases,
                [s for s in self.samples if self.options.count_void or not s["void"]],
            ),
            "torpor_status": self.status,
            "profiles": self.profiles,
            "samples": self.samples,
            "total_s": time.time() - start_s,
            "case_objects": self.cases,
        }

    def _environments(self) -> dict[str, Path]:
        given = dict(entry.split("=", 1) for entry in self.options.python)
        wanted = {SCRIPTS[name][0] for name in self.options.workers} | {"torpor"}
        found = {}
        for name, recipe in venvs.recipes(self.options.torch_index).items():
            if name not in wanted:
                continue
            note(f"environment {name}")
            try:
                # Not resolved: an environment's interpreter is a link that must stay one.
                found[name] = (
                    Path(given[name]).absolute()
                    if name in given
                    else venvs.python_of(recipe, self.options.environments)
                )
            except venvs.Unavailable as error:
                self._skip(name, str(error))
        if "torpor" not in found:
            raise SystemExit(f"without torpor there is nothing to compare: {self.skipped}")
        return found

    def _model_folder(self) -> Path:
        code = (
            "import sys; from torpor.model.checkpoints.resolve import resolve_model; "
            "print(resolve_model(sys.argv[1]).folder)"
        )
        done = subprocess.run(
            [str(self.pythons["torpor"]), "-c", code, self.options.model],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return Path(done.stdout.strip()).absolute()

    @contextmanager
    def _workers(self) -> Iterator[dict[str, Worker]]:
        """A fresh set of workers."""
        with ExitStack() as closing:
            found = {}
            for name in self.options.workers:
                environment = SCRIPTS[name][0]
                if name in self.skipped or environment not in self.pythons:
                    continue
                note(f"loading {name}")
                try:
                    found[name] = self._start(name)
                except venvs.Unavailable as error:
                    self._skip(name, str(error))
                    continue
                closing.callback(found[name].close)
                self.facts[name] = found[name].facts
            yield found

    def _start(self, name: str) -> Worker:
        environment, script, dtype = SCRIPTS[name]
        python = self.pythons[environment]
        threads = str(self.options.threads)
        command = ["--model", str(self.folder), "--dtype", dtype, "--threads", threads]
        if environment in ("torpor", "vllm") and name != "bound":
            given = dict(SIZED) if environment == "torpor" else {}
            given |= json.loads(getattr(self.options, f"{environment}_arguments"))
            given |= ARGUMENTS.get(name, {})
            command += ["--arguments", json.dumps(given)]
        return Worker(name, python, script, command, self._variables(environment, python))

    def _variables(self, environment: str, python: Path) -> dict[str, str]:
        found = {"OMP_NUM_THREADS": str(self.options.threads), "HF_HUB_OFFLINE": "1"}
        if environment == "torpor":
            found |= {"PYTHONPATH": str(ROOT / "src"), "TORPOR_POISON": "0"}
        if environment == "vllm":
            found |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
            }
            # vLLM advises Intel's, which it brings along; torch by itself takes GNU's.
            openmp = python.parent.parent / "lib" / "libiomp5.so"
            if self.options.vllm_openmp == "intel" and openmp.is_file():
                found["LD_PRELOAD"] = str(openmp)
        return found

    def _round(self, workers: dict[str, Worker], case: Case, process: int, number: int) -> None:
        """One turn each; once more when one of them is void. Round -1 warms up."""
        for attempt in range(self.options.repeats + 1):
            prompts = case.prompts(f"{process} {number} {attempt}", self.vocab_size)
            turns = []
            for name in ("bound", *case.workers):
                if name not in workers or (name == "bound" and not case.bound):
                    continue
                if _place(name, case) in self.skipped:
                    continue
                sample = self._turn(workers, name, case, prompts, warm_up=number < 0)
                if sample is not None:
                    turns.append(sample)
            if number < 0:
                return
            _compare(turns)
            place = {"case": case.name, "process": process, "round": number, "attempt": attempt}
            self.samples += [{**place, **turn} for turn in turns]
            if not any(turn["void"] for turn in turns):
                return

    def _turn(
        self,
        workers: dict[str, Worker],
        name: str,
        case: Case,
        prompts: list[list[int]],
        *,
        warm_up: bool,
    ) -> dict[str, Any] | None:
        worker = workers[name]
        if not warm_up and name != "bound":
            # Who was still for longer is slower at first; nobody is, just after its last turn.
            self._turn(
                workers, name, case, case.prompts(repr(prompts[0]), self.vocab_size), warm_up=True
            )
            if name not in workers:
                return None
        load_before = quiet.load_average()
        before = quiet.read([os.getpid(), *worker.pids])
        try:
            if name == "bound":
                answer = worker.ask(
                    "gemm",
                    batch=case.batch,
                    prefill_rows=case.batch * case.input_len,
                    steps=2 if warm_up else BOUND_STEPS,
                )
            else:
                length = min(case.output_len, WARM_UP_TOKENS) if warm_up else case.output_len
                answer = worker.ask("generate", prompts=prompts, max_tokens=length)
                if any(len(ids) != length for ids in answer["token_ids"]):
                    raise Failed(f"{name} ended a completion of {case.name} early")
        except Failed as error:
            self._skip(_place(name, case), str(error))
            if error.is_final:
                self._skip(name, str(error))
                workers.pop(name).close()
            return None
        share = quiet.others_share(before, quiet.read([os.getpid(), *worker.pids]))
        figure = answer.get("elapsed_s", answer.get("step_s"))
        note(f"{case.name}, {name}: {figure:.3f} s, others {share:.0%}")
        return {
            "worker": name,
            "load_before": load_before,
            "others_share": share,
            "void": share > quiet.MAX_OTHERS,
            **answer,
        }

    def _profile(self, workers: dict[str, Worker]) -> None:
        for name in ("torpor-fp32", "torpor-bf16"):
            for batch in self.options.batches:
                if name in workers:
                    note(f"profile of {name}, batch {batch}")
                    try:
                        answer = workers[name].ask("profile", batch=batch, steps=PROFILE_STEPS)
                    except Failed as error:
                        answer = {"error": str(error)}
                    self.profiles[f"{name}, batch {batch}"] = answer
            if name in workers:
                self.status[name] = workers[name].ask("status")["status"]

    def _wait_for_quiet(self) -> float:
        deadline_s = time.monotonic() + self.options.wait_s
        while (load := quiet.load_average()) > quiet.MAX_LOAD and time.monotonic() < deadline_s:
            note(f"waiting for a quiet machine: load {load:.2f}")
            time.sleep(5)
        return load

    def _void(self, load_before: float) -> list[str]:
        found = []
        if load_before > quiet.MAX_LOAD:
            found.append(f"load {load_before:.2f} at the start, more than {quiet.MAX_LOAD}")
        for case in self.cases:
            mine = [sample for sample in self.samples if sample["case"] == case.name]
            for worker in dict.fromkeys(sample["worker"] for sample in mine):
                valid = sum(s["worker"] == worker and not s["void"] for s in mine)
                wanted = self.options.rounds * self.options.processes
                if valid < wanted:
                    found.append(f"{case.name}, {worker}: {valid} of {wanted} samples are valid")
        return found

    def _skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        note(f"skipped {name}: {reason}")

    def _rig(self, load_before: float) -> dict[str, Any]:
        names = Path("/proc/cpuinfo").read_text().split("model name")
        return {
            "processor": names[1].split(":", 1)[1].split("\n", 1)[0].strip()
            if len(names) > 1
            else platform.machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "commit": commit(),
            "load_before": load_before,
            "load_after": quiet.load_average(),
        }


def commit() -> str | None:
    """The checkout's commit, with ``-dirty`` when tracked files differ from it."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _place(worker: str, case: Case) -> str:
    return f"{worker}, {case.name}"


def note(words: str) -> None:
    """Tell whoever waits."""
    print(words, file=sys.stderr, flush=True)


def _compare(turns: list[dict[str, Any]]) -> None:
    """Count completions equal to those of transformers; the ids themselves are not kept."""
    answers = {turn["worker"]: turn.pop("token_ids", None) for turn in turns}
    reference = answers.get("transformers-fp32")
    for turn in turns:
        mine = answers[turn["worker"]]
        if reference is not None and mine is not None:
            equal = sum(one == other for one, other in zip(mine, reference, strict=True))
            turn["compared"] = (equal, len(reference))


if __name__ == "__main__":
    sys.exit(main())
