"""A checkpoint's tokenizer without its control tokens: whatever a text spells, it becomes ordinary and added tokens.

Large texts take turns, because tokenising takes some 300 times the text's size, more than 1 GiB for 4 MiB.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.process import give_back_freed_memory

LARGE_TEXT_CHARS = 2**16
# How often a text that waits for its turn checks whether its request was cancelled.
_CHECK_S = 0.1


class PlainText:
    """Tokenises plain text.

    path: of the tokenizer. prefix: the ids that it puts before each text, such as Llama's beginning of a sequence; its
    processor in transformers adds it to a prompt that does not begin with it. suffix: those that it puts after a text,
    such as an embedder's end of text; they end a prompt, as in transformers.
    Raises StartupError if the checkpoint has no tokenizer, or one whose control tokens plain text can spell.
    """

    def __init__(self, checkpoint: Checkpoint, control: Mapping[str, int]) -> None:
        """control: the ids of the control tokens."""
        self.path = checkpoint.folder / "tokenizer.json"
        contents = checkpoint.read_json(self.path.name)
        if not contents:
            raise StartupError(f"{self.path} does not exist")
        added = [token | {"special": token["content"] in control} for token in contents.get("added_tokens", [])]
        for token in added:
            if token["special"] and any(token.get(name) for name in ("lstrip", "rstrip", "single_word")):
                what = f"the control token {token['content']!r} strips or needs whole words"
                raise StartupError(f"{self.path}: {what}: not supported")
        plain = {**contents.written, "added_tokens": added, "post_processor": None}
        self._first = _without_special(plain)
        self._later = _without_special(plain | {"pre_tokenizer": _of_later_text(plain["pre_tokenizer"])})
        self._large = threading.Lock()
        spellable = [token for token, token_id in control.items() if token_id in _encoded(token, self._later)]
        if spellable:
            raise StartupError(f"{self.path}: ordinary text can spell the control tokens {', '.join(spellable)}")
        self.prefix, self.suffix = _around(Tokenizer.from_file(str(self.path)))

    def ids(self, text: str, *, first: bool, check_cancelled: Callable[[], None]) -> list[int]:
        """The ids of a text. first: nothing comes before it.

        check_cancelled: called before it is tokenised and while it waits for its turn; its exception ends the call.
        """
        if not text:
            return []
        check_cancelled()
        tokenizer = self._first if first else self._later
        if len(text) <= LARGE_TEXT_CHARS:
            return _encoded(text, tokenizer)
        with self._turn(check_cancelled):
            ids = _encoded(text, tokenizer)
            give_back_freed_memory()
            return ids

    @contextmanager
    def _turn(self, check_cancelled: Callable[[], None]) -> Iterator[None]:
        while not self._large.acquire(timeout=_CHECK_S):
            check_cancelled()
        try:
            yield
        finally:
            self._large.release()


def _without_special(contents: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer that finds no special tokens in a text."""
    tokenizer = Tokenizer.from_str(json.dumps(contents))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    # Not `encode`: it holds the interpreter lock, for seconds with a large text.
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded.ids
    return ids


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after a text."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    own = [place for place, added in enumerate(encoded.special_tokens_mask) if not added]
    return encoded.ids[: own[0]], encoded.ids[own[-1] + 1 :]


def _of_later_text(pre_tokenizer: Any) -> Any:
    """A pre-tokenizer for text after a control token: some mark the beginning of the first text alone."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    if pre_tokenizer.get("type") == "Sequence":
        return pre_tokenizer | {"pretokenizers": [_of_later_text(each) for each in pre_tokenizer["pretokenizers"]]}
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first":
        return pre_tokenizer | {"prepend_scheme": "never"}
    return pre_tokenizer
