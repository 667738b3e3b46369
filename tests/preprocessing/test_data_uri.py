"""data: URIs, held to RFC 2397 by encoders that know nothing of the decoder."""

from __future__ import annotations

import base64
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.contract.errors import InvalidRequest
from services.preprocessing.fetch.urls import decode_data_uri


@given(st.binary())
@example(b"=3D%41=\n=")
def test_what_was_encoded_is_decoded(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert decode_data_uri(f"data:video/mp4;base64,{encoded}") == data
    assert decode_data_uri(f"data:;base64,{quote_from_bytes(encoded.encode(), safe='')}") == data
    assert decode_data_uri(f"data:video/mp4,{quote_from_bytes(data, safe='')}") == data
    assert decode_data_uri("data:," + "".join(f"%{byte:02x}" for byte in data)) == data


@pytest.mark.parametrize(
    ("uri", "data"),
    [
        ("data:,A%20brief%20note", b"A brief note"),
        ("DATA:text/plain;charset=US-ASCII;BASE64,QQ==", b"A"),
        ("data:;base64;x=y,QQ==", b"QQ=="),
        ("data:,a,b", b"a,b"),
        ("data:,a=41+_#fragment", b"a=41+_"),
        ("data:,", b""),
    ],
)
def test_the_form_is_that_of_rfc_2397(uri: str, data: bytes) -> None:
    assert decode_data_uri(uri) == data


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("data:", "must be data:"),
        ("data:image/png;base64", "must be data:"),
        ("http://example.org/,", "must be data:"),
        ("data:,é", "in ASCII"),
        ("data:,%4", "two hexadecimal digits"),
        ("data:,%zz", "two hexadecimal digits"),
        ("data:;base64,%", "two hexadecimal digits"),
        ("data:;base64,QQ", "must be base64"),
        ("data:;base64,Q Q==", "must be base64"),
        ("data:;base64,QQ==QQ==", "must be base64"),
        ("data:;base64,Q-_=", "must be base64"),
    ],
)
def test_what_is_none_is_refused(uri: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_data_uri(uri)
