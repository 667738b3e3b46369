"""The sampling fields of a request: their limits, and how they are resolved against the checkpoint's defaults."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.sampling.banned import Spelling
from gridsieve.services.generation.sampling.defaults import SamplingDefaults
from gridsieve.services.generation.sampling.moments import MomentsFormat, has_times
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.generation.sampling.structured import MAX_SCHEMA_CHARACTERS, Grammar
from gridsieve.services.generation.sampling.tool_calls import ToolUse

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_TEMPERATURE = 100
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_REPETITION_PENALTY = 100
MAX_PENALTY = 2
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_ANSWERS = 16
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
SEEDS = 2**63
# Fields of a request that are the checkpoint's own where they are unset.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling fields as the caller sent them; None selects the checkpoint's default.

    Raises InvalidRequest with field, limit and value for a value out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    json_schema: str | None = None
    moments: MomentsFormat | None = None
    max_thinking_tokens: int | None = None
    tool_use: ToolUse | None = None
    attention: bool = False

    def __post_init__(self) -> None:
        self._check("max_new_tokens", "at least 1", lambda value: value >= 1)
        self._check("temperature", f"between 0 and {MAX_TEMPERATURE}", lambda value: 0 <= value <= MAX_TEMPERATURE)
        self._check("top_p", "above 0 and at most 1", lambda value: 0 < value <= 1)
        self._check("top_k", "at least 0", lambda value: value >= 0)
        self._check("min_p", "between 0 and 1", lambda value: 0 <= value <= 1)
        limit = f"above 0 and at most {MAX_REPETITION_PENALTY}"
        self._check("repetition_penalty", limit, lambda value: 0 < value <= MAX_REPETITION_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, f"between -{MAX_PENALTY} and {MAX_PENALTY}", lambda value: abs(value) <= MAX_PENALTY)
        self._check("seed", "at least 0", lambda value: value >= 0)
        limit = f"between 0 and {MAX_TOP_LOGPROBS}"
        self._check("top_logprobs", limit, lambda value: 0 <= value <= MAX_TOP_LOGPROBS)
        self._check("top_logprobs", "0 without logprobs", lambda value: self.logprobs or value == 0)
        self._check("min_new_tokens", "at least 0", lambda value: value >= 0)
        self._check("max_thinking_tokens", "at least 0", lambda value: value >= 0)
        if self.max_thinking_tokens is not None:
            _check("ignore_eos", "true", "false where thinking has a limit", not self.ignore_eos)
        self._check("n", f"between 1 and {MAX_ANSWERS}", lambda value: 1 <= value <= MAX_ANSWERS)
        if self.json_schema is not None:
            size, limit = len(self.json_schema), f"at most {MAX_SCHEMA_CHARACTERS} characters"
            _check("json_schema", f"{size} characters", limit, size <= MAX_SCHEMA_CHARACTERS)
        if self.json_schema is not None or self.moments:
            _check("ignore_eos", "true", "false where a document must end", not self.ignore_eos)
        if self.is_constrained:
            self._check("min_new_tokens", "0 where a document ends by itself", lambda value: value == 0)
        if self.tool_use and self.tool_use.required:
            _check("ignore_eos", "true", "false where tools must be called", not self.ignore_eos)
            _check("json_schema", "a schema", "unset where tools must be called", self.json_schema is None)
            _check("moments", "set", "unset where tools must be called", self.moments is None)
        check_counts(len(self.stop), len(self.stop_token_ids), len(self.logit_bias), len(self.bad_words))
        for name, strings, most in (
            ("stop", self.stop, MAX_STOP_CHARACTERS),
            ("bad_words", self.bad_words, MAX_BAD_WORD_CHARACTERS),
        ):
            for index, text in enumerate(strings):
                limit, size = f"1 to {most} characters", len(text)
                _check(f"{name}[{index}]", f"{size} characters", limit, 1 <= size <= most)
        for token_id, bias in self.logit_bias.items():
            _check(f"logit_bias[{token_id}]", bias, f"between -{MAX_BIAS} and {MAX_BIAS}", abs(bias) <= MAX_BIAS)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar holds the answer."""
        is_document = self.json_schema is not None or self.moments is not None
        return is_document or (self.tool_use is not None and self.tool_use.is_constrained)

    @property
    def needs_times(self) -> bool:
        """Whether the grammar depends on the videos of the prompt."""
        return self.moments is not None or (self.json_schema is not None and has_times(self.json_schema))

    def resolve(
        self,
        defaults: SamplingDefaults,
        limit_tokens: int,
        grammar: Grammar | None = None,
        bad_words: Sequence[Spelling] = (),
    ) -> tuple[SamplingParams, ...]:
        """The parameters of each of the `n` answers; answer i has seed + i.

        limit_tokens: the longest possible answer, at least 1. grammar: if `is_constrained`. bad_words: the spellings of
        `bad_words`. End tokens are not forbidden by them.
        Raises InvalidRequest for a token outside the vocabulary, and for a least length above the greatest.
        """
        limit = f"at least 0 and below {defaults.vocab_size}"
        for index, token_id in enumerate(self.stop_token_ids):
            _check(f"stop_token_ids[{index}]", token_id, limit, 0 <= token_id < defaults.vocab_size)
        for token_id in self.logit_bias:
            _check("logit_bias", token_id, f"of tokens {limit}", 0 <= token_id < defaults.vocab_size)
        eos_ids = (*(() if self.ignore_eos else defaults.eos_ids), *self.stop_token_ids)
        unset = min(DEFAULT_MAX_NEW_TOKENS, defaults.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, limit_tokens)
        max_new_tokens = unset if self.max_new_tokens is None else self.max_new_tokens
        if (least := self.min_new_tokens) > max_new_tokens:
            field, limit = "sampling.min_new_tokens", f"at most {max_new_tokens}"
            raise InvalidRequest(field=field, limit=limit, value=least, remedy="raise `sampling.max_new_tokens`")
        wanted = {name: getattr(defaults if getattr(self, name) is None else self, name) for name in _DEFAULTED}
        first = SamplingParams(
            **wanted,
            max_new_tokens=max_new_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            stop=self.stop,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            eos_ids=eos_ids,
            grammar=grammar,
            min_new_tokens=self.min_new_tokens,
            attention=self.attention,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=tuple(word for word in bad_words if max(word) < defaults.vocab_size and word[-1] not in eos_ids),
        )
        return tuple(replace(first, seed=(first.seed + index) % SEEDS) for index in range(self.n))

    def _check(self, name: str, limit: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        _check(name, value, limit, value is None or fits(value))


def check_counts(strings: int, tokens: int, biased: int, words: int) -> None:
    """Raises InvalidRequest if there are too many stop strings, stop tokens, biased tokens or bad words."""
    _check("stop", f"{strings} strings", f"at most {MAX_STOPS} strings", strings <= MAX_STOPS)
    _check("stop_token_ids", f"{tokens} tokens", f"at most {MAX_STOP_TOKENS} tokens", tokens <= MAX_STOP_TOKENS)
    _check("logit_bias", f"{biased} tokens", f"of at most {MAX_BIASED_TOKENS} tokens", biased <= MAX_BIASED_TOKENS)
    _check("bad_words", f"{words} strings", f"at most {MAX_BAD_WORDS} strings", words <= MAX_BAD_WORDS)


def _check(name: str, value: object, limit: str, fits: bool) -> None:
    if not fits:
        raise InvalidRequest(f"must be {limit}, got {value}", field=f"sampling.{name}", value=value, limit=limit)
