"""Runs the model for the rows of a step. Launching and collecting are two calls.

Shape letters: T new tokens of all rows, R rows that sample, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torpor.engine.sampling.logprobs import LogprobsMode, prompt_logprobs
from torpor.engine.sampling.sampler import SampledToken, SamplingRow, sample_rows
from torpor.errors import RequestError

if TYPE_CHECKING:
    from torpor.engine.requests.request import Sequence as Seq
    from torpor.engine.steps.inputs import InputBuffers
    from torpor.engine.steps.step import Row, Step
    from torpor.model.attention.interface import AttentionBackend
    from torpor.model.layers.decoder import DecoderForCausalLM


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    rows: Sequence[Row]
    """The rows that sample, in the order of ``logits_RV``."""
    logits_RV: torch.Tensor | None
    """float32; None when no row samples."""
    prompt_rows: Sequence[tuple[Row, torch.Tensor]] = field(default=())
    """Rows whose prompt's log probabilities are wanted, with the logits [*, V] of what the step has
    of the prompt."""


class ModelRunner:
    """One model over one paged cache. Not thread-safe: the engine's turn protects it."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: AttentionBackend,
        inputs: InputBuffers,
        *,
        table: Callable[[str], Sequence[int]],
        clear: Callable[[Sequence[int]], None],
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        """Put a model, its attention and its buffers together.

        Args:
            model: awake whenever a step is launched.
            attention: writes and reads the cache.
            inputs: the step's buffers.
            table: the blocks of a sequence by its id.
            clear: zeroes blocks of the cache.
            logprobs_mode: whether log probabilities are of the model's logits or of what is
                sampled from.
        """
        self._model = model
        self._attention = attention
        self._inputs = inputs
        self._table = table
        self._clear = clear
        self._logprobs_mode = logprobs_mode

    def launch(self, step: Step) -> Launched:
        """Compute the new tokens of every row; the cache holds their keys and values then.

        Args:
            step: at least one row.
        """
        if step.fresh_blocks:
            self._clear(step.fresh_blocks)
        rows = [row for row in step.rows if row.samples]
        # Only around the step: memory that sleep manages must not be adopted in this mode.
        with torch.inference_mode():
            tables = [self._table(row.sequence.seq_id) for row in step.rows]
            ids_T, positions_T, batch = self._inputs.fill(step.rows, tables)
            self._attention.begin(batch)
            prompts = _prompt_tokens(step)
            ends = _last_tokens(step)
            # Prompts whose log probabilities are wanted need all that is computed of them.
            wanted_R = None if prompts or len(ends) == len(ids_T) else _index(ends, ids_T.device)
            hidden_TD = self._model(ids_T, positions_T, self._attention, wanted_R)
            prompt_rows = [
                (row, self._model.compute_logits(hidden_TD[tokens])) for row, tokens in prompts
            ]
            if prompts and len(ends) < len(hidden_TD):
                hidden_TD = hidden_TD.index_select(0, _index(ends, ids_T.device))
            logits_RV = self._model.compute_logits(hidden_TD) if rows else None
        return Launched(rows, logits_RV, prompt_rows)

    def collect(self, launched: Launched) -> list[SampledToken | RequestError]:
        """Draw a token for each row that samples; a row whose logits are unusable gets an error.

        Log probabilities of prompts go to their requests.
        """
        with torch.inference_mode():
            for row, logits_TV in launched.prompt_rows:
                self._keep_prompt_logprobs(row, logits_TV)
            if launched.logits_RV is None:
                return []
            rows = [_sampling_row(row.sequence) for row in launched.rows]
            return sample_rows(launched.logits_RV, rows, logprobs_mode=self._logprobs_mode)

    def _keep_prompt_logprobs(self, row: Row, logits_TV: torch.Tensor) -> None:
        sink = row.sequence.request.prompt_logprobs
        assert sink is not None, "logits of a prompt that nobody asked for"
        first = row.start + 1
        targets = row.sequence.token_ids[first : first + len(logits_TV)]
        entries = prompt_logprobs(logits_TV, targets, sink.count)
        for position, tokens in enumerate(entries, start=first):
            sink.put(position, tokens)


def _last_tokens(step: Step) -> list[int]:
    """Where the last token of each row that samples is along T."""
    ends, last = [], -1
    for row in step.rows:
        last += row.num_new_tokens
        if row.samples:
            ends.append(last)
    return ends


def _prompt_tokens(step: Step) -> list[tuple[Row, slice]]:
    """Rows whose prompt's log probabilities are wanted, and their prompt's tokens along T."""
    wanted, start = [], 0
    for row in step.rows:
        sequence = row.sequence
        count = min(row.num_new_tokens, sequence.num_prompt_tokens - 1 - row.start)
        if not sequence.reads_cache and count > 0:
            wanted.append((row, slice(start, start + count)))
        start += row.num_new_tokens
    return wanted


def _index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _sampling_row(sequence: Seq) -> SamplingRow:
    completion = sequence.completion
    return SamplingRow(
        params=sequence.request.params,
        seed=sequence.seed,
        position=sequence.num_tokens,
        prompt_token_ids=sequence.request.prompt.token_ids,
        output_token_ids=completion.token_ids,
        forbidden=completion.forbidden,
        bad_words=completion.bad_words,
        grammar_mask_V=completion.grammar.mask() if completion.grammar else None,
    )
