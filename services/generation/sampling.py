"""What a request says about choosing tokens, and what becomes of it beside the checkpoint's defaults."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from common.errors import InvalidRequest
from services.generation.generation_config import SamplingDefaults
from services.generation.sampler import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_TEMPERATURE = 100
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_ANSWERS = 16
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """What a caller asks for; None is the checkpoint's own.

    Raises InvalidRequest, with field, value and limit, for a value outside its range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        _check(
            "max_new_tokens", self.max_new_tokens, "at least 1", self.max_new_tokens is None or self.max_new_tokens >= 1
        )
        _check(
            "temperature",
            self.temperature,
            f"between 0 and {MAX_TEMPERATURE}",
            self.temperature is None or 0 <= self.temperature <= MAX_TEMPERATURE,
        )
        _check("top_p", self.top_p, "above 0 and at most 1", self.top_p is None or 0 < self.top_p <= 1)
        _check("top_k", self.top_k, "at least 0", self.top_k is None or self.top_k >= 0)
        _check("seed", self.seed, "at least 0", self.seed is None or self.seed >= 0)
        _check("n", self.n, f"between 1 and {MAX_ANSWERS}", 1 <= self.n <= MAX_ANSWERS)
        _check("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings", len(self.stop) <= MAX_STOPS)
        for index, stop in enumerate(self.stop):
            limit = f"1 to {MAX_STOP_CHARACTERS} characters"
            _check(f"stop[{index}]", f"{len(stop)} characters", limit, 1 <= len(stop) <= MAX_STOP_CHARACTERS)

    def resolve(self, defaults: SamplingDefaults, room_tokens: int) -> tuple[SamplingParams, ...]:
        """What each of this request's answers gets; answer i draws by seed + i.

        room_tokens: at least 1, how long an answer may become at most.
        """
        unset = min(DEFAULT_MAX_NEW_TOKENS, defaults.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, room_tokens)
        first = SamplingParams(
            max_new_tokens=unset if self.max_new_tokens is None else self.max_new_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=self.stop,
            logprobs=self.logprobs,
            eos_ids=defaults.eos_ids,
        )
        return tuple(replace(first, seed=(first.seed + index) % SEEDS) for index in range(self.n))


def _check(field: str, value: object, limit: str, fits: bool) -> None:
    if not fits:
        raise InvalidRequest(f"sampling.{field} must be {limit}, got {value}")
