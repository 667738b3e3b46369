"""The bytes of tokens, with those of parts of characters, add up to the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gridsieve.services.generation.answers.messages import delta_message
from gridsieve.services.generation.answers.text import Said
from gridsieve.services.generation.request.request import Delta

TEXT = "日本 <é> 👩‍👩‍👧 \ufffd a"


def byte_level() -> Tokenizer:
    """A token for each byte, and one for a blank with the first byte of an emoji."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    emoji = "\u0120\u00f0"
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate([*letters, emoji])}, [tuple(emoji)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A token for each byte that has no character of its own."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "本", "é", "a", ">", " "]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_add_up_to_the_text(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = tuple(tokenizer.encode(TEXT).ids)
    logprobs = (-1.0,) * len(ids)
    delta = delta_message(Said(0, Delta(tokenizer.decode(ids), ids, logprobs)), tokenizer)
    assert delta.text == TEXT
    parts = [delta.token_bytes.get(token_id, delta.token_texts[token_id].encode()) for token_id in ids]
    assert b"".join(parts) == TEXT.encode()
    assert set(delta.token_bytes) == {token_id for token_id in ids if "\ufffd" in delta.token_texts[token_id]} != set()
