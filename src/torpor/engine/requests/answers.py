"""What a request answers: its output, so far, since the last time, or at the end."""

from __future__ import annotations

from torpor.engine.requests.request import Request, Sequence
from torpor.outputs import CompletionOutput, RequestMetrics, RequestOutput
from torpor.params import RequestOutputKind


def answer(request: Request) -> RequestOutput:
    """Everything there is of a request by now."""
    return _output(request, [sequence.completion.output() for sequence in request.sequences])


class Teller:
    """Tells a request's outputs in the kind that its parameters ask for."""

    def __init__(self, request: Request) -> None:
        """Nothing was told yet."""
        self._request = request
        self._num_told = [0] * len(request.sequences)
        self._end_told = [False] * len(request.sequences)

    def tell(self) -> RequestOutput | None:
        """The next output; None when there is nothing to tell."""
        request = self._request
        kind = request.params.output_kind
        if kind is RequestOutputKind.DELTA:
            return self._delta()
        if kind is RequestOutputKind.FINAL_ONLY and not request.finished:
            return None
        return answer(request)

    def _delta(self) -> RequestOutput | None:
        outputs = [
            output
            for index, sequence in enumerate(self._request.sequences)
            if (output := self._new_of(index, sequence)) is not None
        ]
        return _output(self._request, outputs) if outputs or self._request.finished else None

    def _new_of(self, index: int, sequence: Sequence) -> CompletionOutput | None:
        completion = sequence.completion
        told, count = self._num_told[index], len(completion.token_ids)
        text = completion.take_text()
        if told == count and not text and completion.finished == self._end_told[index]:
            return None
        self._num_told[index], self._end_told[index] = count, completion.finished
        return completion.output(since=told, text=text)


def _output(request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt.text,
        prompt_token_ids=request.prompt.token_ids,
        prompt_logprobs=request.prompt_logprobs.output() if request.prompt_logprobs else None,
        outputs=tuple(outputs),
        finished=request.finished,
        error=request.error,
        # Of the first completion: the others find its prompt in the cache, which tells nothing.
        num_cached_tokens=request.sequences[0].num_cached_tokens,
        metrics=RequestMetrics(
            arrival_s=request.arrival_s,
            first_token_s=request.first_token_s,
            finished_s=request.finished_s,
            num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
        ),
        weights_epoch=request.weights_epoch,
        weights_version=request.weights_version,
    )
