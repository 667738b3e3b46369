"""data: URLs follow RFC 2397, with percent escapes also around base64."""

from __future__ import annotations

import base64
import time
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridsieve.common.contract.data_urls import parse_data_url
from gridsieve.common.contract.errors import InvalidRequest


@given(st.binary())
@example(b"=3D%41=\n=")
def test_a_data_url_decodes_to_the_encoded_bytes(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert parse_data_url(f"data:video/mp4;base64,{encoded}").data == data
    assert parse_data_url(f"data:;base64,{quote_from_bytes(encoded.encode(), safe='')}").data == data
    assert parse_data_url(f"data:video/mp4,{quote_from_bytes(data, safe='')}").data == data


@pytest.mark.parametrize(
    ("url", "kind", "data"),
    [
        ("DATA:Text/Plain;charset=US-ASCII;BASE64,QQ==", "text/plain", b"A"),
        ("data:;base64;x=y,QQ==", "", b"QQ=="),
        ("data:,a,b", "", b"a,b"),
        ("data:image/png,a=41+_#fragment", "image/png", b"a=41+_"),
        ("data:,", "", b""),
    ],
)
def test_a_data_url_is_parsed_as_in_rfc_2397(url: str, kind: str, data: bytes) -> None:
    parsed = parse_data_url(url)
    assert (parsed.type, parsed.data) == (kind, data)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64", "must be data:"),
        ("data:,é", "in ASCII"),
        ("data:,%4", "two hexadecimal digits"),
        ("data:;base64,QQ", "must be base64"),
        ("data:;base64,Q Q==", "must be base64"),
    ],
)
def test_a_malformed_data_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        _ = parse_data_url(url).data


def test_a_long_url_without_a_comma_is_refused_at_once() -> None:
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="must be data:"):
        parse_data_url("data:" + "a" * 2**18)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("comma", [",", "%2C"])
def test_several_files_are_separated_by_commas(comma: str) -> None:
    assert parse_data_url(f"data:video/jpeg;base64,QQ=={comma}QUI%3D").files == (b"A", b"AB")
    with pytest.raises(InvalidRequest, match="separated by commas"):
        _ = parse_data_url("data:video/jpeg,A,B").files
