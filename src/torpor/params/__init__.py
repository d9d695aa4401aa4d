"""What a caller may ask of one generation request: names and defaults as in vLLM."""

from __future__ import annotations

from torpor.params.sampling import RequestOutputKind, SamplingParams
from torpor.params.structured import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
