"""Forbids the next token of an answer: end tokens before its minimum length, and tokens that complete a bad word.

    bad word:   [a  b  c]
    answer:   … [a  b]  ?          c is forbidden

A word is spelt in two ways: at the beginning of a text, and after a blank. Spellings are matched in the answer alone.
Which words are meant, and how they are matched, follows vLLM's `bad_words` and transformers'
`NoBadWordsLogitsProcessor`; the least length follows transformers' `MinNewTokensLengthLogitsProcessor`. This module
knows neither requests nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from gridsieve.services.generation.sampling.bias import FORBIDDEN_BIAS, Bias
from gridsieve.services.generation.sampling.detokenizer import Tokenizer

Spelling: TypeAlias = tuple[int, ...]


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Spelling, ...]:
    """The token ids of each word, at the beginning of a text and after a blank. Blanks before a word are ignored."""
    bare = [word.lstrip(" ") or word for word in words]
    texts = list(chain.from_iterable((word, f" {word}") for word in bare))
    encoded = [tuple(each.ids) for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return tuple(dict.fromkeys(filter(None, encoded)))


class Banned:
    """The tokens that one answer must not have next."""

    def __init__(
        self, always: Sequence[int], words: Sequence[Spelling], end_ids: Sequence[int], min_tokens: int
    ) -> None:
        """always: tokens that it never has. end_ids: tokens that it does not have before it has `min_tokens` tokens."""
        self._always = [*always, *(word[0] for word in words if len(word) == 1)]
        self._words = [word for word in words if len(word) > 1]
        self._end_ids, self._min_tokens = end_ids, min_tokens
        self._num_recent = max(map(len, self._words), default=1) - 1
        self._recent: list[int] = []  # the answer's last tokens, as many as the longest word needs
        self._num_tokens = 0

    def accept_token(self, token_id: int) -> None:
        """Takes a token of the answer."""
        self._num_tokens += 1
        self._recent = [*self._recent, token_id][-self._num_recent :] if self._num_recent else []

    def bias(self) -> Bias:
        """The bias that forbids them."""
        token_ids = list(self._always)
        if self._num_tokens < self._min_tokens:
            token_ids += self._end_ids
        for *known, last in self._words:
            if self._recent[-len(known) :] == known:
                token_ids.append(last)
        return Bias.of(token_ids, [FORBIDDEN_BIAS] * len(token_ids))
