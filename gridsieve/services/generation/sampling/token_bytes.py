"""The bytes that a token adds to the text, for tokens that are a part of a character.

    byte-level vocabularies      "ä½"          a letter stands for each byte, by the alphabet of GPT-2
    byte-fallback tokens         "<0xE4>"      the byte in hexadecimal

Source: GPT-2's `bytes_to_unicode`; tokenizers' decoders ByteLevel and ByteFallback.
"""

from __future__ import annotations

import re

from gridsieve.services.generation.sampling.detokenizer import Tokenizer

# Bytes whose letter is their own character. The others have the characters from 256 on, in order.
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """The bytes of a token whose decoded text has the replacement character.

    text: what it decodes to, which is in the vocabulary as it is if the token is no part of a character.
    """
    token = tokenizer.id_to_token(token_id) or text
    if fallback := _FALLBACK.fullmatch(token):
        return bytes.fromhex(fallback[1])
    if all(letter in _BYTES for letter in token):
        return bytes(_BYTES[letter] for letter in token)
    return text.encode()
