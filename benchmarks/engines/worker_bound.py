"""Worker: the bound, nothing but the matrix products of the model's shapes.

Every layer has weights of its own, so that they come from memory as in a real step. Values are
random: the time of a product does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import worker_common
from torch.nn import functional

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of x [rows, in_features] and weight [out_features, in_features]."""


def shapes_of(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(out_features, in_features) of one layer's products, fused as engines fuse them."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or width // heads
    return [
        ((heads + 2 * kv_heads) * head_dim, width),
        (width, heads * head_dim),
        (2 * inner, width),
        (width, inner),
    ]


class Bound:
    """The weights, and ways to multiply with them."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        shapes = shapes_of(config)
        layers = config["num_hidden_layers"]
        self.layers = [torch.randn(shape).to(dtype) for _ in range(layers) for shape in shapes]
        self.head = torch.randn(config["vocab_size"], config["hidden_size"]).to(dtype)
        self.dtype = dtype

    def gemm(self, batch: int, prefill_rows: int, steps: int) -> dict[str, Any]:
        """Seconds of one decode step and of one prefill, by ``linear``; and the best other form.

        Args:
            batch: rows of a decode step.
            prefill_rows: rows of the prefill's products; the head sees ``batch`` of them.
            steps: decode steps to take the time of.
        """
        decode = self._inputs(batch)
        start_s = time.perf_counter()
        for _ in range(steps):
            self._step(functional.linear, decode, decode)
        step_s = (time.perf_counter() - start_s) / steps
        prefill = self._inputs(prefill_rows)
        start_s = time.perf_counter()
        self._step(functional.linear, prefill, decode)
        prefill_s = time.perf_counter() - start_s
        return {
            "step_s": step_s,
            "prefill_s": prefill_s,
            "form_step_s": self._forms(decode, max(2, steps // 4)),
        }

    def _forms(self, inputs: dict[int, torch.Tensor], steps: int) -> dict[str, float]:
        found = {}
        for name, product in FORMS.items():
            try:
                self._step(product, inputs, inputs)
                start_s = time.perf_counter()
                for _ in range(steps):
                    self._step(product, inputs, inputs)
                found[name] = (time.perf_counter() - start_s) / steps
            except (RuntimeError, AttributeError, NotImplementedError):
                continue  # this build, dtype or number of rows has no such form
        return found

    def _step(
        self, product: Product, inputs: dict[int, torch.Tensor], head: dict[int, torch.Tensor]
    ) -> None:
        with torch.inference_mode():
            for weight in self.layers:
                product(inputs[weight.shape[1]], weight)
            product(head[self.head.shape[1]], self.head)

    def _inputs(self, rows: int) -> dict[int, torch.Tensor]:
        widths = {weight.shape[1] for weight in [*self.layers, self.head]}
        return {width: torch.randn(rows, width).to(self.dtype) for width in widths}


def _padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row as two: some libraries are faster at a product than at a product with a vector."""
    if x.shape[0] > 1:
        raise NotImplementedError
    return torch.mm(weight, x.expand(2, -1).t())


def _vector(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1:
        raise NotImplementedError
    return torch.mv(weight, x[0])


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


FORMS: dict[str, Product] = {
    "linear": functional.linear,
    "weight @ x.T": lambda x, weight: torch.mm(weight, x.t()),
    "onednn": _onednn,
    "weight @ two rows": _padded,
    "weight @ vector": _vector,
}


def start(options: argparse.Namespace) -> worker_common.Started:
    """Make the weights."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = json.loads((Path(options.model) / "config.json").read_text())
    bound = Bound(config, getattr(torch, options.dtype))
    return worker_common.facts({"shapes": shapes_of(config)}), {"gemm": bound.gemm}


if __name__ == "__main__":
    worker_common.main(__doc__, start)
