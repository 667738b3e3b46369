"""The streamed text is the tokenizer's decoding up to the first complete stop string, for any split into tokens, whose
bytes add up to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gridsieve.common.contract.errors import StartupError
from gridsieve.services.generation.answers.messages import delta_message
from gridsieve.services.generation.answers.text import Said
from gridsieve.services.generation.request.request import Delta
from gridsieve.services.generation.sampling.detokenizer import WINDOW_TOKENS, Detokenizer, load_tokenizer

WORDS = ("😀", "👩‍👩‍👧", "é", "日本", "a", "b", " ", "\n", "\ufffd", "stop", "👍🏽")


# The letter of each byte in the byte-level alphabet of GPT-2: its own if it can be printed, else one from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [value for value in range(256) if value not in PRINTABLE]
LETTERS = {value: chr(value) for value in PRINTABLE} | {value: chr(256 + i) for i, value in enumerate(OTHERS)}


class Splits:
    """A byte-level tokenizer whose tokens are the given byte strings; b"" is a special token."""

    def __init__(self, tokens: list[bytes]) -> None:
        words = ["".join(LETTERS[byte] for byte in token) or "<|end|>" for token in tokens]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<|end|>", *words]))}
        self._tokenizer = Tokenizer(models.WordLevel(vocabulary))
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["<|end|>"])
        self.ids = [vocabulary[word] for word in words]
        self.decoded_tokens = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded_tokens += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def split(data: bytes, lengths: list[int]) -> list[bytes]:
    tokens, start = [], 0
    for length in lengths:
        tokens.append(data[start : start + length])
        start += length
    return [token for token in [*tokens, data[start:]] if token]


def streamed(tokenizer: Splits, stop: tuple[str, ...] = (), min_tokens: int = 0) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    texts = []
    for token in tokenizer.ids:
        text, stopped = detokenizer.decode([token])
        texts.append(text)
        if stopped:
            return texts, True
    texts.append(detokenizer.flush())
    return texts, False


def cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    ends = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=30).map("".join)
splits = st.lists(st.integers(1, 6), max_size=80)
stops = st.lists(st.sampled_from(("stop", "top", "p", "ab", "aab", "b a", "😀", "é日", "\n\n")), max_size=3).map(tuple)


@settings(max_examples=60)
@given(text=texts, lengths=splits, stop=stops)
def test_streamed_pieces_are_the_text_up_to_the_first_complete_stop_string(
    text: str, lengths: list[int], stop: tuple[str, ...]
) -> None:
    pieces, stopped = streamed(Splits(split(text.encode(), lengths)), stop)
    assert ("".join(pieces), stopped) == cut(text, stop)
    assert stop or "".join(pieces).count("\ufffd") == text.count("\ufffd"), "a piece ends within a character"


@settings(max_examples=60)
@given(data=st.binary(max_size=80), lengths=splits, counts=st.lists(st.integers(1, 30), max_size=40))
def test_tokens_that_are_added_together_have_the_text_of_single_ones(
    data: bytes, lengths: list[int], counts: list[int]
) -> None:
    tokenizer = Splits(split(data, lengths))
    detokenizer, left, text = Detokenizer(tokenizer), list(tokenizer.ids), ""
    for count in [*counts, 80]:
        text += detokenizer.decode(left[:count])[0]
        left = left[count:]
    assert text + detokenizer.flush() == tokenizer.decode(tokenizer.ids)


def test_text_that_may_begin_a_stop_string_is_held() -> None:
    tokenizer = Splits([b"x", b"s", b"t", b"", b"a", b"s", b"t", b"o", b"p", b"y"])
    assert streamed(tokenizer, ("stop",)) == (["x", "", "", "", "sta", "", "", "", ""], True)


@pytest.mark.parametrize(
    ("stop", "min_tokens", "pieces", "stopped"),
    [
        (("ab",), 2, ["", ""], True),
        (("ab",), 3, ["", "ab", "", ""], True),
        (("ab",), 5, ["", "ab", "", "ab", "c", ""], False),
        (("ab", "abac"), 3, ["", "", "", "ab"], True),  # the first "ab" was complete too early, and is held
    ],
)
def test_stop_strings_that_are_complete_before_the_least_length_are_text(
    stop: tuple[str, ...], min_tokens: int, pieces: list[str], stopped: bool
) -> None:
    tokenizer = Splits([b"a", b"b", b"a", b"b", b"c"])
    assert streamed(tokenizer, stop, min_tokens) == (pieces, stopped)


@pytest.mark.parametrize(
    "tokens",
    [
        [b"\x80\xf0\x9f\x98"] * 500,  # every token ends within a character
        [b"a", b"\xf0", *[b""] * 498, b"\x9f\x98\x80"],  # special tokens within a character
    ],
)
def test_the_cost_of_a_token_does_not_grow_with_the_answer(tokens: list[bytes]) -> None:
    tokenizer = Splits(tokens)
    pieces, _ = streamed(tokenizer)
    assert tokenizer.decoded_tokens < len(tokens) * 3 * WINDOW_TOKENS
    assert "".join(pieces) == tokenizer.decode(tokenizer.ids)


def test_a_folder_without_a_tokenizer_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def byte_fallback() -> Tokenizer:
    """A token for each byte that has no character of its own."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "本", "é", "a", ">", " "]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_the_bytes_of_tokens_add_up_to_the_text() -> None:
    """Of a vocabulary with a token for each byte; `test_gateway.py` has byte-level ones."""
    tokenizer, whole = byte_fallback(), "日本 <é> 👩‍👩‍👧 \ufffd a"
    ids = tuple(tokenizer.encode(whole).ids)
    logprobs = (-1.0,) * len(ids)
    delta = delta_message(Said(0, Delta(tokenizer.decode(ids), ids, logprobs)), tokenizer)
    assert delta.text == whole
    parts = [delta.token_bytes.get(token_id, delta.token_texts[token_id].encode()) for token_id in ids]
    assert b"".join(parts) == whole.encode()
    assert set(delta.token_bytes) == {token_id for token_id in ids if "\ufffd" in delta.token_texts[token_id]} != set()
