"""A request of which one row is read at the end of its prompt: prefill alone."""

from __future__ import annotations

from gridsieve.services.generation.request.request import FinishReason, Read, Request
from gridsieve.services.generation.sampling.rows import ReadRow
from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingParams

# A request ends with its first row, as another one with the only token of its answer, which is never computed.
ONE_ROW = SamplingParams(max_new_tokens=1)


class Reader(Request):
    """Its events are `PrefillStarted`, `Read` and `Finished`."""

    def append(self, sampled: SampledToken) -> tuple[Read, FinishReason]:
        assert isinstance(sampled, ReadRow)
        return Read(sampled.values), FinishReason.STOP
