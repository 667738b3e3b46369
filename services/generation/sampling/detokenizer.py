"""Tokens to text as they are generated: whole characters only, and nothing of a stop string.

    tokens:  … shown, forgotten … | window: the last few, decoded again with each new token |
    text:    … shown … | held: decoded, but may be the start of a stop string | unfinished bytes |

The cost of a token does not grow with the answer. It knows no model; a tokenizer is whatever decodes ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from common.contract.errors import StartupError

# What decoders show for bytes that are no character, or none yet; at most 3 bytes can be the start of one.
REPLACEMENT = "\ufffd"
MAX_UNFINISHED = 3

# Enough to decode the end of the text as the whole would: a character has at most 4 bytes, so at most 4 tokens.
WINDOW_TOKENS = 8


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `tokenizers.Tokenizer` has it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises StartupError if it has none that can be read."""
    path = folder / "tokenizer.json"
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions, for a missing file as for a bad one
        raise StartupError(f"{path} is no tokenizer: {error}") from error
    return tokenizer


class Detokeniser:
    """The text of one answer.

    What it returns is, put together, the tokenizer's own decoding of all tokens without special ones, up to the stop
    string that is complete first (of several that end together, the longest), however the text falls into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        """stop: none of them empty."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []
        self._decoded = 0  # characters of the window's text that were handed on
        self._held = ""

    def add(self, token_id: int) -> tuple[str, bool]:
        """The text that a token adds, perhaps none yet, and whether a stop string ended the answer."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = len(text) - _unfinished(text)
        fresh = text[self._decoded : settled]
        self._decoded = settled
        if len(self._window) == 2 * WINDOW_TOKENS:
            self._forget(text)
        return self._release(fresh)

    def flush(self) -> str:
        """What was held back, once no token follows; unfinished bytes are shown as the replacement character."""
        fresh = self._tokenizer.decode(self._window)[self._decoded :]
        text, stopped = self._release(fresh)
        rest = "" if stopped else self._held
        self._window, self._decoded, self._held = [], 0, ""
        return text + rest

    def _forget(self, text: str) -> None:
        """Drops the window's older half. Its first character may now decode as broken, but it was handed on."""
        pending = len(text) - self._decoded
        self._window = self._window[WINDOW_TOKENS:]
        self._decoded = len(self._tokenizer.decode(self._window)) - pending

    def _release(self, fresh: str) -> tuple[str, bool]:
        """What may be shown of the held and the fresh text, and whether a stop string is complete."""
        text = self._held + fresh
        starts = [(text.find(stop), stop) for stop in self._stop]
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        shown = len(text) - self._stop_start(text)
        self._held = text[shown:]
        return text[:shown], False

    def _stop_start(self, text: str) -> int:
        """How many characters at the text's end may be the start of a stop string."""
        lengths = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)


def _unfinished(text: str) -> int:
    """How many characters at the text's end the next token may turn into others."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_UNFINISHED)
