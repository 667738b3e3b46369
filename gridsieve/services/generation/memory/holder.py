"""What memory knows of the sequences that it holds rows of."""

from __future__ import annotations

from typing import Protocol

from gridsieve.services.generation.memory.holding import Holding


class Rows(Protocol):
    """Tokens in order, each with everything that its keys and values depend on besides the tokens before it."""

    @property
    def tokens(self) -> int: ...

    def content(self, first: int, end: int) -> bytes:
        """Equal for equal tokens [first, end)."""


class Holder(Rows, Protocol):
    """A request: a prompt, then its answer so far."""

    holding: Holding
    output_ids: list[int]
    prefill_announced: bool

    @property
    def prompt(self) -> Rows: ...

    @property
    def max_tokens(self) -> int:
        """The most tokens it can have in the KV cache."""

    @property
    def ready_tokens(self) -> int:
        """How many of its tokens are known."""

    @property
    def reusable_tokens(self) -> int:
        """How many of them may be found in the cache and not computed: not all."""

    def encoded_media_within(self, first: int, end: int) -> tuple[object, ...]:
        """Objects that must stay alive as long as tokens [first, end) are cached."""
