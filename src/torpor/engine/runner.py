"""Runs the model: prefill and decode for the one sequence that the KV cache holds.

Shape letters: T new tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torpor.errors import StateError

if TYPE_CHECKING:
    from torpor.engine.kv import KVCache
    from torpor.model.llama import LlamaForCausalLM
    from torpor.sleep.sleeper import Sleeper


@dataclass(frozen=True, slots=True)
class Mark:
    """Names the content of the KV cache: equal marks, same sequence and same weights."""

    num_prefills: int
    weights_epoch: int
    weights_version: str | None
    kv_epoch: int


class ModelRunner:
    """One model and its KV cache. Not thread-safe: the caller holds a lock around each step."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv: KVCache,
        *,
        sleeper: Sleeper,
        ready: Callable[[], None],
    ) -> None:
        """Put a model and its cache together.

        Args:
            model: its parameters may still be without content.
            kv: on the model's device.
            sleeper: owns the memory of both; asked for epochs.
            ready: called before every step; raises unless the step may run.
        """
        self._model = model
        self._kv = kv
        self._sleeper = sleeper
        self._ready = ready
        self._num_prefills = 0

    def prefill(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Mark]:
        """Forget what the cache holds and compute a whole prompt.

        Returns:
            Logits [V] of the position after the last token, and what the cache holds now.

        Raises:
            AsleepError, WeightsIncompleteError: the step may not run; the cache is unchanged.
        """
        self._ready()
        self._num_prefills += 1
        self._kv.reset()
        return self._step(token_ids), self._mark()

    def decode(self, token_id: int, mark: Mark) -> torch.Tensor:
        """Compute one more token of the sequence that ``prefill`` marked; logits [V].

        Raises:
            StateError: the cache holds something else by now.
            AsleepError, WeightsIncompleteError: the step may not run.
        """
        self._require(mark)
        return self._step([token_id])

    def rewind(self, length: int, mark: Mark) -> None:
        """Go back to the first ``length`` positions of a marked sequence; errors as ``decode``."""
        self._require(mark)
        self._kv.rewind(length)

    def _mark(self) -> Mark:
        return Mark(
            num_prefills=self._num_prefills,
            weights_epoch=self._sleeper.weights_epoch,
            weights_version=self._sleeper.weights_version,
            kv_epoch=self._sleeper.kv_epoch,
        )

    def _require(self, mark: Mark) -> None:
        self._ready()
        now = self._mark()
        if now == mark:
            return
        if now.num_prefills != mark.num_prefills:
            cause = "another request used the KV cache"
        elif now.kv_epoch != mark.kv_epoch:
            cause = "the model slept"
        else:
            cause = "the weights were updated"
        raise StateError(
            f"{cause} while this request was being streamed; finish or close a stream before other "
            "calls, and start this one again"
        )

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        start = self._kv.length
        device = self._kv.device
        # Only around the step: memory that sleep manages must not be adopted in this mode.
        with torch.inference_mode():
            input_ids_T = torch.tensor(token_ids, dtype=torch.int64, device=device)
            positions_T = torch.arange(start, start + len(token_ids), device=device)
            hidden_TD = self._model(input_ids_T, positions_T, self._kv)
            logits_1V: torch.Tensor = self._model.compute_logits(hidden_TD[-1:])
        # Counted only now, so a step that was interrupted leaves no half-filled position behind.
        self._kv.advance(len(token_ids))
        return logits_1V[0]
