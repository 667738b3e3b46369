"""What `make bench-peers` measures of a contender at one load, and of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.peers.limits import Limits


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over rounds of one contender at one load. peak_bytes: of all its processes, since they started."""

    contender: str
    dtype: str
    rate: float
    clients: int
    first_token_s: float
    between_tokens_s: float
    tokens_per_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything of one dtype and rate. prompt_tokens: by pruning method."""

    dtype: str
    rate: float
    prompt_tokens: Mapping[str, int]
    limits: Limits
    figures: tuple[Figures, ...]
