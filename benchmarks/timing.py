"""Timings of a question, and their medians over repetitions; the times of the tokens that transformers generates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True, slots=True)
class Timed:
    """One question: seconds from the call to the first token and to the end, and the number of generated tokens."""

    first_token_s: float
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over repetitions of the same question, in seconds."""

    first_token_s: float
    total_s: float

    @classmethod
    def of(cls, timed: Sequence[Timed]) -> Summary:
        return cls(
            statistics.median(each.first_token_s for each in timed), statistics.median(each.total_s for each in timed)
        )


class Clock(BaseStreamer):
    """Records the time of each token; `generate` first passes the prompt, which is skipped."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
