"""From samples to medians, ratios and a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from cases import Case

Sample = dict[str, Any]
OTHERS = ("transformers-fp32", "vllm-fp32")
OWN = {"bf16_over_fp32": "torpor-bf16", "invariant_over_fp32": "torpor-invariant"}
"""Ratios of torpor in another form to torpor in float32."""


def figures_of(case: Case, sample: Sample) -> dict[str, float]:
    """What one sample says, by figure; units are in the names."""
    if sample["worker"] == "bound":
        step_s, steps = sample["step_s"], case.output_len - 1
        whole_s = sample["prefill_s"] + steps * step_s
        best_s = min([step_s, *sample["form_step_s"].values()])
        return {
            "tokens_per_s": case.batch / step_s,
            "with_prefill_tokens_per_s": case.batch * case.output_len / whole_s,
            "best_form_tokens_per_s": case.batch / best_s,
        }
    if case.output_len == 1:
        return {"elapsed_s": sample["elapsed_s"]}
    return {"tokens_per_s": case.batch * case.output_len / sample["elapsed_s"]}


def summarize(cases: Sequence[Case], samples: Sequence[Sample]) -> dict[str, Any]:
    """By case and worker: the median over processes of the medians over rounds, and ratios.

    Every sample that is handed in counts, void ones too.
    """
    found: dict[str, Any] = {}
    for case in cases:
        workers = _by_worker(case, [sample for sample in samples if sample["case"] == case.name])
        found[case.name] = {"workers": workers, "ratios": _ratios(workers)}
        if case.shared_len:
            found[case.name]["prefill"] = _prefill(case, samples)
    return found


def _by_worker(case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for worker in dict.fromkeys(sample["worker"] for sample in samples):
        mine = [sample for sample in samples if sample["worker"] == worker]
        by_process: dict[int, list[dict[str, float]]] = {}
        for sample in mine:
            by_process.setdefault(sample["process"], []).append(figures_of(case, sample))
        found[worker] = {
            name: _spread(
                [
                    statistics.median(entry[name] for entry in entries)
                    for entries in by_process.values()
                ]
            )
            for name in figures_of(case, mine[0])
        }
        found[worker]["samples"] = len(mine)
        compared = [sample["compared"] for sample in mine if sample.get("compared")]
        if compared:
            equal, all_of_them = (sum(column) for column in zip(*compared, strict=True))
            found[worker]["completions_equal_to_transformers"] = f"{equal} of {all_of_them}"
    return found


def _spread(medians: Sequence[float]) -> dict[str, Any]:
    """Over processes."""
    return {
        "median": statistics.median(medians),
        "min": min(medians),
        "max": max(medians),
        "process_medians": list(medians),
    }


def _ratios(workers: dict[str, Any]) -> dict[str, float]:
    """How torpor compares; above 1 it is the faster one."""

    def median(worker: str, figure: str) -> float | None:
        value = workers.get(worker, {}).get(figure)
        return None if value is None else float(value["median"])

    found: dict[str, float] = {}
    own = median("torpor-fp32", "tokens_per_s")
    if own is not None:
        for name, value in (
            ("bound", median("bound", "tokens_per_s")),
            ("bound_with_prefill", median("bound", "with_prefill_tokens_per_s")),
            ("best_form_of_bound", median("bound", "best_form_tokens_per_s")),
            *((worker, median(worker, "tokens_per_s")) for worker in OTHERS),
        ):
            if value is not None:
                found[f"torpor_over_{name}"] = own / value
        for name, worker in OWN.items():
            value = median(worker, "tokens_per_s")
            if value is not None:
                found[name] = value / own
    own_s = median("torpor-fp32", "elapsed_s")
    if own_s is not None:
        for worker in OTHERS:
            other_s = median(worker, "elapsed_s")
            if other_s is not None:
                found[f"torpor_over_{worker}"] = other_s / own_s
        invariant_s = median("torpor-invariant", "elapsed_s")
        if invariant_s is not None:
            found["invariant_over_fp32"] = own_s / invariant_s
    return found


def _prefill(case: Case, samples: Iterable[Sample]) -> dict[str, Any]:
    """Prompt tokens, and those that a cache hit saved, as the outputs count them."""
    counted = [
        sum(sample["num_cached_tokens"])
        for sample in samples
        if sample["case"] == case.name and sample.get("num_cached_tokens") is not None
    ]
    prompt_tokens = case.batch * case.input_len
    if not counted:
        return {"prompt_tokens": prompt_tokens, "cached_tokens": None, "times_less": None}
    cached = statistics.median(counted)
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached,
        "times_less": prompt_tokens / (prompt_tokens - cached),
    }


def table(cases: Sequence[Case], summary: dict[str, Any]) -> str:
    """The medians as text, a row per case and worker."""
    rows = [("case", "worker", "median", "min", "max", "torpor is")]
    for case in cases:
        entry = summary[case.name]
        for worker, facts in entry["workers"].items():
            for figure, value in facts.items():
                if isinstance(value, dict):
                    unit = "s" if figure == "elapsed_s" else "tokens/s"
                    label = worker + _REMARKS.get(figure, "")
                    cells = [f"{value[key]:.3g} {unit}" for key in ("median", "min", "max")]
                    rows.append((case.name, label, *cells, _times(entry, worker, figure)))
        if "prefill" in entry and entry["prefill"]["times_less"]:
            rows.append(
                (case.name, "prefill", f"{entry['prefill']['times_less']:.1f}x less") + ("",) * 3
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


_REMARKS = {
    "with_prefill_tokens_per_s": " with prefill",
    "best_form_tokens_per_s": " best form",
}
_RATIO_NAMES = {
    ("bound", "tokens_per_s"): "torpor_over_bound",
    ("bound", "with_prefill_tokens_per_s"): "torpor_over_bound_with_prefill",
    ("bound", "best_form_tokens_per_s"): "torpor_over_best_form_of_bound",
}


def _times(entry: dict[str, Any], worker: str, figure: str) -> str:
    for name, own in OWN.items():
        if worker == own:
            ratio = entry["ratios"].get(name)
            return "" if ratio is None else f"{ratio:.2f}x its fp32"
    name = _RATIO_NAMES.get((worker, figure), f"torpor_over_{worker}")
    ratio = entry["ratios"].get(name)
    return "" if ratio is None else f"{ratio:.2f}x"
