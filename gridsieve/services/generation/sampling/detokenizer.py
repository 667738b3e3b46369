"""Turns tokens into text while they are generated: whole characters only, and no part of a stop string.

    tokens:  … dropped … | window: the last few tokens, decoded again with each new one |
    text:    … returned … | held: decoded, but may be the start of a stop string | unfinished bytes |

The cost of a token does not grow with the answer, and several that are added together are decoded once.
`tokenizers.decoders.DecodeStream` gives the same text at whole characters, but it cannot flush, and it keeps and
decodes again all tokens since the last whole character: quadratic for answers of broken bytes or special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from gridsieve.common.contract.errors import StartupError

# Decoders show it for bytes that are not, or not yet, a character; at most 3 bytes can be the start of one.
REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3

# Enough context to decode the end of the text exactly: a character has at most 4 bytes, hence at most 4 tokens.
WINDOW_TOKENS = 8


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def encode_batch(self, input: Sequence[str], *, add_special_tokens: bool = True) -> Sequence[Any]: ...
    def id_to_token(self, id: int) -> str | None: ...


def load_tokenizer(folder: Path, shown: Collection[str] = ()) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises StartupError if tokenizer.json is missing or invalid.

    shown: tokens that are decoded as text, although the tokenizer may call them special.
    """
    path = folder / "tokenizer.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        for token in told.get("added_tokens", []):
            token["special"] = token["special"] and token["content"] not in shown
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(told))
    except Exception as error:  # the library raises bare Exceptions, for a missing file as for a bad one
        raise StartupError(f"{path} is not a tokenizer: {error}") from error
    return tokenizer


class Detokenizer:
    """The text of one answer.

    Concatenated, the returned texts are the tokenizer's decoding of all tokens without special tokens, up to the stop
    string that is complete first (the longest of several that end together), for any split of the text into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        """stop: no empty strings. Those that are complete before there are `min_tokens` tokens are text."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._spared_tokens = min_tokens  # so many more tokens until the answer may end
        self._window: list[int] = []
        self._decoded = 0  # characters of the window's text that were released or held
        self._held = ""

    def decode(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Returns the text that tokens complete, possibly empty, and whether a stop string ended the answer.

        token_ids: one token at a time where there are stop strings, so that the answer ends with the right one.
        """
        self._window.extend(token_ids)
        self._spared_tokens -= len(token_ids)
        text = self._tokenizer.decode(self._window)
        settled = len(text) - _unfinished(text)
        fresh = text[self._decoded : settled]
        self._decoded = settled
        if len(self._window) >= 2 * WINDOW_TOKENS:
            self._shorten_window(text)
        return self._release(fresh)

    def flush(self) -> str:
        """Returns the held text when no token follows; unfinished bytes become replacement characters."""
        fresh = self._tokenizer.decode(self._window)[self._decoded :]
        text, stopped = self._release(fresh)
        rest = "" if stopped else self._held
        self._window, self._decoded, self._held = [], 0, ""
        return text + rest

    def _shorten_window(self, text: str) -> None:
        """Drops older tokens. The window's first character may now decode as broken, but was released before."""
        pending = len(text) - self._decoded
        kept = self._window[-WINDOW_TOKENS:]
        if len(self._tokenizer.decode(kept)) < pending:  # special tokens, without text, follow part of a character
            kept = [each for each in self._window if self._tokenizer.decode([each])][-WINDOW_TOKENS:]
        self._window, self._decoded = kept, len(self._tokenizer.decode(kept)) - pending

    def _release(self, fresh: str) -> tuple[str, bool]:
        """Returns the part of held and fresh text that no stop string can begin in, and whether one is complete."""
        text, held = self._held + fresh, len(self._held)
        # What was complete in the held text did not end the answer.
        starts = [(text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stop]
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if found and self._spared_tokens <= 0:
            self._held = ""
            return text[: min(found)[1]], True
        shown = len(text) - self._stop_start(text)
        self._held = text[shown:]
        return text[:shown], False

    def _stop_start(self, text: str) -> int:
        """How many characters at the end of the text may be the start of a stop string."""
        lengths = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)


def _unfinished(text: str) -> int:
    """How many characters at the end of the text may change with the next token."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
