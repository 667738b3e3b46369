"""The streamed text is the tokenizer's own decoding, cut at the stop string that is complete first, at any split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from common.contract.errors import StartupError
from services.generation.sampling.detokenizer import WINDOW_TOKENS, Detokenizer, load_tokenizer

WORDS = ("😀", "👩‍👩‍👧", "é", "日本", "a", "b", " ", "\n", "\ufffd", "stop", "👍🏽")


def byte_letters() -> list[str]:
    """The letter that the byte-level alphabet has for each byte: GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (value for value in range(256) if value not in printable)
    letters = {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}
    return [letters[value] for value in range(256)]


class Splits:
    """A tokenizer whose tokens are given byte strings, decoded as a byte-level decoder does; b"" is special."""

    def __init__(self, tokens: list[bytes]) -> None:
        letters = byte_letters()
        words = sorted({"".join(letters[byte] for byte in token) for token in tokens if token})
        self._tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0} | {word: 1 + i for i, word in enumerate(words)}))
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["<|end|>"])
        ids = {word: 1 + i for i, word in enumerate(words)}
        self.ids = [ids["".join(letters[byte] for byte in token)] if token else 0 for token in tokens]
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


def streamed(tokenizer: Splits, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, stop)
    texts = []
    for token in tokenizer.ids:
        text, stopped = detokenizer.add(token)
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
stops = st.lists(st.sampled_from(("stop", "to", "p", "ab", "aab", "b a", "😀", "é日", "\n\n")), max_size=3).map(tuple)


@given(text=texts, lengths=splits, stop=stops)
def test_any_text_comes_out_whole_and_in_order_up_to_the_first_stop_string(
    text: str, lengths: list[int], stop: tuple[str, ...]
) -> None:
    tokenizer = Splits(split(text.encode(), lengths))
    pieces, stopped = streamed(tokenizer, stop)
    assert ("".join(pieces), stopped) == cut(text, stop)


@given(data=st.binary(max_size=60), lengths=splits)
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them(data: bytes, lengths: list[int]) -> None:
    tokenizer = Splits(split(data, lengths))
    pieces, _ = streamed(tokenizer)
    assert "".join(pieces) == tokenizer.decode(tokenizer.ids)


@given(text=texts, lengths=splits)
def test_no_piece_holds_a_part_of_a_character(text: str, lengths: list[int]) -> None:
    pieces, _ = streamed(Splits(split(text.encode(), lengths)))
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def test_an_emoji_of_four_tokens_appears_with_its_last() -> None:
    pieces, _ = streamed(Splits([bytes([byte]) for byte in "😀".encode()]))
    assert pieces == ["", "", "", "😀", ""]


def test_text_that_may_begin_a_stop_string_is_held_until_it_cannot() -> None:
    tokenizer = Splits([b"x", b"s", b"t", b"a", b"s", b"t", b"o", b"p", b"y"])
    assert streamed(tokenizer, ("stop",)) == (["x", "", "", "sta", "", "", "", ""], True)


def test_the_stop_string_that_is_complete_first_ends_the_answer_and_the_longest_of_those() -> None:
    for tokens in ([b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"cd"]):
        pieces, stopped = streamed(Splits(tokens), ("abcd", "bc"))
        assert ("".join(pieces), stopped) == ("a", True)
        pieces, stopped = streamed(Splits(tokens), ("c", "abc"))
        assert ("".join(pieces), stopped) == ("", True)


def test_what_was_held_comes_out_when_the_answer_ends() -> None:
    assert streamed(Splits([b"x", b"sto"]), ("stop",)) == (["x", "", "sto"], False)


def test_special_tokens_are_not_shown() -> None:
    assert streamed(Splits([b"a", b"", b"b", b""])) == (["a", "", "b", "", ""], False)


def test_a_token_of_a_long_answer_costs_as_much_as_one_of_a_short_answer() -> None:
    tokenizer = Splits([b"\x80\xf0\x9f\x98"] * 2000)  # every token ends within a character
    pieces, _ = streamed(tokenizer)
    assert tokenizer.decoded_tokens < 2000 * 3 * WINDOW_TOKENS
    assert "".join(pieces) == tokenizer.decode(tokenizer.ids)


def test_the_checkpoints_tokenizer_is_read(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    assert isinstance(tokenizer, Tokenizer)
    detokenizer = Detokenizer(tokenizer)
    text = "What moves? 動くもの 😀"
    parts = [detokenizer.add(token)[0] for token in tokenizer.encode(text).ids]
    assert "".join(parts) + detokenizer.flush() == text


def test_a_folder_without_a_tokenizer_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
